"""A paired comparison tells a difference with fewer problems than two intervals do."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from reinforge.cli.main import main
from reinforge.core.errors import InputError
from reinforge.evals.paired_comparison import compare_paired, problems_needed
from reinforge.evals.statistics import wilson


def test_by_hand() -> None:
    """Differences 1, 0, 0, 1, -1: mean 0.2, standard deviation 0.8367; Student's factor 2.776."""
    first = {"a": [0.0], "b": [1.0], "c": [0.0], "d": [0.0, 0.0], "e": [1.0], "f": [1.0]}
    second = {"a": [1.0], "b": [1.0], "c": [0.0], "d": [1.0, 1.0], "e": [0.0], "g": [0.0]}
    found = compare_paired(first, second)
    assert (found.problems, found.left_out, found.answers) == (5, 2, (6, 6))
    assert found.means == pytest.approx((0.4, 0.6))
    assert (found.better, found.worse) == (2, 1)
    assert found.difference == pytest.approx(0.2)
    assert found.high - found.difference == pytest.approx(2.776 * 0.83666 / math.sqrt(5), rel=0.01)
    assert not found.told
    assert found.needed == math.ceil(((1.959964 + 0.841621) * 0.83666 / 0.2) ** 2) == 138


def test_what_problems_share_drops_out() -> None:
    """Hard and easy problems, the second model a little better at each: the two intervals overlap,
    and the pairs tell them apart.
    """
    rng = random.Random(0)
    solved = {str(i): rng.random() < 0.5 for i in range(200)}
    first = {name: [float(s)] for name, s in solved.items()}
    second = {name: [float(s or int(name) % 20 == 0)] for name, s in solved.items()}
    found = compare_paired(first, second)
    assert found.told and found.worse == 0
    intervals = [wilson(sum(v[0] for v in side.values()), 200) for side in (first, second)]
    assert intervals[0][1] > intervals[1][0]


def test_the_needed_number_has_the_power_that_it_says() -> None:
    """400 trials of a true difference of 0.1 at problems of spread 0.5: in 80% it is told."""
    needed = problems_needed(0.1, 0.5)
    assert needed == 197
    rng = random.Random(1)
    told = 0
    for _ in range(400):
        second = {str(i): [rng.gauss(0.1, 0.5)] for i in range(needed)}
        told += compare_paired({name: [0.0] for name in second}, second).told
    assert 0.74 < told / 400 < 0.86


def test_records_of_two_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, solved in {"a1": 2, "a2": 4, "b1": 8, "b2": 8}.items():
        lines = [{"id": str(i), "scores": {"accuracy": float(i < solved)}} for i in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    sides = [",".join(str(tmp_path / f"{m}{s}.jsonl") for s in (1, 2)) for m in "ab"]
    assert main(["runs", "compare", *sides, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["metric"], found["problems"], found["answers"]) == ("accuracy", 10, [20, 20])
    assert found["means"] == pytest.approx([0.3, 0.8])
    assert (found["better"], found["worse"]) == (6, 0)
    assert main(["runs", "compare", *sides]) == 0
    assert "+50.0% (95% interval" in capsys.readouterr().out
    with pytest.raises(InputError, match="0 problems have answers of both"):
        compare_paired({"a": [1.0]}, {"b": [1.0]})
