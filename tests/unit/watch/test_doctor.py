"""A run that could not learn says so: live, at its end, in its summary, in its report and in `runs
show`. One place decides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_runs import DATA, EVAL, launch, lines, odd
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.cli.main import main
from reinforge.config.schema import Config
from reinforge.core.errors import InputError, StoppedByPolicy
from reinforge.watch.doctor.doctor import Doctor
from reinforge.watch.doctor.history import Window
from reinforge.watch.doctor.table import SHARE
from reinforge.watch.report import write_report
from reinforge.watch.runs import show_run

FINE = {
    "train/skipped": 0.0,
    "train/grad_norm": 0.5,
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "reward/unscored": 0.0,
    "batch/signal": 1.0,
}
TIED = {**FINE, "train/grad_norm": 0.0, "batch/signal": 0.0, "reward/mean": 0.25}

SOLVED = {**TIED, "reward/mean": 1.0, "reward/std": 0.0}


def health(*steps: dict[str, Any]) -> Doctor:
    found = Doctor()
    for number, metrics in enumerate(steps, 1):
        found.observe(number, metrics)
    return found


def kinds(found: Doctor, *, ended: bool = True) -> list[str]:
    return [trouble.kind for trouble in found.troubles(ended=ended)]


def score(value: float, spread: float | None = 0.05) -> dict[str, float]:
    bounds = (
        {}
        if spread is None
        else {"eval/accuracy_low": value - spread, "eval/accuracy_high": value + spread}
    )
    return {"eval/accuracy": value, **bounds}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([FINE] * 20, []),
        ([FINE] * 10 + [TIED] * 10, []),  # half is not most
        ([FINE] * 9 + [TIED] * 11, ["no_gradient"]),
        ([TIED], ["no_gradient"]),
        ([FINE] * 4 + [SOLVED] * 6, ["solved"]),
        ([FINE] * 5 + [SOLVED] * 5, []),
        ([{**FINE, "reward/mean": 1.5}] + [SOLVED] * 6, ["no_gradient"]),  # it was better once
        ([FINE, *[SOLVED] * 6, FINE], ["no_gradient"]),
        ([FINE, TIED, *[SOLVED] * 3], ["solved"]),
        ([FINE] + [{**SOLVED, "reward/std": 0.4}] * 6, ["no_gradient"]),  # of some prompts only
        ([SOLVED] * 6, ["constant_reward"]),
        # the KL, the entropy or a router gave a gradient
        ([{**FINE, "batch/signal": 0.0}] * 6, []),
        ([{"train/skipped": 0.0, "batch/signal": 0.0}] * 6, ["no_gradient"]),
        # no group at all was left to train
        ([{"train/skipped": 0.0, "train/empty": 1.0}] * 6, ["no_gradient"]),
        ([{"train/skipped": 0.0, "train/grad_norm": 0.0}] * 6, ["no_gradient"]),  # SFT
        (
            [{**FINE, "reward/std": 0.0, "reward/mean": 0.1 + 0.2}] * 3
            + [{**FINE, "reward/std": 1e-17, "reward/mean": 0.3}] * 3,
            ["constant_reward"],
        ),
        ([{**FINE, "reward/std": 0.0, "reward/mean": 0.0}] * 5 + [FINE], []),
        # a teacher says what to learn
        ([{**FINE, "reward/std": 0.0, "reward/mean": 0.0, "policy/teacher_kl": 0.3}] * 6, []),
        ([{**FINE, "reward/std": 0.0, "reward/mean": 0.0, "distillation/kl": 0.3}] * 6, []),
        # it moves
        (
            [
                {**FINE, "reward/std": 0.0, "reward/mean": 0.0},
                {**FINE, "reward/std": 0.0, "reward/mean": 1.0},
            ],
            [],
        ),
        ([{**FINE, "train/skipped": 1.0, "train/grad_norm": math.nan}] + [FINE] * 9, ["nonfinite"]),
        # one in a hundred is skipped, and that is all
        ([{**FINE, "train/skipped": 1.0, "train/grad_norm": None}] + [FINE] * 99, []),
        ([{**FINE, "reward/unscored": 0.2}] * 6, ["unscored"]),
        ([{**FINE, "reward/unscored": 0.05}] * 6, []),
        (
            [
                {
                    **FINE,
                    "reward/unscored": 1.0,
                    "reward/mean": math.nan,
                    "reward/std": 0.0,
                    "train/grad_norm": 0.0,
                }
            ]
            * 2,
            ["unscored"],
        ),
        ([score(0.53), FINE, score(0.0)], ["collapse"]),
        ([score(0.53), FINE, score(0.45)], []),  # their intervals overlap
        ([score(0.5, None), score(0.26, None)], []),
        ([score(0.5, None), score(0.24, None)], ["collapse"]),
        ([score(0.1), score(0.9)], []),
    ],
)
def test_what_is_a_trouble_and_what_is_not(
    steps: list[dict[str, Any]], expected: list[str]
) -> None:
    assert kinds(health(*steps)) == expected


def test_steps_without_any_score_are_no_steps_of_equal_rewards() -> None:
    silent = {**TIED, "reward/unscored": 1.0, "reward/mean": None, "reward/std": None}
    assert kinds(health(*[silent] * 6)) == ["unscored"]
    assert kinds(health(*[silent] * 6, FINE, FINE, TIED)) == ["unscored"]
    [cause, tied] = health(*[silent] * 6, FINE, TIED, TIED).troubles(ended=True)
    assert cause.kind == "unscored" and tied.kind == "no_gradient"
    assert tied.since == 8
    told = "2 of 3 steps that had scored answers taught nothing"
    assert tied.what.startswith(told) and "(mean 0.25 in those steps)" in tied.what


def test_while_a_run_goes_on_a_share_needs_a_few_steps() -> None:
    assert kinds(health(*[TIED] * (SHARE - 1)), ended=False) == []
    assert kinds(health(*[TIED] * SHARE), ended=False) == ["no_gradient"]
    # an evaluation has enough rows of its own
    assert kinds(health(score(0.9), score(0.0)), ended=False) == ["collapse"]


def test_a_trouble_names_its_numbers_and_the_next_step() -> None:
    [solved] = health(*[FINE] * 3, *[SOLVED] * 9).troubles(ended=True)
    assert solved.what == (
        "Solved after step 3, as far as rewards tell: every answer since got 1, more than the mean"
        " of any step before, and 9 steps had nothing to learn from."
    )
    [idle] = health(*[FINE] * 2, *[TIED] * 17, FINE).troubles(ended=True)
    assert (
        "17 of 20 steps taught nothing" in idle.what
        and "mean 0.25" in idle.what
        and "group_size" in idle.fix
    )
    [constant] = health(*[{**FINE, "reward/std": 0.0, "reward/mean": 0.5}] * 30).troubles(
        ended=True
    )
    assert (
        "30 steps got the same reward, 0.5" in constant.what
        and "reinforge check rewards" in constant.fix
    )


def everywhere(run_dir: Path, view: SilentView, kind: str, words: str) -> None:
    """Live, at the end, in the log, the summary, the report, and to whoever looks later."""
    assert [trouble.kind for trouble in view.found] == [kind] and words in view.found[0].what
    assert (
        f"warning: {view.found[0].what.split()[0]}" in view.messages[-1]
        and words.split()[-1] in view.messages[-1]
    )
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [trouble["kind"] for trouble in summary["troubles"]] == [kind] and summary["troubles"][
        0
    ]["fix"]
    assert f'data-kind="{kind}"' in (run_dir / "report.html").read_text()
    assert any(words in text for text in show_run(run_dir)["troubles"])


def test_a_run_with_a_constant_reward_says_so_everywhere(make: Callable[..., Config]) -> None:
    cfg = make("run", "grpo", "train.steps=6", "run.checkpoint.every=2")
    view = SilentView()

    def same(completions: list[str]) -> list[float]:
        return [0.5] * len(completions)

    train_config(cfg, CallerObjects(data=DATA, rewards=[same]), view)
    everywhere(Path(cfg.run.dir), view, "constant_reward", "got the same reward, 0.5")
    told = [e for e in lines(cfg, "events.jsonl") if e["kind"] == "trouble"]
    assert [(e["trouble"], e["step"]) for e in told] == [("constant_reward", SHARE)]


def test_a_run_whose_groups_tie_says_so_everywhere(make: Callable[..., Config]) -> None:
    """Most steps without a gradient: prompts differ, the answers to one do not.

    Under a KL penalty such steps have one.
    """
    for name, extra in (("plain", ()), ("penalty", ("algorithm.kl.coefficient=0.1",))):
        cfg = make(name, "grpo", "train.steps=7", *extra)
        view = SilentView()
        calls = count()

        def by_prompt(
            prompts: list[str], completions: list[str], calls: Any = calls
        ) -> list[float]:
            varied = next(calls) < 4  # the prompts of the first step
            return [
                float(len(c) % 2) if varied else float(p[0] in "02468")
                for p, c in zip(prompts, completions, strict=True)
            ]

        train_config(cfg, CallerObjects(data=DATA, rewards=[by_prompt]), view)
        if not extra:
            everywhere(Path(cfg.run.dir), view, "no_gradient", "6 of 7 steps taught nothing")
            continue
        tied = [line for line in lines(cfg) if line.get("batch/signal") == 0]
        assert len(tied) == 6 and all(line["train/grad_norm"] > 0 for line in tied)
        assert json.loads((Path(cfg.run.dir) / "summary.json").read_text())["troubles"] == []


def test_a_tracker_may_fail_while_the_troubles_are_told() -> None:
    """It fails in a thread of its own, at any moment."""

    doctor = Doctor()

    class Busy(dict[str, str]):
        def items(self) -> Any:
            for name, error in list(super().items()):
                doctor.hear({"kind": "sink_failed", "sink": f"{name}'s neighbour", "error": error})
                yield name, error

    doctor.history.trackers = Busy(first="down")
    assert [trouble.what for trouble in doctor.newest()] == [
        "first takes no metrics any more: down"
    ]
    assert len(doctor.troubles()) == 2


def test_steps_without_gradient_between_two_that_are_not_finite_do_not_save_a_run(
    make: Callable[..., Config],
) -> None:
    """A policy that a huge learning rate blew up answers nonsense: most groups tie, and now and
    then one gives NaN.
    """
    calls = count()

    def sometimes(completions: list[str]) -> list[float]:
        return odd(completions) if next(calls) // 4 % 2 == 0 else [0.0] * len(completions)

    cfg = make("run", "grpo", "train.steps=20", "train.learning_rate=1e30")
    view = SilentView()
    with pytest.raises(StoppedByPolicy, match="3 steps in a row had a non-finite loss or gradient"):
        train_config(cfg, CallerObjects(data=DATA, rewards=[sometimes]), view)
    assert [m["train/skipped"] for m in lines(cfg)] == [0, 0, 1, 0, 1, 0, 1]
    assert [m["train/empty"] for m in lines(cfg)] == [0, 1, 0, 1, 0, 1, 0]
    everywhere(
        Path(cfg.run.dir), view, "nonfinite", "3 of 7 steps had a gradient that was not finite"
    )


def test_a_resumed_run_remembers_what_spoke_against_it(make: Callable[..., Config]) -> None:
    def same(completions: list[str]) -> list[float]:
        return [0.5] * len(completions)

    launch(make("run", "grpo", "train.steps=4", "run.checkpoint.every=2"), same)
    view = SilentView()
    train_config(
        make("run", "grpo", "train.steps=5", "run.checkpoint.every=2"),
        CallerObjects(data=DATA, rewards=[same]),
        view,
    )
    assert "Every answer in 5 steps got the same reward" in view.found[0].what


def test_a_run_that_learns_has_no_trouble(make: Callable[..., Config]) -> None:
    cfg = make("run", "grpo", "train.steps=6", "eval.every=3")
    launch(cfg, eval_data=EVAL)
    assert (
        show_run(Path(cfg.run.dir))["troubles"] == []
        and "data-kind" not in write_report(Path(cfg.run.dir)).read_text()
    )


def same(completions: list[str]) -> list[float]:
    return [0.5] * len(completions)


def test_a_run_that_is_paused_goes_on_with_the_same_command(make: Callable[..., Config]) -> None:
    asked = ("run.doctor.constant_reward=pause", "train.steps=7")
    with pytest.raises(StoppedByPolicy, match="constant_reward at step 5.*The same command goes"):
        launch(make("run", "grpo", *asked), same)
    cfg = make("run", "grpo", *asked)
    run = show_run(Path(cfg.run.dir))
    assert run["status"] == "stopped" and [c["step"] for c in run["checkpoints"]] == [5]
    launch(cfg, same)
    after = show_run(Path(cfg.run.dir))
    assert after["status"] == "finished" and after["step"] == 7
    # told once, when it appeared
    told = [(e["step"], e["action"]) for e in lines(cfg, "events.jsonl") if e["kind"] == "trouble"]
    assert told == [(5, "pause")]


def test_a_run_that_is_stopped_is_over(make: Callable[..., Config]) -> None:
    cfg = make("run", "grpo", "run.doctor.constant_reward=stop", "train.steps=7")
    with pytest.raises(StoppedByPolicy, match="constant_reward at step 5.*It is over"):
        launch(cfg, same)
    view = SilentView()
    train_config(cfg, CallerObjects(data=DATA, rewards=[same]), view)
    assert show_run(Path(cfg.run.dir))["step"] == 5
    assert any("the doctor found constant_reward at step 5" in text for text in view.messages)


def test_what_is_off_is_not_looked_for_and_a_note_is_not_shown(make: Callable[..., Config]) -> None:
    for action, logged in (("off", []), ("note", ["constant_reward"])):
        cfg = make(action, "grpo", f"run.doctor.constant_reward={action}", "train.steps=5")
        view = SilentView()
        train_config(cfg, CallerObjects(data=DATA, rewards=[same]), view)
        events = lines(cfg, "events.jsonl")
        assert [e["trouble"] for e in events if e["kind"] == "trouble"] == logged
        assert view.found == [] and show_run(Path(cfg.run.dir))["troubles"] == []
        assert ("note: Every answer in 5 steps" in view.messages[-1]) == bool(logged)


def test_the_page_says_what_it_is_how_one_sees_it_and_what_to_turn(
    make: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run whose answers are all cut off and get nothing: that, and not the constant reward."""

    def nothing(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    cfg = make("run", "grpo", "train.steps=8", "rollout.max_new_tokens=1")
    launch(cfg, nothing)
    capsys.readouterr()
    assert main(["runs", "diagnose", cfg.run.dir]) == 0
    page = capsys.readouterr().out
    assert "First cause: truncation, since step" in page
    assert "try       rollout.max_new_tokens=16 (it is 1)" in page
    assert "docs/doctor.md#truncation" in page and "samples   step 8, " in page
    assert "Also: constant_reward, since step 1 (follows from truncation)" in page
    assert "Is it learning? No." in page and "a gradient in 0 of 8 steps" in page
    assert main(["runs", "diagnose", cfg.run.dir, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["first"]["knob"] == {"key": "rollout.max_new_tokens", "value": 16}
    assert [other["because"] for other in told["others"]] == ["truncation"]
    assert all(sample["uid"] for sample in told["first"]["samples"])


def test_what_a_run_failed_with_comes_first(
    make: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(completions: list[str]) -> list[float]:
        raise ValueError("boom")

    cfg = make("run", "grpo", "train.steps=2")
    with pytest.raises(InputError, match="boom"):
        launch(cfg, breaks)
    capsys.readouterr()
    assert main(["runs", "diagnose", cfg.run.dir]) == 0
    page = capsys.readouterr().out
    assert "boom" in next(line for line in page.splitlines() if line.startswith("It failed: "))
    assert "Nothing speaks against this run before it did." in page
    assert main(["runs", "diagnose", cfg.run.dir, "--json"]) == 0
    assert "boom" in json.loads(capsys.readouterr().out)["why"]


def test_a_run_that_is_fine_has_nothing_against_it(
    make: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = make("run", "sft", "train.steps=12", "train.learning_rate=1e-2")
    launch(cfg)
    capsys.readouterr()
    assert main(["runs", "diagnose", cfg.run.dir]) == 0
    page = capsys.readouterr().out
    assert "Nothing speaks against this run." in page and "Is it learning? Yes." in page


def test_lines_heard_at_once_are_the_same_as_one_by_one() -> None:
    """With whole numbers, numbers that are not finite, and names that come later."""
    lines = [
        {"step": n, "train/skipped": 0, "train/loss": 1.0 / n, "reward/mean": n}
        | ({"train/grad_norm": None, "nonfinite": ["train/grad_norm"]} if n in (3, 4) else {})
        | ({"policy/entropy": float(n), "time/step": 0.5} if n > 5 else {})
        | ({"faults/reward": 1.0} if n == 7 else {})
        for n in range(1, 11)
    ]
    lines.insert(4, {"step": 4, "eval/accuracy": 0.5, "eval/accuracy_low": 0.25})
    one_by_one, at_once = Doctor(), Doctor()
    for line in lines:
        one_by_one.observe(int(line["step"]), line)
    at_once.observe_lines(lines)
    assert repr(at_once.history.columns) == repr(one_by_one.history.columns)
    assert at_once.history.scores == one_by_one.history.scores
    history = at_once.history
    assert list(history.steps) == list(range(1, 11))
    assert history.window("policy/entropy") == Window(
        "policy/entropy", [6, 7, 8, 9, 10], [6.0, 7.0, 8.0, 9.0, 10.0]
    )
    assert history.window("train/grad_norm") is None and history.faults
    assert history.window("reward/mean") == Window(
        "reward/mean", list(range(1, 11)), [float(n) for n in range(1, 11)]
    )
