"""In which language a text is written: by its script, and where several languages share one, by
their commonest words and the letters that only some of them have.

Enough for whole answers in the thirty languages that IFEval asks for; a guess for single words.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import cache

SEEN = 20_000  # characters that are looked at
# beginnings of the Unicode names of letters
SCRIPTS = {
    "LATIN": (
        "en", "de", "fr", "es", "pt", "it", "nl", "pl", "fi", "sv", "vi", "sw", "tr", "id", "ro",
    ),
    "CYRILLIC": ("ru", "uk", "bg"),
    "ARABIC": ("ar", "fa", "ur"),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "CJK": ("zh",),
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "HANGUL": ("ko",),
    "GREEK": ("el",),
    "HEBREW": ("he",),
    "THAI": ("th",),
    "BENGALI": ("bn",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "KANNADA": ("kn",),
    "MALAYALAM": ("ml",),
    "GUJARATI": ("gu",),
    "GURMUKHI": ("pa",),
}  # fmt: skip
LANGUAGES = frozenset(code for codes in SCRIPTS.values() for code in codes)
WORDS = {
    "en": "the of and to in is that it for was on are with as be this have from or by not you he"
    " she they we his her their what which there can will would my your do has been i a an but",
    "de": "der die das und ist nicht ein eine zu den mit von sich auf für im dem des auch es ich"
    " sie wir er aus bei nach einer oder wie wird sind war hat werden als an so aber",
    "fr": "le la les des et est une un que qui dans pour pas sur au du en ne ce il elle nous vous"
    " avec plus sont par être cette mais ou je se aux ses son leur",
    "es": "el la los las de que y en un una es por con para no se del al lo como más pero sus le"
    " este esta son fue muy ha hay o su yo nos también cuando todo",
    "pt": "o a os as de que e em um uma é por com para não se do da dos das no na ao mais mas seu"
    " sua como foi são ou muito ele ela você também quando eu isso pela pelo",
    "it": "il lo la gli le di che e è un una per con non si del della dei in sono come ma anche più"
    " nel alla questo questa ha mi ci io al dal sua suo tutto delle",
    "nl": "de het een en van is niet dat in op te zijn met voor aan er maar om ook als bij door"
    " naar ze hij wij je werd wordt heeft deze dit over",
    "pl": "i w na z nie się że do jest to jak co po o za od ale tak przez są dla jego ją tym był"
    " czy który która być oraz bardzo już tylko ich",
    "fi": "ja on ei se että hän oli mutta ovat joka kuin myös tai niin kun jos mitä sen voi ole"
    " olla minä sinä me te he tämä nyt vain hyvin kanssa sekä",
    "sv": "och att det som en på är av för med den till inte har om ett men var jag han hon vi de"
    " så kan från eller när också mycket",
    "vi": "và của là có không được cho một những các này trong với người để đã khi từ đó về như tôi"
    " bạn rất nhiều hoặc cũng sẽ vào ra",
    "sw": "na ya wa ni kwa katika za la cha hii kuwa kama au lakini sana yake wake huu hiyo watu"
    " moja pia ambayo yangu wangu si hivyo ili kila baada tu",
    "tr": "ve bir bu için ile de da ne çok daha gibi ama olarak olan en kadar var mı ben sen o"
    " değil ya her sonra",
    "id": "yang dan di dengan untuk dari ini itu adalah tidak pada dalam akan ke ada saya anda juga"
    " bisa atau karena oleh lebih sangat",
    "ro": "și de la în nu a este cu pe o un că mai care din pentru sunt au fost ce sau fi dar prin"
    " foarte",
    "ru": "и в не на что я с он как это по но из у за от так же вы бы был она они мы для все его"
    " только или если когда еще есть очень",
    "uk": "і в не на що я з він як це по але із у за від так же ви був вона вони ми для все його"
    " тільки або якщо коли ще є дуже та й про",
    "bg": "и в не на че аз с той как това по но от за са е съм ще се да ние те вие тя бе както или"
    " ако когато още много си към",
    "ar": "في من على إلى أن هذا هذه التي الذي ما لا عن مع كان هو هي أو ثم كل قد لم إن بعد بين",
    "fa": "در به از که این را با است برای آن یک می ها تا بر هم اما یا خود شد شود بود کرد ما من",
    "ur": "کے کی کا میں ہے اور سے کو نے پر ہیں یہ کہ اس بھی ایک تھا نہیں جو وہ تو ہو کر ہم آپ",
    "hi": "है के में की और का को से हैं यह पर इस एक नहीं भी कि था ने जो हो तो कर ही वह थे आप मैं लिए",
    "mr": "आहे आणि या हे ते की मध्ये नाही एक आहेत होते मी तो ती त्या साठी पण हा ही होता आम्ही तुम्ही खूप आपण",
    "ne": "छ र को मा यो पनि हो छन् लाई बाट गर्न एक थियो भएको गरेको हुन् तर म हामी तपाईं धेरै गर्छ छैन",
}
LETTERS = {
    "de": "äöüß",
    "es": "ñ¿¡",
    "pt": "ãõ",
    "pl": "ąęłńśźż",
    "fi": "äö",
    "sv": "åäö",
    "vi": "ăđơưạảấầẩậắằặẹẻếềểệịọỏốồổộớờởợụủứừửựỳỵỷ",
    "tr": "ğışç",
    "ro": "ășț",
    "ru": "ыэё",
    "uk": "іїєґ",
    "bg": "ъщ",
    "fa": "پچگژ",
    "ur": "ٹڈڑںےہھ",
    "mr": "ळ",
}


def languages_of(text: str) -> tuple[str, ...]:
    """The ISO 639-1 codes of the languages that it may be written in: one where the words tell,
    several where they do not (a name, an exclamation), none where there are no letters.

    >>> languages_of("Where is the station?"), languages_of("Wo ist der Bahnhof?")
    (('en',), ('de',))
    >>> languages_of("42"), languages_of("Погода!")
    ((), ('ru', 'uk', 'bg'))
    """
    text = unicodedata.normalize("NFC", text[:SEEN]).lower()
    scripts = Counter(script for ch in text if ch.isalpha() and (script := _script(ch)) is not None)
    if not scripts:
        return ()
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts["CJK"]:
        scripts["HIRAGANA"] += scripts.pop("CJK", 0) + scripts.pop("KATAKANA", 0)
    candidates = SCRIPTS[scripts.most_common(1)[0][0]]
    evidence = _evidence(text, candidates)
    most = max(evidence.values())
    return tuple(code for code in candidates if evidence[code] == most)


def _evidence(text: str, candidates: tuple[str, ...]) -> dict[str, float]:
    """Every common word counts for the languages that have it, and less where several do."""
    counts = Counter(_words(text))
    letters = Counter(text)
    found = dict.fromkeys(candidates, 0.0)
    if len(candidates) == 1:
        return found
    for code in candidates:
        for word in _common(code):
            shared = sum(word in _common(other) for other in candidates)
            found[code] += counts[word] / shared
        found[code] += sum(letters[ch] for ch in LETTERS.get(code, "")) / 4
    return found


def _words(text: str) -> list[str]:
    """Vowel signs are no letters to Python, and belong to words all the same."""
    separated = "".join(
        ch if ch.isalpha() or unicodedata.category(ch) in ("Mn", "Mc") else " " for ch in text
    )
    return separated.split()


@cache
def _common(code: str) -> frozenset[str]:
    return frozenset(WORDS[code].split())


@cache
def _script(ch: str) -> str | None:
    name = unicodedata.name(ch, "")
    return next((script for script in SCRIPTS if name.startswith(script)), None)
