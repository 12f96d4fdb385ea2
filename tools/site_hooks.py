"""Hooks of mkdocs: what GitHub's Markdown and the site's read differently.

Equations are LaTeX: a block of the language `math`, or $`...`$ in a sentence or a table. GitHub and
GitLab draw both. Here they become MathML, which a browser draws without a script or a network.
"""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from xml.etree import ElementTree

ROW = re.compile(r"^\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$<code>(.*?)</code>\$")
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
CODE_IN_CELL = re.compile(r"(?<=<code>).*?(?=</code>)", re.DOTALL)
JOINT = re.compile(r"(?<=\w)([._/=])(?=\w)")
# What LaTeX knows and the converter does not say: how far apart signs stand.
FUNCTION = re.compile(r"<m[io]>([a-zA-Z]{2,})</m[io]>")
LARGE_BRACKET = '<mo stretchy="true" fence="true" minsize="'
SIGN = re.compile(
    r"(<mo[^>]*>(?:=|&#x0003D;|&#x00028;|\(|&#x0002C;)</mo>)<mo>(&#x02212;|&#x000B1;)</mo>"
)
THIN = "0.167em"
# elements of MathML that take a fixed number of others
CHILDREN = {
    "mfrac": 2,
    "msub": 2,
    "msup": 2,
    "munder": 2,
    "mover": 2,
    "msubsup": 3,
    "munderover": 3,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    r"""Blocks of equations, and: `\|` in the code of a table is a bar on GitHub, and a backslash
    with a bar here.
    """
    drawn = FENCE.sub(_block, markdown)
    return ROW.sub(lambda row: CODE.sub(_plain, row.group()), drawn)


def on_page_content(content: str, **_: Any) -> str:
    """Equations in a sentence: Markdown has made code of them, between two dollars. And where the
    code of a table may break on a phone: after a dot, not within a word.
    """
    drawn = INLINE.sub(lambda found: mathml(unescape(found[1]), "inline"), content)
    return CELL.sub(lambda cell: CODE_IN_CELL.sub(_may_break, cell.group()), drawn)


def _may_break(code: re.Match[str]) -> str:
    return JOINT.sub(r"\1<wbr>", code.group())


def _plain(code: re.Match[str]) -> str:
    return code.group().replace(r"\|", "|")


def _block(fence: re.Match[str]) -> str:
    indent, language, text = fence.groups()
    if language != "math":
        return fence.group()
    return f'{indent}<div class="equation">{mathml(text, "block")}</div>\n'


def _function(name: re.Match[str]) -> str:
    """`log` and the like stand a little apart from what is beside them, if that is no bracket."""
    before = name.string[: name.start()]
    after = name.string[name.end() :]
    left = "0" if before.endswith((">(</mo>", ">&#x00028;</mo>", "<mrow>")) else THIN
    right = "0" if re.match(r"<mo[^>]*>(&#x00028;|\()", after) else THIN
    return f'<mo lspace="{left}" rspace="{right}">{name[1]}</mo>'


def mathml(latex: str, display: str) -> str:
    r"""One line of MathML. What the converter would pass over in silence is an error: a command
    that it does not know, an argument that is missing.

    >>> mathml(r"\frac{1}{n}", "inline").count("<mfrac>")
    1
    """
    from latex2mathml.converter import convert

    # the converter knows the numbered environment only, which is the same without its numbers
    source = " ".join(latex.replace("{aligned}", "{align*}").split())
    made = convert(source, display=display)
    made = FUNCTION.sub(_function, made)
    made = made.replace(
        LARGE_BRACKET, LARGE_BRACKET.replace("minsize", 'lspace="0" rspace="0" minsize')
    )
    made = SIGN.sub(r'\1<mo form="prefix">\2</mo>', made)
    try:
        tree = ElementTree.fromstring(made)
    except ElementTree.ParseError as error:
        raise ValueError(f"this equation is no MathML ({error}): {latex.strip()}") from error
    for element in tree.iter():
        name = element.tag.rpartition("}")[2]
        if "\\" in (element.text or ""):
            raise ValueError(f"{element.text} is not known to the site: {latex.strip()}")
        if len(element) != CHILDREN.get(name, len(element)):
            raise ValueError(f"an argument is missing ({name}): {latex.strip()}")
    return made
