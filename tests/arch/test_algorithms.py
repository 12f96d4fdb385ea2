"""Nothing is in the table of algorithms that is not documented, shown in a recipe, checked against
numbers and seen to learn.
"""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest
import torch

from helpers.source_tree import ROOT
from reinforge.algorithms.catalogue import TABLE
from reinforge.config.load import load_config

POLICY_GRADIENT = [name for name, row in TABLE.items() if row.family == "policy_gradient"]
# run every row, and know no numbers
OVER_THE_TABLE = ("test_algorithms_run.py", "test_learning.py")
GOLDEN = "\n".join(
    path.read_text()
    for folder in ("unit", "parity")
    for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))
    if path.name not in OVER_THE_TABLE
)


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_it_has_a_page(name: str) -> None:
    """With an equation, its paper, what it is called elsewhere, and a recipe."""
    text = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n") and "```math\n" in text and "\n## Elsewhere\n" in text
    assert all(
        f"arxiv.org/abs/{paper}" in text
        for paper in TABLE[name].paper.split(", ")
        if paper[0].isdigit()
    )
    assert f"recipes/algorithms/{name}.yaml" in text
    assert 25 <= len(text.splitlines()) <= 60


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_its_page_knows_its_defaults(name: str) -> None:
    """Defaults that are the row's own are on the page, under their key and with their value."""
    text = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    row = TABLE[name]
    for key, value in {**row.defaults, **row.options}.items():
        written = (
            str(value).lower()
            if isinstance(value, bool)
            else f"{value:g}".replace("e+0", "e")
            if isinstance(value, float)
            else str(value)
        )
        last = key.rpartition("_")[2] if key.startswith(("clip_", "kl_")) else key
        assert last in text and any(
            form in text for form in (written, written.replace("0.000", "") + "e-4")
        ), (key, written)


@pytest.mark.parametrize("name", [*POLICY_GRADIENT, "sft"])
def test_it_has_a_recipe(name: str) -> None:
    assert load_config(ROOT / "recipes" / "algorithms" / f"{name}.yaml").algorithm.name == name


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_it_has_golden_numbers(name: str) -> None:
    assert re.search(rf"\b{name}\b", GOLDEN), f"no test in tests/unit or tests/parity names {name}"


def test_every_row_is_run_and_learns() -> None:
    for name in OVER_THE_TABLE:
        assert re.search(
            r"^from reinforge\.algorithms\.\w+ import .*\bTABLE\b",
            (ROOT / "tests" / "unit" / "algorithms" / name).read_text(),
            re.MULTILINE,
        ), name


def test_the_example_surrogate() -> None:
    """docs/algorithms/parts.md: at ratio 1 the gradient of -A logp; far away it is bounded by
    width.
    """
    found = re.search(
        r"^```python\n(.*?)^```",
        (ROOT / "docs" / "algorithms" / "parts.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None
    names: dict[str, Any] = {}
    exec(compile(found.group(1), "parts.md", "exec"), names)
    logprobs = torch.tensor([-1.0, -1.0, 9.0], requires_grad=True)
    loss, metrics = names["squashed"](
        logprobs,
        torch.tensor([-1.0, -1.0, -1.0]),
        torch.tensor([2.0, -3.0, 1.0]),
        torch.zeros(3),
        width=0.3,
    )
    loss.sum().backward()
    assert (
        logprobs.grad is not None
        and logprobs.grad.tolist() == pytest.approx([-2.0, 3.0, 0.0])
        and loss[2].item() == pytest.approx(-0.3)
    )
    assert metrics["ratio"][0] == 1


def test_the_index_is_fresh() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "gen_algorithms.py"))
    text = made["PAGE"].read_text(encoding="utf-8")
    assert text == made["with_tables"](text), "run `make reference`"
    assert all(f"[{name}]({name}.md)" in text for name in POLICY_GRADIENT) and all(
        name in text for name in TABLE
    )


def test_pages_are_in_the_navigation() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    pages = sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )
    assert [page for page in pages if page not in site] == []
