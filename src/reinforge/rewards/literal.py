"""Numbers as people write them at the end of a computation: literals, reduced fractions, percents,
with or without a unit.

The reward `math` asks this module whether an answer is a number or still a computation: where the
gold answer is a rational number, `12 + 13`, `144/12` and `12^2` are the question again, and 25, 3/4
and 50% are answers. What is read is decided by a grammar, not by a list of forbidden operators, so
that a new way to write a computation is not a way around it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MOST_EXPONENT = 300  # of scientific notation

_SPACES = re.compile(
    r"\\(?:[,;: ]|quad\b|qquad\b|displaystyle\b|left(?![A-Za-z])|right(?![A-Za-z])|text\s*\{\s*\})"
    r"|~|\s+"
)
_WHOLE = r"[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+|[0-9]+"
_DECIMAL = rf"(?:(?:{_WHOLE})(?:\.[0-9]*)?|\.[0-9]+)"
_BRACED = r"\{ ?([-+]?[0-9]+) ?\}"
_OVER = (
    rf"(?:\\[dtc]?frac ?(?:{_BRACED}|([0-9])) ?(?:{_BRACED}|([0-9]))"
    r"|\{ ?([-+]?[0-9]+) ?\\over ?([0-9]+) ?\})"  # {3 \over 4}
)
_SLASH = rf"(?:{_BRACED}|([0-9]+)) ?(?:/|\\over(?![A-Za-z])) ?(?:{_BRACED}|([0-9]+))"
_POWER = r"10 ?\^ ?(?:\{ ?([-+]?[0-9]{1,3}) ?\}|([-+]?[0-9]))"
_TIMES = r"(?:\\times|\\cdot|[×·*])"

_FORMS: dict[str, re.Pattern[str]] = {
    "decimal": re.compile(
        rf"((?:{_WHOLE})?\.[0-9]+) ?(?:\\[lc]?dots(?![A-Za-z])|…|\.\.\.)|({_DECIMAL})"  # 3.14\ldots
    ),
    "fraction": re.compile(rf"(?:{_OVER}|{_SLASH})"),
    "mixed": re.compile(rf"([0-9]+)(?: ?{_OVER}| {_SLASH})"),
    "scientific": re.compile(rf"({_DECIMAL})(?: ?{_TIMES} ?{_POWER}|[eE]([-+]?[0-9]{{1,3}}))"),
}
_SIGNED = re.compile(r"(?:([-+]) ?)?(?:\\?\$ ?)?(?:([-+]) ?)?")  # -$5, $-5
_PERCENT = (
    r"(?P<percent>\\?%|\\text ?\{ ?(?:\\?%|percent|percentage|pct)"
    r" ?\}|(?:percentage|percent|pct)\b)"
)
_STYLED = r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|mbox|operatorname)"
_POWERED = r"(?: ?\^ ?(?:\{ ?-?[1-3] ?\}|[1-3]))?"
_WORDS = rf"{_STYLED} ?\{{[^{{}}0-9]*[A-Za-z¢€£¥][^{{}}0-9]*\}}"
_UNIT = (
    rf"(?:{_WORDS}{_POWERED}(?: ?/ ?(?:{_WORDS}|[A-Za-z]{{1,10}}){_POWERED})?"  # \text{ cm}^2
    # \text{ (mod 7)}
    rf"|{_STYLED} ?\{{ ?\( ?mod [0-9]+ ?\) ?\}}|\\pmod ?(?:\{{ ?[0-9]+ ?\}}|[0-9])"
    r"| \([A-Za-z]{3}[A-Za-z. ]*\)|''?|[′″¢]"  # 25 (people), 5''
    # 90^\circ
    r"|(?:\^ ?(?:\{ ?\\circ ?\}|\\circ)|°|\\degree) ?(?:[CF]|\\(?:text|mathrm) ?\{ ?[CF] ?\})?"
    r"|_ ?(?:10|\{ ?10 ?\})|\\?\$)"
)
_TAIL = re.compile(rf"(?: ?{_PERCENT})?(?: ?{_UNIT})?(?: ?(?P<word>[A-Za-z][A-Za-z. ]*))? ?")

_NO_NAMES = (  # commands that compute or compare; what holds them is no name
    r"(?:[dtc]?frac|sqrt|over|cdot|times|ast|div|pm|mp|sum|prod|int|binom|choose|cup|cap"
    r"|[lg]eq?|[lg]t|neq?|equiv|sim|bmod|mod|pmod|infty)(?![A-Za-z])"
)
_DIFFERENTIAL = r"\{ ?(?:d|\\partial)(?![a-z]{2})[^{}]*\}"
_NAME_PART = (
    rf"(?:\\[dt]?frac ?{_DIFFERENTIAL} ?{_DIFFERENTIAL}"  # \frac{dy}{dx}
    rf"|{_STYLED} ?\{{[^{{}}0-9=]*\}}"  # \text{Area}
    # \theta, \overline{AB}
    rf"|\\(?!{_NO_NAMES}|(?:{_STYLED[2:]})(?![A-Za-z]))[A-Za-z]+(?![A-Za-z])(?: ?\{{[A-Za-z ]*\}})?"
    r"|[A-Za-z][0-9]*"  # every part begins as no other can go on: nothing is read twice
    r"|_ ?(?:\{[^{}]*\}|[A-Za-z0-9])"
    # f^{-1}(2), f^\prime
    r"|\^ ?(?:\{ ?-1 ?\}(?= ?\()|\{ ?\\prime ?\}|\\prime(?![A-Za-z])|\{ ?\* ?\}|\*)"
    r"|[' ])"
)
_NAME = re.compile(
    rf"(?=[A-Za-z\\(\[])(?:\([A-Za-z\\][A-Za-z0-9_{{}}\\' ]*(?:,[A-Za-z0-9_{{}}\\' ]*)+\)"  # (x, y)
    rf"|\[[A-Za-z ]+\]|{_NAME_PART})(?:{_NAME_PART}|\([^()=]{{0,40}}\)|=)*"  # [ABC], f(3)
)
_JOINS = re.compile(r"\^ ?(?:[2-9]|\{ ?[2-9] ?\})()|[-+*/]|\\(?:cdot|times)(?![A-Za-z])")
_RELATION = re.compile(r"(?<![<>!:])=|\\(?:approx|in)(?![A-Za-z])|[≈∈]")
_VALUES = {"i", "j", "e", "pi"}  # words that are numbers, not units
_WRAPPED = re.compile(rf"{_STYLED} ?\{{ ?([^{{}}]*) ?\}}")
_BRACKETS = (("(", ")"), ("{", "}"), ("[", "]"), (r"\{", r"\}"))
_INFINITE = re.compile(r"[-+]? ?(?:\\infty|infinity|∞)")
_BETWEEN = re.compile(r",|;|\\text ?\{ ?(?:and|or) ?\}|\b(?:and|or)\b")


@dataclass(frozen=True, slots=True)
class NumberLiteral:
    """One number: its exact value (a percent's is what stands before the sign), and how it is
    written."""

    value: Fraction
    # ("decimal",), ("fraction", 3, 4), ("mixed", 2, 1, 2), ("scientific", -3)
    form: tuple[str, *tuple[int, ...]]
    # nothing is left to compute: a decimal, a reduced fraction, a mantissa from 1 to 10
    settled: bool
    percent: bool = False
    word: str = ""  # a unit without \\text around it; whether it is one is not decided here

    @property
    def ratio(self) -> bool:
        """Written as a fraction, not in decimals."""
        return self.form[0] in ("fraction", "mixed")

    def final(self, gold: NumberLiteral) -> bool:
        """Whether nothing is left to compute, or it is written as the gold answer is."""
        return self.settled or self.form == gold.form

    @property
    def text(self) -> str:
        """The number without its unit, in one way of writing, for a parser of LaTeX."""
        value = self.value
        written = str(value.numerator) if value.denominator == 1 else _written(value)
        return written + (r"\%" if self.percent else "") + (f" {self.word}" if self.word else "")


def _written(value: Fraction) -> str:
    """
    >>> _written(Fraction(-5, 4)), _written(Fraction(1, 3))
    ('-1.25', '\\\\frac{1}{3}')
    """
    twos = 0
    rest = value.denominator
    while rest % 10 in (2, 4, 6, 8, 0, 5) and twos <= 2 * MOST_EXPONENT and rest > 1:
        rest = rest // 2 if rest % 2 == 0 else rest // 5
        twos = twos + 1
    sign = "-" if value < 0 else ""
    if rest > 1:
        return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    digits = str(abs(value.numerator) * 10**twos // value.denominator).rjust(twos + 1, "0")
    return f"{sign}{digits[:-twos]}.{digits[-twos:].rstrip('0')}"


def spaced(text: str) -> str:
    """LaTeX's ways to write a space, as one space; a typographic minus as a minus."""
    text = text.replace(r"\!", "").replace("−", "-")
    return _SPACES.sub(" ", text).strip()


def unnamed(text: str, *, joined: bool = False) -> str:
    """What stands after the last `=`, `\\approx` or `\\in` outside brackets, if only a name stands
    before it: a symbol, a function's value, words, a tuple of symbols. Otherwise all of it, spaced.
    With `joined` names may be joined by operators, as in `a + b = 5`: an answer where a number is
    wanted, and an equation where none is.

    >>> unnamed(r"(x,y) = (1,2)"), unnamed(r"\\theta = 30^\\circ"), unnamed("25 = 12+13")
    ('(1,2)', '30^\\\\circ', '25 = 12+13')
    """
    text = spaced(text)
    depth = seen = 0
    last = None
    for relation in _RELATION.finditer(text):
        between = text[seen : relation.start()]
        depth += sum(map(between.count, "{([")) - sum(map(between.count, "})]"))
        seen = relation.start()
        last = relation if depth == 0 else last
    if last is None:
        return text
    left = text[: last.start()].strip()
    names = (
        _JOINS.sub(lambda join: "" if join.group(1) is not None else "\n", left) if joined else left
    )
    if not all(_NAME.fullmatch(name.strip()) for name in names.split("\n")):
        return text
    return text[last.end() :].strip()


def literal(text: str, *, joined: bool = False) -> NumberLiteral | None:
    """The number that `text` is, units and a name before it aside (`unnamed` says what `joined`
    is); None if it is anything else.

    >>> literal("1,234").value, literal(r"x = \\frac{3}{4}").value
    (Fraction(1234, 1), Fraction(3, 4))
    >>> literal(r"12\\,+\\,13"), literal("144/12").settled
    (None, False)
    """
    text = unnamed(text, joined=joined)
    inside = _unwrapped(text)
    if inside != text and "," in inside:  # (1,234) is a point
        return None
    sign = _SIGNED.match(inside)
    assert sign is not None
    if sign.group(1) and sign.group(2):
        return None
    negative = "-" in (sign.group(1), sign.group(2))
    start = sign.end()
    for kind in ("scientific", "mixed", "fraction", "decimal"):
        found = _FORMS[kind].match(inside, start)
        tail = found and _TAIL.fullmatch(inside, found.end())
        if found and tail and not _VALUES.intersection((tail.group("word") or "").split()):
            number = _number(kind, [g for g in found.groups() if g is not None], negative)
            return number and NumberLiteral(
                *number, tail.group("percent") is not None, (tail.group("word") or "").strip()
            )
    return None


def _unwrapped(text: str) -> str:
    """Without brackets, or a style such as \\textbf, around all of it."""
    for _ in range(3):
        if styled := _WRAPPED.fullmatch(text):
            text = styled.group(1).strip()
        for opening, closing in _BRACKETS:
            inner = text[len(opening) : len(text) - len(closing)]
            around = text.startswith(opening) and text.endswith(closing)
            if (
                around
                and not any(c in inner for c in "()[]")
                and (opening != "{" or "{" not in inner)
            ):
                text = inner.strip()
                break
    return text


def _number(
    kind: str, parts: Sequence[str], negative: bool
) -> tuple[Fraction, tuple[str, *tuple[int, ...]], bool] | None:
    sign = -1 if negative else 1
    if kind == "decimal":
        return sign * _decimal(parts[0]), ("decimal",), True
    if kind == "scientific":
        mantissa = _decimal(parts[0])
        exponent = int(parts[1])
        if abs(exponent) > MOST_EXPONENT:
            return None
        return (
            sign * mantissa * Fraction(10) ** exponent,
            ("scientific", exponent),
            1 <= mantissa < 10 and exponent != 0,
        )
    *whole, above, below = (int(p) for p in parts)
    if below == 0 or (whole and min(above, below) < 0):
        return None
    reduced = math.gcd(above, below) == 1 and abs(below) > 1 and max(above, below) > 0
    if whole:  # 2\frac{1}{2}; 24\frac{2}{2} is a sum
        proper = reduced and 0 < above < below and whole[0] > 0
        value = sign * (whole[0] + Fraction(above, below))
        return value, ("mixed", whole[0], above, below), proper
    return sign * Fraction(above, below), ("fraction", sign * above, below), reduced


def _decimal(text: str) -> Fraction:
    text = text.replace("{,}", "").replace(",", "")
    return Fraction(text + "0" if text.endswith(".") else text)


def listed(text: str) -> list[str] | None:
    """The items of a tuple, a set, an interval or an enumeration, a name before it aside; None if
    there are not several."""
    text = unnamed(text)
    pairs = ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"), (r"\{", r"\}")
    inside = next(
        (
            text[len(a) : len(text) - len(b)]
            for a, b in pairs
            if text.startswith(a) and text.endswith(b)
        ),
        text,
    )
    items = [item.strip() for item in _BETWEEN.split(inside) if item.strip()]
    return items if len(items) > 1 else None


def is_number_or_infinite(text: str) -> bool:
    """Of the items of a list: a settled number, or an infinity as intervals have it."""
    found = literal(text)
    return (found is not None and found.settled) or _INFINITE.fullmatch(spaced(text)) is not None
