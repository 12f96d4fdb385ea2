"""Sweeps with the real Optuna: most on trials that cost nothing, one on the tiny model."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.cli_runs import write_config
from helpers.toys import SilentView
from reinforge.checkpoint.store import digest_run
from reinforge.cli.main import main
from reinforge.cli.sweep import best_in_words
from reinforge.config.load import load_config
from reinforge.config.schema import Config
from reinforge.config.sweep import SweepConfig
from reinforge.core.errors import InputError, StoppedByPolicy, Terminated
from reinforge.sweeps.plan import SweepPlan, plan_sweep
from reinforge.sweeps.run import SweepResult, run_sweep
from reinforge.sweeps.signals import SweepSignals
from reinforge.sweeps.trial_end import Judge, TrialEnd
from reinforge.sweeps.trial_run import run_here
from reinforge.watch.runs import read_json, read_lines, show_run

RATE = "train.learning_rate"
Plan = Callable[..., SweepPlan]


@pytest.fixture
def plan(tmp_path: Path, tiny_dir: str) -> Plan:
    """A sweep over the learning rate of a run of 12 steps that is evaluated every 3."""
    config = write_config(
        tmp_path,
        Path(tiny_dir),
        train={"steps": 12, "schedule": {"kind": "constant", "warmup": 0}},
        run={"dir": str(tmp_path / "run")},
    )

    def make(folder: str = "sweep", over: str = "log:1e-5..1e-1", **settings: Any) -> SweepPlan:
        sweep = SweepConfig(over={RATE: over}, **settings)
        return plan_sweep(config, [], sweep, folder=tmp_path / folder)[0]

    return make


class Curve:
    """Trials that cost nothing: the reward grows with the step, the faster the nearer the learning
    rate is to 1e-3. Those in `cut` are stopped by a signal, once; those in `broken` fail.
    """

    def __init__(self, cut: tuple[int, ...] = (), broken: tuple[int, ...] = ()):
        self.cut = set(cut)
        self.broken = broken
        self.ran: list[str] = []

    def __call__(self, config: Config, judge: Judge, signals: SweepSignals) -> TrialEnd:
        folder = Path(config.run.dir)
        number = int(folder.name.rpartition("-")[2])
        self.ran.append(folder.name)
        (folder / "checkpoints" / "step-12").mkdir(parents=True, exist_ok=True)
        if number in self.broken:
            return TrialEnd("failed", error="it broke.")
        speed = 1 / (1 + abs(config.train.learning_rate / 1e-3 - 1))
        for step in range(0, 13, 3):
            metrics = {"eval/reward": speed * step, "eval/n": 4.0}
            if judge(step, 12, metrics) is not None:
                return TrialEnd("finished", step, metrics)
            if step == 0 and number in self.cut:
                self.cut.remove(number)
                signals.received = signal.SIGINT
                return TrialEnd("terminated", error="stopped.")
        return TrialEnd("finished", 12, metrics)


def run(plan: SweepPlan, trial: Curve) -> SweepResult:
    return run_sweep(plan, lambda text: None, run_trial=trial)


def outcomes(result: SweepResult) -> list[Any]:
    return [(record.state, record.value, record.steps) for record in result.trials]


def drawn(result: SweepResult) -> list[float]:
    return [record.values[RATE] for record in result.trials]


@pytest.mark.parametrize(
    ("sampler", "cut"), [("tpe", (3, 12)), ("random", (2,))], ids=["tpe", "random"]
)
def test_a_sweep_that_was_cut_ends_as_one_that_was_not(
    plan: Plan, sampler: str, cut: tuple[int, ...]
) -> None:
    """From its 11th trial on TPE draws by what came out before."""
    settings: dict[str, Any] = {"trials": cut[-1], "sampler": sampler, "pruner": {"startup": 2}}
    whole = run(plan("whole", **settings), Curve())
    assert len(set(drawn(whole))) == cut[-1]  # with one seed for all, numbers would come again
    trial = Curve(cut)
    for number in cut:
        told = f"SIGINT after {number - 1} of {cut[-1]} trials"
        with pytest.raises(Terminated, match=told) as error:
            run(plan("cut", **settings), trial)
        assert error.value.exit_code == 130
    again = run(plan("cut", **settings), trial)
    assert drawn(again) == drawn(whole)
    assert outcomes(again) == outcomes(whole)
    assert [trial.ran.count(f"trial-{number:03d}") for number in cut] == [2] * len(cut)


def test_another_seed_draws_other_values(plan: Plan) -> None:
    settings: dict[str, Any] = {"trials": 1, "sampler": "random"}
    first = drawn(run(plan("first", **settings), Curve()))
    assert drawn(run(plan("second", **settings, seed=1), Curve())) != first


def test_more_trials_go_on_from_those_that_are_done(plan: Plan) -> None:
    first = run(plan(trials=2), Curve())
    trial = Curve()
    more = run(plan(trials=3), trial)
    assert trial.ran == ["trial-003"]
    assert drawn(more)[:2] == drawn(first)


def test_a_trial_below_the_median_is_pruned(plan: Plan) -> None:
    """At 3 steps the trials before had 3 and 1.5, so that 2.7 goes on and 0.3 does not."""
    rates = "choice:1e-3,2e-3,1.1e-3,1e-2"
    result = run(plan(over=rates, sampler="grid", pruner={"startup": 2}), Curve())
    assert [(r.state, r.steps) for r in result.trials] == [
        ("finished", 12),
        ("finished", 12),
        ("finished", 12),
        ("pruned", 3),
    ]
    assert result.trials[3].value == pytest.approx(0.3)
    assert result.best == result.trials[0]


def test_asha_lets_one_in_three_go_on(plan: Plan) -> None:
    """Rungs are at steps 3 and 9: at each, those that are not in the best third so far end."""
    rates = "choice:1e-2,2e-3,1e-3,5e-2"
    result = run(plan(over=rates, sampler="grid", pruner={"kind": "asha"}), Curve())
    assert [(r.state, r.steps) for r in result.trials] == [
        ("finished", 12),
        ("finished", 12),
        ("finished", 12),
        ("pruned", 3),
    ]


def test_what_is_less_may_be_better(plan: Plan) -> None:
    rates = "choice:1e-2,1e-3"
    settings: dict[str, Any] = {"over": rates, "sampler": "grid", "direction": "minimize"}
    result = run(plan(**settings), Curve())
    assert result.best.values == {RATE: 1e-2}


def test_trials_that_come_to_the_same_are_named_beside_the_best(plan: Plan) -> None:
    rates = "choice:1e-2,1.5e-3,0.5e-3"  # the last two are as far from 1e-3
    result = run(plan(over=rates, sampler="grid", pruner={"kind": "none"}), Curve())
    tied = {record.values[RATE] for record in (result.best, *result.ties)}
    assert tied == {1.5e-3, 0.5e-3} and len(result.ties) == 1
    first, other = result.best.number + 1, result.ties[0].number + 1
    assert first < other
    told = f"trial {first}, eval/reward 8; trial {other} came to the same"
    assert best_in_words(result, "eval/reward") == told
    alone = run(plan("another", over="choice:1e-2,1e-3", sampler="grid"), Curve())
    assert alone.ties == []
    assert best_in_words(alone, "eval/reward") == f"trial {alone.best.number + 1}, eval/reward 12"


def test_only_the_best_keeps_its_checkpoints(plan: Plan, tmp_path: Path) -> None:
    rates = "choice:2e-3,1e-2,1e-3"
    run(plan(over=rates, sampler="grid", pruner={"kind": "none"}), Curve())
    kept = sorted(path.parent.name for path in (tmp_path / "sweep").glob("*/checkpoints"))
    assert kept == ["trial-003"]


def test_a_trial_that_fails_is_told_and_the_sweep_goes_on(plan: Plan, tmp_path: Path) -> None:
    said: list[str] = []
    result = run_sweep(plan(trials=4), said.append, run_trial=Curve(broken=(1, 3)))
    assert [r.state for r in result.trials] == ["failed", "finished", "failed", "finished"]
    assert said[1] == "  failed: it broke."
    summary = read_json(tmp_path / "sweep" / "summary.json")
    assert summary["best"]["value"] == result.best.value
    assert [trial["error"] for trial in summary["trials"]] == ["it broke.", None, "it broke.", None]


def test_three_failures_in_a_row_end_the_sweep(plan: Plan) -> None:
    trial = Curve(broken=(2, 3, 4, 5))
    with pytest.raises(StoppedByPolicy, match="3 trials in a row failed, the last with: it broke"):
        run(plan(trials=6), trial)
    assert trial.ran[-1] == "trial-004"
    result = run(plan(trials=6), trial)  # the same command goes on
    assert [r.state for r in result.trials] == ["finished", *["failed"] * 4, "finished"]


def test_a_metric_that_is_not_reported(plan: Plan, tmp_path: Path) -> None:
    """Nothing of it stays: the same directory takes the sweep with another metric."""
    told = r"--metric: .*no metric 'eval/rewards'. It reports: eval/n, eval/reward."
    with pytest.raises(InputError, match=told):
        run(plan(metric="eval/rewards", trials=2), Curve())
    assert len(run(plan(trials=2), Curve()).trials) == 2


def test_another_sweep_in_the_same_directory_is_refused(plan: Plan) -> None:
    run(plan(trials=2), Curve())
    with pytest.raises(
        InputError, match=r"over.train\.learning_rate was 'log.*; seed was 0 and is 1"
    ):
        run(plan(trials=2, seed=1, over="log:1e-4..1e-1"), Curve())


def test_choices_of_any_kind(tmp_path: Path, tiny_dir: str) -> None:
    config = write_config(tmp_path, Path(tiny_dir), adapter={"rank": 2})
    values = [["q_proj"], ["q_proj", "v_proj"], "all-linear"]
    sweep = SweepConfig(over={"adapter.targets": values}, sampler="grid", metric="eval/reward")
    made, _ = plan_sweep(config, [], sweep, folder=tmp_path / "sweep")
    result = run(made, Curve())
    assert [record.values["adapter.targets"] for record in result.trials] == values


def test_a_sweep_of_real_runs(tmp_path: Path, tiny_dir: str) -> None:
    """Three learning rates: the second learns nothing and is pruned; the command of the best one
    trains the same weights.
    """
    config = write_config(
        tmp_path,
        Path(tiny_dir),
        "sft",
        rewards=[],
        train={"steps": 4, "schedule": {"kind": "constant", "warmup": 0}},
        eval={"every": 2},
        run={"dir": str(tmp_path / "run"), "checkpoint": {"every": 0}},
    )
    sweep = SweepConfig(
        over={RATE: [3e-3, 1e-9, 6e-3]}, sampler="grid", pruner={"kind": "median", "startup": 1}
    )
    made, _ = plan_sweep(config, [], sweep, keep="all")

    def here(config: Config, judge: Judge, signals: SweepSignals) -> TrialEnd:
        return run_here(config, judge, SilentView())

    said: list[str] = []
    result = run_sweep(made, said.append, run_trial=here)
    assert [r.state for r in result.trials][:2] == ["finished", "pruned"]
    for record in result.trials:
        folder = made.trial_dir(record.number)
        losses = {
            line["step"]: line["eval/loss"]
            for line in read_lines(folder / "metrics.jsonl")
            if "eval/loss" in line
        }
        assert record.value == losses[record.steps or 0]
        assert (folder / "report.html").exists()
    pruned = show_run(made.trial_dir(1))
    assert pruned["step"] == 2
    assert pruned["why"].startswith("stopped by the caller: pruned by the sweep at eval/loss")
    assert "(the best so far)" in said[1] and said[3].startswith("  pruned at step 2, eval/loss")
    words = shlex.split(json.loads(result.summary.read_text())["best"]["command"])
    assert words[:2] == ["reinforge", "train"]
    assert main(words[1:]) == 0
    again = load_config(Path(words[2]), words[3:])
    assert digest_run(Path(again.run.dir)) == digest_run(made.trial_dir(result.best.number))
