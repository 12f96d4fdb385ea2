"""Equations: every one of the pages becomes MathML whole, a browser draws it within the page, and
what the program says of an algorithm is not cut off.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from helpers.doc_snippets import FENCE, PAGES, snippets
from helpers.needs import missing
from helpers.paths import ROOT
from reinforge.algorithms.explain import equation
from reinforge.algorithms.losses.preference import PREFERENCE
from reinforge.algorithms.pairing import PICKS
from reinforge.algorithms.parts.advantages import ADVANTAGES
from reinforge.algorithms.parts.reduce import REDUCERS
from reinforge.algorithms.parts.surrogates import SURROGATES

sys.path.append(str(ROOT / "tools"))
from chromium import Chromium, find

HOOKS = runpy.run_path(str(ROOT / "tools" / "site_hooks.py"))
mathml = HOOKS["mathml"]
BLOCKS = list(snippets("math"))
INLINE = re.compile(r"\$`([^`\n]+)`\$")
PHONE = 390


def in_sentences() -> list[str]:
    texts = [FENCE.sub("", page.read_text(encoding="utf-8")) for page in PAGES]
    return [found for text in texts for found in INLINE.findall(text)]


def test_every_block_converts_with_all_of_its_lines() -> None:
    assert len(BLOCKS) >= 30
    for block in BLOCKS:
        made = mathml(block.text, "block")
        lines = block.text.count(r"\\") + 1
        drawn = max(made.count("<mtr>"), 1)
        # the lines of cases end with the last one, which is also a line of what is around it
        assert drawn in (lines, lines + block.text.count(r"\begin{cases}")), f"{block}: {made}"


def test_every_equation_in_a_sentence_converts() -> None:
    found = in_sentences()
    assert len(found) >= 100
    for latex in found:
        assert mathml(latex, "inline").startswith("<math")


def test_none_is_left_as_text() -> None:
    """A loss or an advantage in a block of text is one that was forgotten."""
    wrong = [str(b) for b in snippets("text") if re.search(r"^(L|A)_[it] =", b.text, re.MULTILINE)]
    assert wrong == []


@pytest.mark.parametrize(
    ("latex", "says"),
    [
        (r"\lgo p", r"\\lgo is not known"),
        (r"\frac{a}", "an argument is missing .mfrac."),
        (r"\text{max\_new}", "not known"),
        ("a & b", "no MathML"),
    ],
)
def test_what_the_converter_passes_over_is_an_error(latex: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        mathml(latex, "block")


def test_what_becomes_of_a_page() -> None:
    text = "a $`\\rho_t`$ b\n\n```math\n\\frac{1}{n}\n```\n\n```sh\necho $HOME\n```\n"
    markdown = HOOKS["on_page_markdown"](text)
    assert '<div class="equation"><math' in markdown and "<mfrac>" in markdown
    assert "echo $HOME" in markdown and "$`\\rho_t`$" in markdown
    html = HOOKS["on_page_content"]("<p>a $<code>x &lt; \\rho_t</code>$ b</p>")
    assert html.startswith("<p>a <math") and html.endswith("</math> b</p>")
    assert "$" not in html and "\\" not in html
    cell = HOOKS["on_page_content"]("<td><code>clip.low</code>, <code>.high</code></td>")
    assert cell == "<td><code>clip.<wbr>low</code>, <code>.high</code></td>"


def test_a_browser_draws_them_within_a_phone(tmp_path: Path) -> None:
    if find() is None:
        missing("browser", "chromium is not installed")
    style = (ROOT / "docs" / "styles" / "tables.css").read_text(encoding="utf-8")
    drawn = [f'<div class="equation">{mathml(b.text, "block")}</div>' for b in BLOCKS]
    page = tmp_path / "page.html"
    page.write_text(
        f"<!doctype html><style>{style}</style><body class='md-typeset'>{''.join(drawn)}</body>",
        encoding="utf-8",
    )
    with Chromium(PHONE) as browser:
        browser.open(page)
        sizes = browser.evaluate(
            "[...document.querySelectorAll('math')].map(m => m.getBoundingClientRect())"
            ".map(box => [box.width, box.height])"
        )
        fractions = browser.evaluate(
            "[...document.querySelectorAll('mfrac')].map(f => f.getBoundingClientRect().height)"
        )
        assert browser.evaluate("document.documentElement.scrollWidth") <= PHONE
        assert browser.errors == []
    assert len(sizes) == len(BLOCKS)
    assert all(width > 60 and height > 10 for width, height in sizes)
    assert len(fractions) >= 40 and min(fractions) > 15, "drawn one above the other"


def test_what_the_program_says_is_whole() -> None:
    functions = {
        **ADVANTAGES,
        **SURROGATES,
        **REDUCERS,
        **PICKS,
        **{name: pair.function for name, pair in PREFERENCE.items()},
    }
    for name, function in functions.items():
        said = equation(function)
        assert said and said.count("(") == said.count(")"), f"{name}: {said}"
    assert equation(REDUCERS["fixed_length"]).endswith("(Dr. GRPO, 2503.20783)")
    assert equation(SURROGATES["dppo_tv"]).endswith("D = |pi - mu|")
