"""The code in the documentation works, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.doc_snippets import PAGES
from helpers.source_tree import ROOT, modules
from reinforge.algorithms.parts.advantages import AdvantageOptions, Rollouts

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def first_block(page: str) -> dict[str, Any]:
    match = PYTHON.search((ROOT / page).read_text())
    assert match is not None
    names: dict[str, Any] = {}
    exec(compile(match.group(1), page, "exec"), names)
    return names


def test_python_blocks_compile() -> None:
    for page in PAGES:
        for match in PYTHON.finditer(page.read_text()):
            compile(match.group(1), str(page), "exec")


def test_the_example_reward() -> None:
    close_to = first_block("docs/howto-reward.md")["close_to"]
    assert close_to(
        ["it is 4.2", "5", "four", "", "1"], ["4", "4", "4", "4", "?"], tolerance=0.5
    ) == [1.0, 0.0, 0.0, 0.0, None]


def test_the_example_advantage() -> None:
    """Group 0: rewards 1, 0, 1 and one unscored; group 1 alone: by hand 1 - 1/2, 0 - 1, 1 - 1/2, 0,
    0.
    """
    leave_one_out = first_block("docs/howto-advantage.md")["leave_one_out"]
    rollouts = Rollouts(
        rewards=torch.tensor([1.0, 0.0, 1.0, torch.nan, 3.0]),
        group=torch.tensor([0, 0, 0, 0, 1]),
        episode=torch.arange(5),
        sequence=torch.tensor([0, 1, 1, 2, 3, 4]),
        lengths=torch.tensor([1, 2, 1, 1, 1]),
    )
    assert leave_one_out(rollouts, AdvantageOptions()).tolist() == [0.5, -1.0, -1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    links = [
        (page.parent / target).resolve() for target in re.findall(r"\]\((?!\w+:)([^)#]+)", text)
    ]
    recipes = [ROOT / name for name in re.findall(r"recipes/[\w/-]+\.yaml", text)]
    assert [str(p) for p in links + recipes if not p.exists()] == []


def test_recipes_named_in_the_source_exist() -> None:
    named = {
        name
        for path in modules().values()
        for name in re.findall(r"recipes/[\w/-]+\.yaml", path.read_text())
    }
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_a_resumed_run_is_promised_to_be_exact_where_it_was_shown() -> None:
    """On CPUs, and on a GPU that is named: docs/concepts.md says what is exact where."""
    bits = re.compile(r"bit-identical|bit for bit|bit-exact")
    again = re.compile(r"\bkill|resum|continue|start it again")
    shown = re.compile(r"CPU|H200")
    # what was found, and how formulas compare
    records = {"lab-notebook.md", "decisions", "algorithms"}
    pages = [page for page in PAGES if not records & set(page.relative_to(ROOT).parts)]
    wrong = []
    for page in pages:
        for thought in re.split(r"\n\s*\n|\n(?=[|*-])", page.read_text()):
            if bits.search(thought) and again.search(thought) and not shown.search(thought):
                wrong.append(f"{page.relative_to(ROOT)}: {thought[:120]!r}")
    assert wrong == []
    text = (ROOT / "docs/concepts.md").read_text()
    assert "## What is exact" in text and "on a GPU" in text


def test_troubleshooting_quotes_what_the_code_says() -> None:
    """A message that was reworded is found here, before somebody looks for it in vain."""
    text = (ROOT / "docs/troubleshooting.md").read_text()
    quotes = re.findall(r'"([a-z][^"]+)"', text)
    assert len(quotes) >= 12
    # texts in the source go over several lines
    source = " ".join(path.read_text() for path in modules().values())
    source = re.sub(r'"\s+f?"', "", source)
    assert [quote for quote in quotes if quote not in source] == []
