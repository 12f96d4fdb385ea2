"""SIGTERM and Ctrl-C: a checkpoint, the exit code, and a resumed run that does not know it was
stopped.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from helpers import cli_runs
from helpers.cli_runs import Whole, whole
from reinforge.checkpoint import store

STEPS = 4
CALLS = 4  # reward calls of one step or one evaluation


@pytest.fixture(scope="module")
def short(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """4 steps of two updates each; evaluations at 0, 3 and 4, checkpoints at 2 and 4.

    Its surrogate and one reward can pause.
    """
    folder = tmp_path_factory.mktemp("short")
    algorithm = {"surrogate": f"{folder / 'parts.py'}:surrogate", "epochs": 2}
    # which counts its calls
    digits = {"name": f"{folder / 'parts.py'}:digits", "weight": 0.5, "in_process": True}
    rewards = [{"name": "exact_number"}, digits]
    return whole(
        folder,
        cli_runs.write_config(
            folder, tiny, train={"steps": STEPS}, algorithm=algorithm, rewards=rewards
        ),
        STEPS,
    )


def stopped(
    run: Whole, folder: Path, at: str, pause: float, kind: signal.Signals = signal.SIGTERM
) -> cli_runs.Started:
    """Starts the run, waits until it pauses at the given place, and sends the signal."""
    process = cli_runs.start(
        run.command(), folder, env={"PAUSE_AT": at, "PAUSE": str(pause)}, forked=True
    )
    assert process.until(lambda: (folder / "paused").exists()), process.output()
    process.send(kind)
    return process


def saved(folder: Path) -> int:
    newest = store.latest(folder / "run")
    return store.step_of(newest) if newest else -1


def resumed(run: Whole, folder: Path, **env: str) -> list[str]:
    process = cli_runs.start(run.command(), folder, env=env, forked=True)
    assert process.wait() == 0, process.output()
    return run.differences(folder / "run")


# the third step: its rewards are calls 13 to 16 (after the first evaluation and two steps), its
# updates 5 and 6
@pytest.mark.parametrize(
    ("at", "step"),
    [
        # rollouts are thrown away: the boundary before them is saved
        (f"reward:{CALLS + 2 * CALLS + 2}", 2),
        ("surrogate:5", 3),  # training is not cut: its step is finished, then saved
        pytest.param("surrogate:6", 3, marks=pytest.mark.long),
        # the evaluation before the first step
        pytest.param("reward:2", 0, marks=pytest.mark.long),
        (f"reward:{CALLS + 3 * CALLS + 2}", 3),  # the evaluation after the third step
        # the last evaluation, of a run that is all but finished
        (f"reward:{CALLS + 3 * CALLS + CALLS + CALLS + 2}", 4),
    ],
)
def test_a_signal_saves_and_the_run_goes_on_exactly(
    short: Whole, tmp_path: Path, at: str, step: int
) -> None:
    process = stopped(short, tmp_path, at, 0.3)
    assert process.wait() == 143, process.output()
    assert saved(tmp_path) == step
    assert cli_runs.trained_steps(tmp_path / "run") == list(range(1, step + 1))
    assert not (tmp_path / "run" / "run.lock").exists()
    events = cli_runs.lines(tmp_path / "run" / "events.jsonl")
    assert [e["signal"] for e in events if e["kind"] == "signal"] == ["SIGTERM"]
    assert events[-1]["kind"] == "terminated"
    assert (
        "Traceback" not in process.output() and f"step {step}" in process.output().splitlines()[-1]
    )
    assert resumed(short, tmp_path) == []
    assert cli_runs.evaluated_steps(tmp_path / "run") == [0, 3, 4]


def test_killed_while_replacing_the_checkpoint_of_a_signal(short: Whole, tmp_path: Path) -> None:
    """The signal saved step 4 before its evaluation; the resumed run evaluates and replaces that
    checkpoint.
    """
    last_evaluation = f"reward:{CALLS + 3 * CALLS + CALLS + CALLS + 1}"
    assert stopped(short, tmp_path, last_evaluation, 0.3).wait() == 143
    assert (
        cli_runs.start(
            short.command(), tmp_path, env={"REINFORGE_CRASH_AT": "save:replacing"}, forked=True
        ).wait()
        == -signal.SIGKILL
    )
    assert saved(tmp_path) < STEPS, "the old one has stepped aside, the new one is not there yet"
    assert resumed(short, tmp_path) == []


def test_generation_is_cut_at_once(short: Whole, tmp_path: Path, tiny: Path) -> None:
    """With long completions almost all of a step is generation.

    The signal ends it in the middle: the step is never trained.
    """
    config = cli_runs.write_config(
        tmp_path / "long",
        tiny,
        train={"steps": 3},
        rollout={"max_new_tokens": 240},
        data={"eval": {"size": 0}},
        eval={"every": 0},
    )
    run = whole(tmp_path / "long", config, 3)
    process = cli_runs.start(run.command(), tmp_path, forked=True)
    process.until(lambda: b'"step": 1,' in read(tmp_path / "run" / "metrics.jsonl"))
    time.sleep(run.seconds / 3 / 3)  # a third of the second step
    process.send(signal.SIGTERM)
    sent = time.time()
    assert process.wait() == 143, process.output()
    assert time.time() - sent < run.seconds / 3 + 1.0
    assert saved(tmp_path) == 1 and cli_runs.trained_steps(tmp_path / "run") == [1]
    assert resumed(run, tmp_path) == []


def test_supervised_training_stops_after_the_step_at_hand(tmp_path: Path, tiny: Path) -> None:
    """Nothing in an SFT step waits for anything, yet the signal is seen in the step in which it
    arrives.
    """
    config = cli_runs.write_config(
        tmp_path / "slow",
        tiny,
        "sft",
        train={"steps": 8, "prompts_per_step": 50, "tokens_per_microbatch": 8},
        eval={"every": 0},
    )
    run = whole(tmp_path / "slow", config, 8)
    process = cli_runs.start(run.command(), tmp_path, forked=True)
    process.until(lambda: b'"step": 3,' in read(tmp_path / "run" / "metrics.jsonl"))
    process.send(signal.SIGTERM)
    sent = time.time()
    assert process.wait() == 143, process.output()
    late = [
        line["step"]
        for line in cli_runs.lines(tmp_path / "run" / "metrics.jsonl")
        if line["time"] > sent
    ]
    assert len(late) <= 1 and saved(tmp_path) == (late or [3])[-1]
    assert resumed(run, tmp_path) == []


def test_the_second_signal_ends_it_at_once(short: Whole, tmp_path: Path) -> None:
    """In the middle of an optimizer step that takes long; nothing is saved, and nothing is lost but
    that step.
    """
    process = stopped(short, tmp_path, "surrogate:5", 60)
    time.sleep(0.3)  # two signals at one moment are one signal
    process.send(signal.SIGTERM)
    assert process.wait(10) == 143
    assert saved(tmp_path) == 2
    assert resumed(short, tmp_path) == []


def test_ctrl_c(short: Whole, tmp_path: Path) -> None:
    process = stopped(short, tmp_path, "surrogate:5", 0.3, signal.SIGINT)
    assert process.wait() == 130, process.output()
    assert saved(tmp_path) == 3
    assert resumed(short, tmp_path) == []


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
