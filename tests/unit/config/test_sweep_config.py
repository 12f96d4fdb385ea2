"""The search space of a sweep: what people write for a range, and what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reinforge.config.search import Domain, Interval, ValueChoice, parse_domain
from reinforge.config.sweep import PrunerConfig, SweepConfig, direction_of, grid_of, read_sweep
from reinforge.core.errors import InputError


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("log:1e-6..1e-4", Interval(1e-6, 1e-4, log=True)),
        ("float:0..0.5:0.25", Interval(0.0, 0.5, step=0.25)),
        ("float:-1..1", Interval(-1.0, 1.0)),
        ("int:1..8", Interval(1, 8, whole=True)),
        ("logint:1..64", Interval(1, 64, whole=True, log=True)),
        ("choice:4,8,true,null,grpo", ValueChoice((4, 8, True, None, "grpo"))),
        ('choice:[q_proj, v_proj],"a,b"', ValueChoice((["q_proj", "v_proj"], "a,b"))),
        ([1, 2.5, "x"], ValueChoice((1, 2.5, "x"))),
    ],
)
def test_what_a_range_means(given: Any, meant: Domain) -> None:
    assert parse_domain(given, "key") == meant


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("log:1e-4..1e-6", r"key: the range 1e-4..1e-6 is empty: it ends before it begins"),
        ("int:3..3", "one value only"),
        ("log:0..1", "begins above 0, not at 0. Give a larger number, or float:0..1"),
        ("logint:0..4", "or int:0..4"),
        ("int:1.5..4", "'1.5' is no whole number"),
        ("int:1", "'1' has no end. Write int:LOW..HIGH"),
        ("float:0..1:2", "the step 2 does not fit"),
        ("log:1..10:1", "the step 1 does not fit"),
        ("lg:1..10", "'lg' is no kind of range. Write log:1e-6..1e-4"),
        ("3e-5", "'3e-5' is no range"),
        (3, "3 is no range"),
        ("choice:", "a choice of 0 values"),
        ("choice:4", "a choice of 1 value."),
        ("choice:4,8,4", "4 is given twice"),
        ("float:true..2", "'true' is no number"),
    ],
)
def test_what_is_wrong_with_a_range(given: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        parse_domain(given, "key")


def test_a_grid_has_every_value_with_its_ends() -> None:
    space = {
        "a": parse_domain("int:2..8:2", ""),
        "b": parse_domain("float:0..0.3:0.1", ""),
        "c": parse_domain("choice:x,y", ""),
    }
    assert grid_of(space) == {
        "a": [2, 4, 6, 8],
        "b": pytest.approx([0.0, 0.1, 0.2, 0.3]),
        "c": ["x", "y"],
    }


def test_how_many_trials_there_are() -> None:
    over = {"train.learning_rate": "choice:1,2,3", "algorithm.group_size": [4, 8]}
    assert SweepConfig(over=over).how_many() == 20
    assert SweepConfig(over=over, trials=7).how_many() == 7
    assert SweepConfig(over=over, sampler="grid").how_many() == 6
    assert SweepConfig(over=over, sampler="grid", trials=4).how_many() == 4
    assert SweepConfig(over=over, sampler="grid", trials=50).how_many() == 6


def test_the_command_line_counts_more_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "over: {train.learning_rate: log:1e-6..1e-4, algorithm.group_size: [4, 8]}\n"
        "trials: 9\npruner: {kind: asha, factor: 4}\nseed: 3\n"
    )
    over = ["train.learning_rate=float:0..1", "train.steps=int:1..9"]
    settings = {"trials": 5, "pruner": "median", "seed": None, "metric": "eval/loss"}
    assert read_sweep(path, over, settings) == SweepConfig(
        over={
            "train.learning_rate": "float:0..1",
            "algorithm.group_size": [4, 8],
            "train.steps": "int:1..9",
        },
        trials=5,
        seed=3,
        metric="eval/loss",
        pruner=PrunerConfig(kind="median", factor=4),
    )


def test_a_pruner_may_be_a_word(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("over: {train.steps: int:1..9}\npruner: asha\n")
    assert read_sweep(path, [], {}).pruner == PrunerConfig(kind="asha")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ovr: {a: int:1..2}", "unknown key `ovr`. Did you mean `over`?"),
        ("over: {a: int:1..2}\ntrials: 0", "trials: .*greater than or equal to 1"),
        ("over: {a: int:1..2}\npruner: {kind: mean}", "pruner.kind: .*'median', 'asha' or 'none'"),
        ("over: [train.steps]", r"`over` is \['train.steps'\], not a mapping"),
        ("- 1", "a search space is a mapping"),
        ("trials: 3", "nothing is to vary"),
        ("over: {eval.every: int:1..2}", "over eval.every: .*evaluated in different ways"),
        ("over: {data.eval.size: int:1..2}", "evaluated on different rows"),
        ("over: {run.dir: choice:a,b}", "a directory of its own"),
        ("over: {a: float:0..1}\nsampler: grid", "over a: the values .* cannot be counted"),
        ("over: {a: int:1..200, b: int:1..200}\nsampler: grid", "the grid has 40,000 points"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        read_sweep(path, [], {})


def test_a_range_needs_its_key() -> None:
    with pytest.raises(InputError, match="'int:1..2' is not of the form KEY=RANGE"):
        read_sweep(None, ["int:1..2"], {})


@pytest.mark.parametrize(
    ("metric", "meant"),
    [
        ("eval/accurac", "eval/accuracy"),
        ("eval/acuracy", "eval/accuracy"),
        ("eval/rewards", "eval/reward"),
        ("accuracy", "eval/accuracy"),
        ("eval/los", "eval/loss"),
    ],
)
def test_a_metric_that_is_mistyped(metric: str, meant: str) -> None:
    told = f"--metric: no evaluation reports '{metric}'. Did you mean {meant}\\?"
    with pytest.raises(InputError, match=told):
        read_sweep(None, ["train.steps=int:1..9"], {"metric": metric})


@pytest.mark.parametrize(
    "metric",
    ["eval/accuracy", "eval/loss/a", "eval/reward_1", "eval/pass@4", "eval/solved", "eval/chosen"],
)
def test_a_metric_that_may_be_there(metric: str) -> None:
    assert read_sweep(None, ["train.steps=int:1..9"], {"metric": metric}).metric == metric


def test_which_way_is_better() -> None:
    names = ("eval/loss", "eval/reward", "eval/accuracy", "eval/pass@8", "eval/calibration")
    assert [direction_of(name) for name in names] == [
        "minimize",
        "maximize",
        "maximize",
        "maximize",
        "minimize",
    ]
    with pytest.raises(InputError, match="of eval/length is better cannot be told"):
        direction_of("eval/length")
