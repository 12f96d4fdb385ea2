"""benchmarks/fresh_rows.py: rows of a task, the same for the same seed, with numbers as answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.paths import ROOT

PROGRAM = ROOT / "benchmarks" / "fresh_rows.py"


def made(folder: Path, task: str, *options: str) -> tuple[list[dict[str, Any]], str]:
    out = folder / "rows.jsonl"
    command = [sys.executable, str(PROGRAM), task, str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = (
        [json.loads(line) for line in out.read_text().splitlines()] if not done.returncode else []
    )
    return rows, done.stderr


def test_rows_of_a_task(tmp_path: Path) -> None:
    sizes = ("--train", "20", "--test", "5")
    rows, _ = made(tmp_path, "letter_counting", *sizes)
    assert [row["split"] for row in rows] == ["train"] * 20 + ["test"] * 5
    assert len({row["q"] for row in rows}) == 25
    assert all(row["a"] == str(int(row["a"])) for row in rows)
    assert made(tmp_path, "letter_counting", *sizes)[0] == rows
    assert made(tmp_path, "letter_counting", *sizes, "--seed", "1")[0] != rows


def test_a_task_whose_answers_are_no_numbers_is_refused(tmp_path: Path) -> None:
    rows, told = made(tmp_path, "spell_backward", "--train", "3", "--test", "1")
    assert not rows and "spell_backward: an answer is no whole number" in told
