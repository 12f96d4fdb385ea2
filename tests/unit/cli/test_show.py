"""What commands print at a terminal of 80 columns: no word is broken, and nothing is lost."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from reinforge.algorithms.catalogue import printed
from reinforge.cli import show
from reinforge.cli.main import main
from reinforge.watch.recorder import Recorder


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 80 columns, and what is on it."""
    out = io.StringIO()
    monkeypatch.setattr(
        show,
        "console",
        lambda: Console(
            file=out, force_terminal=True, color_system=None, width=80, highlight=False
        ),
    )
    return out


def words(text: str) -> set[str]:
    return {word.strip(",:") for word in text.split()}


def check(out: io.StringIO, cells: list[Any]) -> None:
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    wanted = {word for cell in cells for word in words(show.text_of(cell))} - {"-"}
    assert wanted <= words(shown), sorted(wanted - words(shown))


def test_algorithms_break_no_word(terminal: io.StringIO) -> None:
    assert main(["algorithms"]) == 0
    check(terminal, [cell for row in printed() for cell in row.values()])


@pytest.mark.parametrize("name", ["a", "a-rather-long-name-of-a-run-in-a-directory-of-its-own"])
def test_lists_of_runs_break_no_word(
    terminal: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for algorithm in ("reinforce_pp", "rejection_sampling"):
        recorder = Recorder(
            tmp_path / "runs" / name / algorithm,
            {"algorithm": {"name": algorithm}, "model": {"path": "org/some-model-of-7b"}},
            steps=5000,
        )
        recorder.log(
            4999,
            {
                "reward/mean": 0.123456,
                "eval/accuracy": 0.9876,
                "train/skipped": 0.0,
                "train/grad_norm": 0.0,
            },
        )
        recorder.event("terminated")
        recorder.close()
    assert main(["runs", "list", "runs"]) == 0
    check(
        terminal,
        [
            f"runs/{name}/reinforce_pp",
            "terminated",
            "1 trouble",
            "4999/5000",
            "rejection_sampling",
            "accuracy 0.9876",
        ],
    )
    terminal.seek(0)
    terminal.truncate()
    assert main(["runs", "show", f"runs/{name}/reinforce_pp"]) == 0
    check(
        terminal,
        [
            "4999 of 5000 steps",
            "warning:",
            "taught nothing",
            "reinforce_pp",
            "grad_norm 0",
            "terminated",
        ],
    )


def test_a_run_is_shown_with_its_newest_samples(
    terminal: io.StringIO, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the newest step first: the end of a long prompt, and a completion without its middle."""
    begins, middle, ends = "first " * 30, "inner " * 100, "last " * 20
    recorder = Recorder(tmp_path / "run", {"algorithm": {"name": "grpo"}}, steps=9)
    recorder.log(5, {"reward/mean": 0.5})
    for step in (1, 5):
        recorder.write_samples(
            [
                {
                    "step": step,
                    "prompt": f"Begin. {'filler ' * 60}How many in step {step}?",
                    "completion": f"{begins}{middle}{ends}\x1b[2Jend{place}",
                    "reward": None if place else 0.75,
                    "components": {"exact": 1.0, "format": 0.5},
                    "length": 40 + place,
                }
                for place in range(2)
            ]
        )
    recorder.close()

    def shown(*options: str) -> str:
        terminal.seek(0)
        terminal.truncate()
        assert main(["runs", "show", str(tmp_path / "run"), *options]) == 0
        return terminal.getvalue()

    two = shown()
    check(terminal, ["sample step 5 40 tokens 41", "0.75", "(exact", "unscored", "in step 5?"])
    assert two.count("\nsample ") == 2 and "step 1?" not in two and "Begin" not in two
    assert two.count("first") == 60 and "inner … " in two and "\\x1b[2Jend0" in two
    three = shown("--samples", "3")
    assert three.count("\nsample ") == 3
    assert three.index("in step 5?") < three.index("in step 1?")
    assert "\nsample " not in shown("--samples", "0")
    capsys.readouterr()
    shown("--json")
    found = json.loads(capsys.readouterr().out)["samples"]
    assert [(s["step"], s["length"]) for s in found] == [(5, 40), (5, 41)]


def test_a_long_value_goes_on_under_itself(terminal: io.StringIO) -> None:
    show.print_mapping({"key": " ".join(["word"] * 30), "path": "/" + "x" * 100, "none": None})
    rows = terminal.getvalue().splitlines()
    assert (
        rows[0].startswith("key   word word")
        and rows[1].startswith("      word")
        and max(map(len, rows[:2])) <= 80
    )
    assert rows[-1] == "path  /" + "x" * 100, "a path is not cut by us"


def test_in_a_pipe_lines_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    show.print_table([{"a": "x" * 300, "b": None}])
    show.print_mapping({"key": "y " * 100})
    assert capsys.readouterr().out.splitlines() == ["a\tb", "x" * 300 + "\t-", "key  " + "y " * 100]
