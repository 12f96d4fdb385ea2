"""What is checked before the first trial of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.cli_runs import write_config
from reinforge.config.sweep import SweepConfig
from reinforge.core.errors import InputError
from reinforge.sweeps.plan import SweepPlan, plan_sweep

RATE = "train.learning_rate"


def planned(
    tmp_path: Path, tiny_dir: str, over: dict[str, Any], *overrides: str, **settings: Any
) -> tuple[SweepPlan, list[str]]:
    config = write_config(tmp_path, Path(tiny_dir), run={"dir": str(tmp_path / "run")})
    return plan_sweep(config, overrides, SweepConfig(over=over, **settings))


def test_a_plan(tmp_path: Path, tiny_dir: str) -> None:
    plan, warnings = planned(tmp_path, tiny_dir, {RATE: "log:1e-5..1e-2"}, "train.steps=6")
    assert warnings == []
    assert (plan.metric, plan.direction) == ("eval/reward", "maximize")
    assert plan.dir == tmp_path / "run-sweep"
    assert plan.trial_dir(0) == tmp_path / "run-sweep" / "trial-001"
    config = plan.config_of({RATE: 3.3e-5}, plan.trial_dir(4), "trial 5")
    assert config.train.learning_rate == 3.3e-5 and config.train.steps == 6
    assert config.run.dir == str(tmp_path / "run-sweep" / "trial-005")


def test_the_command_that_trains_with_the_best(tmp_path: Path, tiny_dir: str) -> None:
    plan, _ = planned(tmp_path, tiny_dir, {RATE: "log:1e-5..1e-2"}, "train.steps=6")
    values = {RATE: 1.25e-05, "data.template": "Q: {question}", "adapter.targets": ["a", "b"]}
    assert plan.command(values) == (
        f"reinforge train {tmp_path / 'grpo.yaml'} train.steps=6 train.learning_rate=1.25e-05"
        " 'data.template=Q: {question}' 'adapter.targets=[\"a\", \"b\"]'"
    )
    assert plan.command({"a": "8", "b": "true", "c": True}).endswith(
        """ 'a="8"' 'b="true"' c=true"""
    )


@pytest.mark.parametrize(
    ("over", "overrides", "told"),
    [
        (
            {"train.optimizer.lr": "log:1e-6..1e-4"},
            [],
            r"over train.optimizer.lr: .*unknown key, did you mean `train.learning_rate`\?",
        ),
        ({"train.learning_rat": "log:1e-6..1e-4"}, [], "did you mean `train.learning_rate`"),
        ({"algorithm.group_size": "float:1..2"}, [], "over algorithm.group_size: .*whole number"),
        ({"train.schedule.kind": "choice:cosine,sine"}, [], "train.schedule.kind .*'sine'"),
        ({"model.path": "choice:/nowhere/a,/nowhere/b"}, [], "2 problems:(.|\n)*/nowhere/a"),
        ({RATE: "log:1e-6..1e-4"}, [f"{RATE}=1e-5"], "is to vary, and `train.learning_rate=1e-5`"),
        ({RATE: "log:1e-6..1e-4"}, ["data.eval.size=0", "eval.every=0"], "data.eval: trials are"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, tiny_dir: str, over: dict[str, str], overrides: list[str], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        planned(tmp_path, tiny_dir, over, *overrides)


def test_what_is_doubted(tmp_path: Path, tiny_dir: str) -> None:
    _, warnings = planned(tmp_path, tiny_dir, {"rewards.1.weight": "float:0..1"}, "eval.every=0")
    assert [text.partition(":")[0] for text in warnings] == [
        "eval.every is 0",
        "rewards.1.weight changes what eval/reward means",
    ]
    _, warnings = planned(
        tmp_path,
        tiny_dir,
        {"rewards.1.weight": "float:0..1"},
        "eval.every=0",
        metric="eval/accuracy",
        pruner={"kind": "none"},
    )
    assert warnings == []


def test_supervised_runs_are_compared_by_their_loss(tmp_path: Path, tiny_dir: str) -> None:
    config = write_config(tmp_path, Path(tiny_dir), "sft", rewards=[])
    plan, _ = plan_sweep(config, [], SweepConfig(over={RATE: "log:1e-5..1e-2"}))
    assert (plan.metric, plan.direction) == ("eval/loss", "minimize")
