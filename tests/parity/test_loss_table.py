"""Every supervised, preference, reward and distillation name has a row on
docs/algorithms/parity-losses.md, and its numbers are true.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from loss_twins import TWINS

from helpers.paths import ROOT
from reinforge.algorithms.catalogue import TABLE

PAGE = ROOT / "docs" / "algorithms" / "parity-losses.md"
NAMES = [name for name, row in TABLE.items() if row.family != "policy_gradient"]


def test_every_name_has_a_twin_and_a_row() -> None:
    said = {line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    assert set(NAMES) == TWINS.keys(), "each needs its formula in tests/parity/loss_twins.py"
    assert set(NAMES) == said, "run `make reference`, which writes the page"


def test_the_command_lists_these_names() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "reinforge", "algorithms", "--json"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert {row["name"] for row in json.loads(out) if row["family"] != "policy_gradient"} == set(
        NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_it_is_its_formula(name: str) -> None:
    loss, gradient = TWINS[name]()
    assert loss < 1e-7 and gradient < 1e-7


def test_the_page_is_what_the_tool_writes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    subprocess.run([sys.executable, str(ROOT / "tools" / "parity_table.py"), str(page)], check=True)
    assert page.read_text() == PAGE.read_text(), "run tools/parity_table.py"
