"""Callbacks of a run: our own, plain functions, and those that were written for transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

import reinforge
from helpers.tiny_runs import DATA, EVAL, digest, launch, lines
from helpers.toy_rewards import odd
from reinforge.checkpoint import store
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.metrics import Metrics
from reinforge.loops.given_callbacks import Callbacks

Make = Callable[..., Config]


def train(cfg: Config, callbacks: Any, **more: Any) -> reinforge.RunResult:
    return reinforge.train(cfg, data=DATA, rewards=[odd], callbacks=callbacks, **more)


class Listening(reinforge.Callback):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_begin(self, run: reinforge.RunControl) -> None:
        self.heard.append(("begin", run.step, run.total))

    def on_rollouts(self, run: reinforge.RunControl, step: reinforge.RunStep) -> None:
        self.heard.append(("rollouts", step.number, len(step.groups)))

    def on_rewards(self, run: reinforge.RunControl, step: reinforge.RunStep) -> None:
        self.heard.append(("rewards", step.number, len(step.rewards[0])))

    def on_advantages(self, run: reinforge.RunControl, step: reinforge.RunStep) -> None:
        self.heard.append(("advantages", step.number, len(step.advantages)))

    def on_step(self, run: reinforge.RunControl, step: reinforge.RunStep) -> None:
        assert step.done and run.metrics["train/loss"] == step.metrics["train/loss"]
        self.heard.append(("step", step.number, run.step))

    def on_evaluation(self, run: reinforge.RunControl, metrics: Metrics) -> None:
        self.heard.append(("evaluation", run.step, metrics["eval/n"]))

    def on_save(self, run: reinforge.RunControl, path: Path) -> None:
        assert path.is_dir()
        self.heard.append(("save", run.step, store.step_of(path)))

    def on_end(self, run: reinforge.RunControl) -> None:
        self.heard.append(("end", run.step, run.error))


def test_the_events_of_a_run_in_their_order(make: Make) -> None:
    cfg = make("run", "grpo", "train.steps=2", "eval.every=1")
    listening = Listening()
    train(cfg, listening, eval_data=EVAL)
    steps = [
        [("rollouts", n, 4), ("rewards", n, 4), ("advantages", n, 4), ("step", n, n)]
        for n in (1, 2)
    ]
    assert listening.heard == [
        ("begin", 0, 2),
        ("evaluation", 0, 4),
        *steps[0],
        ("evaluation", 1, 4),
        *steps[1],
        ("evaluation", 2, 4),
        ("save", 2, 2),
        ("end", 2, None),
    ]
    whole = make("whole", "grpo", "train.steps=2", "eval.every=1")
    launch(whole, eval_data=EVAL)
    assert digest(cfg) == digest(whole)


def test_a_callback_that_stops_the_run(make: Make) -> None:
    """A plain function is called after every step. What it asks for is done right then."""
    cfg = make("run", "grpo", "train.steps=9")

    def enough(run: reinforge.RunControl, step: reinforge.RunStep) -> None:
        if step.number == 1:
            run.save()
        if step.number == 2:
            run.stop("two are enough")

    result = train(cfg, enough)
    assert (result.steps, result.stopped) == (2, "stopped by the caller: two are enough")
    saved = [e["step"] for e in lines(cfg, "events.jsonl") if e["kind"] == "checkpoint"]
    assert saved == [1, 2]


def test_a_callback_that_changes_rewards_and_one_that_skips(make: Make) -> None:
    class Flat(reinforge.Callback):
        def on_rewards(self, run: reinforge.RunControl, step: reinforge.RunStep) -> None:
            step.set_rewards([[0.25] * len(group) for group in step.rewards])

    class Skips(reinforge.Callback):
        def on_advantages(self, run: reinforge.RunControl, step: reinforge.RunStep) -> None:
            assert all(not bool(a.any()) for group in step.advantages for a in group)
            step.skip()

    cfg = make("run", "grpo", "train.steps=2")
    result = train(cfg, [Flat(), Skips()])
    assert result.metrics["reward/mean"] == 0.25 and result.metrics["tokens/trained"] == 0
    record = lines(cfg, "groups.jsonl")[0]
    assert record["changed"] == ["rewards"] and record["policy_trained"] is False


class Broken(reinforge.Callback):
    def on_rewards(self, run: reinforge.RunControl, step: reinforge.RunStep) -> None:
        raise ZeroDivisionError("mine")


class Late(reinforge.Callback):
    def on_advantages(self, run: reinforge.RunControl, step: reinforge.RunStep) -> None:
        step.set_rewards(step.rewards)


class Asks(reinforge.Callback):
    def on_step(self, run: reinforge.RunControl, step: reinforge.RunStep) -> None:
        run.evaluate()


class Updates(reinforge.Callback):
    def on_rewards(self, run: reinforge.RunControl, step: reinforge.RunStep) -> None:
        step.update()


class Mistyped(reinforge.Callback):
    def on_steps(self, run: reinforge.RunControl, step: reinforge.RunStep) -> None:
        raise AssertionError


class Strange(reinforge.Callback):
    def on_weekend(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (Broken(), r"Broken\.on_rewards raised ZeroDivisionError: mine \(test_callbacks\.py:\d+\)"),
        (Late(), r"Late\.on_advantages raised .*Change rewards in on_rewards"),
        (Asks(), r"Asks\.on_step raised .*nothing to evaluate"),
        (Updates(), r"Updates\.on_rewards raised .*the loop trains this step itself"),
        (3, r"callbacks: 3 is no callback\. .*reinforge\.Callback"),
        (Broken, r"is no callback"),
        (Mistyped(), r"^callbacks: Mistyped\.on_steps is no event\. Did you mean on_step\?$"),
        (
            Strange(),
            r"Strange\.on_weekend is no event\. There are: on_begin, on_rollouts, .*on_end",
        ),
    ],
    ids=[
        "raises",
        "too late",
        "cannot evaluate",
        "updates",
        "a number",
        "a class",
        "mistyped",
        "strange",
    ],
)
def test_a_callback_that_fails_is_named(make: Make, callback: Any, says: str) -> None:
    cfg = make("run", "grpo")
    listening = Listening()
    with pytest.raises(InputError, match=says):
        train(cfg, [listening, callback])
    if not isinstance(callback, int | type | Mistyped | Strange):  # before the run begins
        assert listening.heard[-1][0] == "end" and isinstance(listening.heard[-1][2], InputError)
        summary = json.loads((Path(cfg.run.dir) / "summary.json").read_text())
        assert summary["status"] == "failed"


# callbacks of transformers


class Theirs(TrainerCallback):
    """Hears everything, and asks for what a control can ask for."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.logs: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert isinstance(kwargs["model"], torch.nn.Module)
        self.heard.append(("train begin", state.max_steps, args.learning_rate))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.heard.append(("step begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.heard.append(("step end", state.global_step))
        control.should_save = state.global_step == 1
        control.should_evaluate = state.global_step == 2
        control.should_training_stop = state.global_step == 3
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(logs)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        assert metrics["eval_reward"] == metrics["eval/reward"]
        self.heard.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.heard.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert [entry["step"] for entry in state.log_history] == [1, 2, 3]
        self.heard.append(("train end", state.global_step))


def test_a_callback_of_transformers_and_its_control(make: Make) -> None:
    cfg = make("run", "grpo", "train.steps=9", "eval.at_start=false")
    theirs = Theirs()
    result = train(cfg, [theirs], eval_data=EVAL)
    assert result.steps == 3 and "Theirs set should_training_stop" in str(result.stopped)
    assert theirs.heard == [
        ("train begin", 9, 1e-3),
        ("step begin", 0),
        ("step end", 1),
        ("step begin", 1),
        ("save", 1),
        ("step end", 2),
        ("step begin", 2),
        ("evaluate", 2),
        ("step end", 3),
        ("evaluate", 3),
        ("save", 3),
        ("train end", 3),
    ]
    logged = [m for m in lines(cfg) if "train/loss" in m]
    assert [log["loss"] for log in theirs.logs] == [m["train/loss"] for m in logged]
    assert theirs.logs[0]["learning_rate"] == 1e-3


def test_early_stopping_of_transformers(make: Make) -> None:
    """The reward is always 1/2, so the second evaluation is no better than the first."""
    cfg = make("run", "grpo", "train.steps=9", "eval.every=1")
    result = reinforge.train(
        cfg,
        data=DATA,
        eval_data=EVAL,
        rewards=[lambda completions: [0.5] * len(completions)],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    assert result.steps == 2 and "EarlyStoppingCallback" in str(result.stopped)


def test_transformers_hears_of_no_best_where_nothing_could_be_scored(make: Make) -> None:
    """NaN would stay the best for ever: no number is above it."""
    seen: list[float | None] = []

    class Best(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.best_metric)

    def later(completions: list[str]) -> list[float | None]:
        return [0.5 if seen else None] * len(completions)

    cfg = make("run", "grpo", "train.steps=2", "eval.every=1")
    reinforge.train(cfg, data=DATA, eval_data=EVAL, rewards=[later], callbacks=[Best()])
    assert seen == [None, 0.5]


def test_only_methods_that_look_like_events_are_refused() -> None:
    class Both(reinforge.Callback, TrainerCallback):
        """Ours, and of transformers: it has the events of both."""

    class Own(reinforge.Callback):
        on_fire = False  # no method

        def _on_steps(self) -> None: ...

        def once(self) -> None: ...

    both, own = Both(), Own()
    assert [callback for _, callback in Callbacks([both, own]).listed] == [both, own]
