"""The 25 kinds of instructions of IFEval (Zhou et al. 2023, 2311.07911), each a function of the
answer and of what the row says about it.

Two of them need what no rule decides: where a sentence ends (`sentences`), and which language a
text is in (`languages.py`). Words of a row are taken as they are, never as regular expressions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from reinforge.core.errors import InputError
from reinforge.evals.benchmarks.languages import LANGUAGES, languages_of

RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "less than": lambda found, wanted: found < wanted,
    "at least": lambda found, wanted: found >= wanted,
}
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
# before a full stop that ends no sentence
ABBREVIATIONS = frozenset(
    (
        *("mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "hon", "rev", "gen", "gov", "sen"),
        *("inc", "ltd", "corp", "dept", "vs", "etc", "e.g", "i.e", "a.m", "p.m", "u.s", "u.k"),
        *("ph.d", "fig", "vol", "approx", "jan", "feb", "apr", "jun", "jul", "aug", "sep", "sept"),
        *("oct", "nov", "dec"),
    )
)
_STOP = re.compile(r"([.!?]+|[。！？।])([\"'”’)\]*]*)(?=\s|$|(?<=[。！？।]))")
_WORDS = re.compile(r"\w+")
_TOKENS = re.compile(r"\w+(?:[-./&]\w+)*|'\w+")
_CONTRACTION = re.compile(r"(\w+?)(n't|'(?:s|m|d|ll|re|ve))\b", re.IGNORECASE)


def keywords_exist(text: str, keywords: Sequence[str]) -> bool:
    return all(_count(text, word) > 0 for word in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return RELATIONS[relation](_count(text, keyword), frequency)


def no_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(
        re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words
    )


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return RELATIONS[let_relation](text.lower().count(letter.lower()), let_frequency)


def response_language(text: str, language: str) -> bool:
    """A text without letters is in every language."""
    return language in (languages_of(text) or (language,))


def number_of_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return RELATIONS[relation](sentences(text), num_sentences)


def number_of_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Separated by `***`; none between two separators may be empty."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = parts[1:-1]
    if any(not part.strip() for part in inner):
        return False
    ends = [part for part in (parts[0], *(parts[-1:] if len(parts) > 1 else [])) if part.strip()]
    return len(inner) + len(ends) == num_paragraphs


def number_of_words(text: str, num_words: int, relation: str) -> bool:
    return RELATIONS[relation](len(_WORDS.findall(text)), num_words)


def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Paragraphs have an empty line between them."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if nth_paragraph > count or not 0 < nth_paragraph <= len(parts):
        return False
    words = parts[nth_paragraph - 1].split()
    if not words:
        return False
    first = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'))[0]
    return count == num_paragraphs and first.lower() == first_word.lower()


def number_of_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(known.get(marker) or re.escape(marker.lower()), text.lower()) is not None


def number_of_bullets(text: str, num_bullets: int) -> bool:
    stars = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def constrained_response(text: str) -> bool:
    return any(option in text for option in CONSTRAINED)


def number_of_highlights(text: str, num_highlights: int) -> bool:
    single = re.findall(r"\*[^\n*]*\*", text)
    double = re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(part.strip("*").strip()) for part in single + double) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    headings = re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)
    return len(headings) >= num_sections


def json_format(text: str) -> bool:
    inside = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        inside = inside.removeprefix(fence)
    try:
        json.loads(inside.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    return any(found.lstrip("<").rstrip(">").strip() for found in re.findall(r"<<[^\n]+>>", text))


def two_responses(text: str) -> bool:
    """Two different ones, with `******` between them."""
    parts = text.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    said = [part.strip() for part in parts if part.strip()]
    return len(said) == 2 and said[0] != said[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def in_quotation_marks(text: str) -> bool:
    said = text.strip()
    return len(said) > 1 and said[0] == '"' == said[-1]


def capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    apart = _CONTRACTION.sub(r"\1 \2", text)
    return RELATIONS[capital_relation](
        sum(word.isupper() for word in _TOKENS.findall(apart)), capital_frequency
    )


def all_capitals(text: str) -> bool:
    return text.isupper() and response_language(text, "en")


def all_lowercase(text: str) -> bool:
    return text.islower() and response_language(text, "en")


def no_comma(text: str) -> bool:
    return "," not in text


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": keywords_exist,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": no_forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_of_sentences,
    "length_constraints:number_paragraphs": number_of_paragraphs,
    "length_constraints:number_words": number_of_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_of_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_of_bullets,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_of_highlights,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": ends_with,
    "startend:quotation": in_quotation_marks,
    "change_case:capital_word_frequency": capital_words,
    "change_case:english_capital": all_capitals,
    "change_case:english_lowercase": all_lowercase,
    "punctuation:no_comma": no_comma,
}


def arguments(kind: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a row says to an instruction, checked; raises InputError (without a place)."""
    if kind not in CHECKS:
        raise InputError(
            f"instruction_id_list has {kind!r:.80}, which is no kind of instruction.",
            fix=f"There are: {', '.join(CHECKS)}.",
        )
    # the function's own annotations say what it takes; nulls are columns of other kinds
    wanted = {k: v for k, v in CHECKS[kind].__annotations__.items() if k not in ("text", "return")}
    found: dict[str, Any] = {name: (given or {}).get(name) for name in wanted}
    for name, value in found.items():
        if not _fits(name, wanted[name], value):
            raise InputError(f"kwargs of {kind} have {name}={value!r:.80}.")
    return {name: int(v) if wanted[name] == "int" else v for name, v in found.items()}


def _fits(name: str, kind: str, value: Any) -> bool:
    if kind == "int":
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
        )
    if kind == "Sequence[str]":
        return isinstance(value, list | tuple) and all(isinstance(v, str) and v for v in value)
    if name.endswith("relation"):
        return value in RELATIONS
    if name == "language":
        return value in LANGUAGES
    return isinstance(value, str) and bool(value.strip())


def follows(kind: str, given: Mapping[str, Any], text: str) -> bool:
    """Whether the answer follows the instruction; an empty one follows none."""
    return bool(text.strip()) and CHECKS[kind](text, **given)


def variants(text: str) -> Iterator[str]:
    """What the loose verdict looks at: the answer without its first line, its last, or both
    (which often talk about the answer), each with and without the stars of Markdown.
    """
    lines = text.split("\n")
    for part in (lines, lines[1:], lines[:-1], lines[1:-1]):
        whole = "\n".join(part).strip() if part is not lines else text
        yield whole
        yield whole.replace("*", "")


def sentences(text: str) -> int:
    """How many sentences there are: an end mark before a space, unless it belongs to an
    abbreviation, an initial or the number of a list. What follows the last end is one more.

    >>> sentences("Dr. Ito paid 3.50 at 5 p.m. for it. Why? No idea"), sentences("")
    (3, 0)
    """
    count = 0
    start = 0
    for end in _STOP.finditer(text):
        before = text[start : end.start()].strip()
        after = text[end.end() :].lstrip()[:1]
        word = before.rpartition(" ")[2].lower().lstrip("(\"'“")
        dotted = set(end.group(1)) == {"."}
        if dotted and (
            word in ABBREVIATIONS or (len(word) == 1 and word.isalpha() and word != "i")
        ):
            continue
        if dotted and word.isdecimal() and before == word:  # 1. of a list
            continue
        if dotted and after.islower():
            continue
        if any(ch.isalnum() for ch in before):
            count += 1
        start = end.end()
    return count + any(ch.isalnum() for ch in text[start:])


def _count(text: str, word: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))
