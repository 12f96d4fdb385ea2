"""IFEval's kinds of instructions: answers that follow each of them and answers that do not."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from reinforge.core.errors import InputError
from reinforge.evals.benchmarks import instructions, languages
from reinforge.evals.benchmarks.instructions import CHECKS, arguments, follows, sentences, variants
from reinforge.evals.benchmarks.languages import LANGUAGES, languages_of

# kind, what the row says, answers that follow it, answers that do not
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["river", "Boat"]},
        ["A boat on the River.", "riverboats"],
        ["A boat.", "r i v e r boat", ""],
    ),
    (
        "keywords:frequency",
        {"keyword": "ha", "frequency": 3, "relation": "at least"},
        ["Ha ha ha", "hahaha"],
        ["ha ha"],
    ),
    (
        "keywords:frequency",
        {"keyword": "a.c", "frequency": 1, "relation": "less than"},
        ["abc abc"],  # a word, not a regular expression
        ["an a.c unit"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat", "(a+)+$"]},
        ["concatenate", "a" * 5000 + "!"],
        ["My CAT.", "cat"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
        ["Quite quick"],
        ["quite"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_frequency": 2, "let_relation": "less than"},
        ["Oh!"],
        ["Oh!!"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        ["Das Wetter ist heute schön, und wir gehen nach draußen.", "42"],
        ["The weather is nice today, and we go outside.", "Сегодня хорошая погода."],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        ["One. Two! Three?"],
        ["One and 2.5 and e.g. this. Two", "Dr. A. Smith. And I."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "***\none\n***\ntwo\n***"],
        ["one\n\ntwo", "one\n***\n***\ntwo", "one"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "less than"},
        ["one two three", "it's me"],
        ["one two three four", "it's not me"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weather"},
        ["Hello.\n\nWeather, then.", 'Hello.\n\n"weather." it said'],
        ["Hello.\n\nThe weather", "weather", "A.\n\nWeather\n\nB.", "Hello\n\n\n\nx"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] of [city]", "[][]"],
        ["[name]", "[a\nb] [c]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye\nP.S. More", "bye p. s. more"],
        ["Bye. PS more", "P.P.S more"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["Bye\nP.P.S. more"],
        ["Bye\nP.S. more"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "Two:\n- a\n  - b"],
        ["* a", "* a\n* b\n- c", "** a\n** b"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is maybe.", "Well. My answer is no. Sorry."],
        ["My answer is perhaps.", "my answer is yes."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** and **two**"],
        ["*one*", "** ** **", "*one\ntwo*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "Section1 Section2"],
        ["Section 1\na", "Section A\nSection B", "SECTION 1 SECTION 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', '```json\n{"a": [1, 2]}\n```'],
        ["{a: 1}", 'Here: {"a": 1}', "[" * 100_000],
    ),
    ("detectable_format:title", {}, ["<<A day>>\nIt was"], ["<< >>", "<A day>", "<<A\nday>>"]),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "******one******two"],
        ["one", "one******one", "one******two******three", "one************two"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say it. "},
        ["SAY IT. Yes."],
        ["Yes. Say it.", "Say"],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Any questions?"},
        ["Done. Any questions?", '"Done. any questions?"'],
        ["Any questions? No.", "Any questions"],
    ),
    ("startend:quotation", {}, ['"Hello."', ' "a" b "c" '], ['"Hello.', '"', "'Hello.'"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["I AM here", "NASA and the US"],
        ["Am here, I", "one", "NASA-led"],
    ),
    (
        "change_case:english_capital",
        {},
        ["THE DOG IS HERE.", "OK!"],
        ["THE DOG is HERE.", "DER HUND IST NICHT HIER UND DAS IST SCHÖN.", "123"],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["the dog is here."],
        ["The dog is here.", "der hund ist nicht hier und das ist schön."],
    ),
    ("punctuation:no_comma", {}, ["One and two."], ["One, two."]),
]


def test_all_25_kinds_have_cases() -> None:
    assert len(CHECKS) == 25 and {case[0] for case in CASES} == set(CHECKS)


@pytest.mark.parametrize(("kind", "given", "good", "bad"), CASES)
def test_who_follows(kind: str, given: dict[str, Any], good: list[str], bad: list[str]) -> None:
    # as the hub's rows have it: every key of any kind, most of them null
    told = arguments(kind, {"num_words": None, "keywords": None, "language": None} | given)
    assert [text for text in good if not follows(kind, told, text)] == []
    assert [text for text in bad if follows(kind, told, text)] == []


@pytest.mark.parametrize("kind", CHECKS)
def test_nothing_follows_nothing(kind: str) -> None:
    given = next(case[1] for case in CASES if case[0] == kind)
    assert not follows(kind, arguments(kind, given), " \n ")


def test_loose_looks_past_what_stands_around_an_answer() -> None:
    text = 'Sure, here it is:\n{"a": 1}\nHope that helps!'
    assert not follows("detectable_format:json_format", {}, text)
    assert any(follows("detectable_format:json_format", {}, v) for v in variants(text))
    assert any(follows("startend:quotation", {}, v) for v in variants('**"Hello."**'))
    assert not any(follows("punctuation:no_comma", {}, v) for v in variants("a\nb, c\nd"))
    assert len(list(variants(text))) == 8


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("length_constraints:number_words", {"num_words": 3}, "relation=None"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "about"}, "about"),
        ("length_constraints:number_words", {"num_words": 2.5, "relation": "at least"}, "2.5"),
        ("keywords:existence", {"keywords": "river"}, "river"),
        ("keywords:existence", {"keywords": [""]}, "keywords"),
        ("language:response_language", {"language": "tlh"}, "tlh"),
        ("keywords:rhyme", {}, "no kind of instruction"),
    ],
)
def test_what_a_row_must_say(kind: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        arguments(kind, given)


def test_numbers_that_came_as_floats() -> None:
    assert arguments("length_constraints:number_paragraphs", {"num_paragraphs": 2.0}) == {
        "num_paragraphs": 2
    }


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("No end", 1),
        ("Mr. B. Lee is 3.5 years old, i.e. small. Is he? Yes!!", 3),
        ('He said "Go." Then he went.', 2),
        ("1. Wash it.\n2. Dry it.", 2),
        ("Wait... what", 1),
        ("これは文です。二つ目です。", 2),
        ("." * 5000, 0),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert sentences(text) == count


WRITTEN = {
    "en": "My brother has a small garden behind the house, and he is there every evening.",
    "es": "Mi hermano tiene un jardín pequeño detrás de la casa y está allí todas las tardes.",
    "pt": "O meu irmão tem um jardim pequeno atrás da casa e não sai de lá à noite.",
    "fr": "Mon frère a un petit jardin derrière la maison, et il y est tous les soirs avec nous.",
    "it": "Mio fratello ha un piccolo giardino dietro la casa ed è lì tutte le sere con gli amici.",
    "de": "Mein Bruder hat einen kleinen Garten hinter dem Haus und ist jeden Abend dort.",
    "pl": "Mój brat ma mały ogród za domem i jest tam każdego wieczoru, bo bardzo go lubi.",
    "fi": "Veljelläni on pieni puutarha talon takana, ja hän on siellä joka ilta.",
    "vi": "Anh trai tôi có một khu vườn nhỏ sau nhà và buổi tối nào anh ấy cũng ở đó.",
    "sw": "Kaka yangu ana bustani ndogo nyuma ya nyumba, na yeye yuko huko kila jioni kwa sababu"
    " anaipenda sana.",
    "ru": "У моего брата есть маленький сад за домом, и он там каждый вечер.",
    "uk": "У мого брата є маленький сад за будинком, і він там щовечора.",
    "bg": "Брат ми има малка градина зад къщата и е там всяка вечер, защото я обича.",
    "ar": "لدى أخي حديقة صغيرة خلف المنزل، وهو هناك في كل مساء مع أصدقائه.",
    "fa": "برادرم یک باغ کوچک در پشت خانه دارد و هر شب با دوستانش در آن است.",
    "ur": "میرے بھائی کے گھر کے پیچھے ایک چھوٹا باغ ہے اور وہ ہر شام وہاں ہوتا ہے۔",
    "hi": "मेरे भाई के घर के पीछे एक छोटा बगीचा है और वह हर शाम वहाँ होता है।",
    "mr": "माझ्या भावाच्या घरामागे एक छोटी बाग आहे आणि तो रोज संध्याकाळी तिथे असतो.",
    "ne": "मेरो दाइको घर पछाडि सानो बगैंचा छ र उहाँ हरेक साँझ त्यहाँ हुनुहुन्छ।",
    "bn": "আমার ভাইয়ের বাড়ির পিছনে একটি ছোট বাগান আছে।",
    "th": "พี่ชายของฉันมีสวนเล็ก ๆ อยู่หลังบ้าน",
    "ta": "என் அண்ணனுக்கு வீட்டின் பின்னால் ஒரு சிறிய தோட்டம் உள்ளது.",
    "te": "మా అన్నయ్యకు ఇంటి వెనుక ఒక చిన్న తోట ఉంది.",
    "kn": "ನನ್ನ ಅಣ್ಣನಿಗೆ ಮನೆಯ ಹಿಂದೆ ಒಂದು ಸಣ್ಣ ತೋಟವಿದೆ.",
    "ml": "എന്റെ ചേട്ടന് വീടിന്റെ പിന്നിൽ ഒരു ചെറിയ തോട്ടമുണ്ട്.",
    "gu": "મારા ભાઈના ઘરની પાછળ એક નાનો બગીચો છે.",
    "pa": "ਮੇਰੇ ਭਰਾ ਦੇ ਘਰ ਦੇ ਪਿੱਛੇ ਇੱਕ ਛੋਟਾ ਬਾਗ ਹੈ।",
    "ko": "우리 형은 집 뒤에 작은 정원이 있습니다.",
    "ja": "兄は家の裏に小さな庭を持っています。",
    "he": "לאחי יש גינה קטנה מאחורי הבית.",
    "zh": "我哥哥在房子后面有一个小花园。",
}


@pytest.mark.parametrize("code", WRITTEN)
def test_languages(code: str) -> None:
    assert code in LANGUAGES
    assert languages_of(WRITTEN[code]) == (code,)
    assert languages_of(WRITTEN[code].upper()) == (code,)


def test_a_few_foreign_words_change_nothing() -> None:
    text = f"The Russian word is Сад. {WRITTEN['en']}"
    assert languages_of(text) == ("en",) and languages_of("... 12 !") == ()


def test_examples_of_the_docstrings() -> None:
    for module in (instructions, languages):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed
