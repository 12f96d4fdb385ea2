"""Runs and their boundaries on a tiny model: resume, the journal, evaluation, early stopping, the
best checkpoint, supervised runs.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_runs import DATA, EVAL, LORA, digest, launch, lines, odd
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import ConfigTrainer, train_config
from reinforge.build.trainer import build
from reinforge.checkpoint import store
from reinforge.checkpoint.lock import LOCK
from reinforge.config.schema import Config
from reinforge.core.errors import InputError, Terminated
from reinforge.loops.rl import RLTrainer
from reinforge.watch.timing import PhaseTimer
from reinforge.watch.why import wrong_advantages

# resume


class Crash(Exception):
    pass


EXTRA = (
    "train.schedule.kind=cosine",
    "train.schedule.warmup=2",
    "train.optimizer.weight_decay=0.01",
)


@pytest.mark.parametrize(
    ("algorithm", "overrides", "sections"),
    [
        ("grpo", EXTRA, {}),
        ("grpo", ("algorithm.epochs=2", "algorithm.kl.coefficient=0.1"), {}),
        ("grpo", ("algorithm.kl.coefficient=0.1",), LORA),
        ("dapo", ("algorithm.overlong_buffer=4",), {}),
        ("grpo", ("model.dtype=bfloat16",), {}),
        ("sft", EXTRA, {}),
        (
            "grpo",
            (
                "eval.every=1",
                "run.checkpoint.best=eval/reward",
                "eval.samples=2",
                "eval.temperature=1.0",
            ),
            {},
        ),
    ],
    ids=str,
)
def test_resume_gives_the_uninterrupted_run(
    make: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    overrides: tuple[str, ...],
    sections: dict,
) -> None:
    """A run that dies in step 4 of 6, with its last checkpoint at 2, ends with the digest of one
    that never died.
    """
    eval_data = EVAL if "eval.every=1" in overrides else None
    settings = ("train.steps=6", "run.checkpoint.every=2", *overrides)
    whole = make("whole", algorithm, *settings, **sections)
    launch(whole, eval_data=eval_data)
    cut = make("cut", algorithm, *settings, **sections)
    from reinforge.backends.local import LocalBackend

    original = LocalBackend.step

    def dies(self: LocalBackend) -> Any:
        if self.steps == (3 if "algorithm.epochs=2" not in overrides else 7):
            raise Crash
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "step", dies)
        with pytest.raises(Crash):
            launch(cut, eval_data=eval_data)
    # a better evaluation may have saved at 3
    assert store.step_of(store.steps(Path(cut.run.dir))[0]) == 2 or eval_data is not None
    launch(cut, eval_data=eval_data)
    assert digest(cut) == digest(whole)

    def drop(m: dict[str, Any]) -> dict[str, Any]:
        clock = ("time", "share", "memory", "tokens_per_second", "efficiency")
        return {k: v for k, v in m.items() if not k.startswith(clock)}

    # no step is in the log twice, none is missing
    assert [drop(m) for m in lines(cut)] == [drop(m) for m in lines(whole)]


def test_a_redone_step_does_not_ask_again(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge that answers differently each time: what it said before the crash is what the redone
    step trains on.
    """
    asked: list[list[str]] = []

    def moody(completions: list[str]) -> list[float]:
        asked.append(completions)
        return [hash((len(asked), i)) % 97 / 97 for i in range(len(completions))]

    cfg = make("run", "grpo", "train.steps=2", "run.checkpoint.every=1")
    from reinforge.backends.local import LocalBackend

    original = LocalBackend.step
    before = []

    def dies(self: LocalBackend) -> Any:
        if self.steps == 1:
            before.append(float(self.optimizer.gradient_norm()))
            raise Crash
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "step", dies)
        with pytest.raises(Crash):
            launch(cfg, moody)
    calls = len(asked)
    launch(cfg, moody)
    assert (
        calls == len(asked) == 8
        and lines(cfg)[-1]["train/grad_norm"] == before[0]
        and not (Path(cfg.run.dir) / "journal.jsonl").exists()
    )


def test_a_finished_run_does_nothing_more(make: Callable[..., Config]) -> None:
    cfg = make()
    launch(cfg)
    first = digest(cfg)
    events = lines(cfg, "events.jsonl")
    result = launch(cfg)
    assert digest(cfg) == first and result.steps == 3 and len(lines(cfg)) == 3
    assert lines(cfg, "events.jsonl") == events and result.report is not None
    assert result.metrics["reward/mean"] == lines(cfg)[-1]["reward/mean"]


def test_a_finished_run_loads_nothing(make: Callable[..., Config]) -> None:
    """In a new process: neither a model nor torch itself."""
    cfg = make("run", "grpo", "train.steps=1")
    launch(cfg)
    program = """
import json, sys
from reinforge.build.run import train_config
from reinforge.config.schema import Config

with open(sys.argv[1]) as file:
    train_config(Config.model_validate(json.load(file)))
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", program, f"{cfg.run.dir}/config.json"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "this run is finished (step 1); nothing to do" in ran.stdout
    assert "finished  1 of 1 steps" in ran.stdout


def test_a_finished_run_that_is_to_be_evaluated_goes_on(make: Callable[..., Config]) -> None:
    """Only the run itself knows what other settings ask of it."""
    cfg = make("run", "grpo", "train.steps=1", "eval.every=0")
    launch(cfg, eval_data=EVAL)
    more = make("run", "grpo", "train.steps=1", "eval.every=0", "eval.samples=2")
    launch(more, eval_data=EVAL)
    kinds = [event["kind"] for event in lines(cfg, "events.jsonl")]
    assert kinds.count("resumed") == 1 and "config_changed" in kinds


def test_resume_policies(make: Callable[..., Config]) -> None:
    with pytest.raises(InputError, match=r"run\.resume.*no checkpoint"):
        launch(make("fresh", "grpo", "run.resume=must"))
    launch(make())
    with pytest.raises(InputError, match=r"run\.dir.*already holds a run"):
        launch(make("run", "grpo", "run.resume=never"))
    with pytest.raises(InputError, match=r"run\.dir.*cannot be made"):
        launch(make("run/metrics.jsonl/below"))
    with pytest.raises(InputError, match="rows"):
        launch(make("run", "grpo", "train.steps=5"), data=DATA[:8])


@pytest.mark.parametrize(
    ("overrides", "sections", "says"),
    [
        (
            ("train.learning_rate=0.5",),
            {},
            r"train\.learning_rate was 0\.001 and is 0\.5\. [^,]*run\.dir.*restore",
        ),
        (("run.seed=1",), {}, r"run\.seed was 0 and is 1"),
        (
            ("train.prompts_per_step=2", "algorithm.group_size=2"),
            {},
            r"group_size was 4 and is 2.*prompts_per_step was 4 and is 2",
        ),
        ((), LORA, r"adapter\.rank was not set and is 4"),
        (("rewards.0.weight=2",), {}, r"rewards\.0\.weight was 1\.0 and is 2\.0"),
        (
            ("rollout.temperature=0.5", "train.steps=5"),
            {},
            r"rollout\.temperature was 1\.0 and is 0\.5\.",
        ),
        (
            ("data.options.api_key=b", "data.options.n=1"),
            {},
            r"data\.options\.n was not set and is 1",
        ),
    ],
    ids=str,
)
def test_a_changed_config_is_refused_and_leaves_the_record(
    make: Callable[..., Config], overrides: tuple[str, ...], sections: dict[str, Any], says: str
) -> None:
    first = make("run", "grpo", "data.options.api_key=a")
    launch(first)
    record = (Path(first.run.dir) / "config.json").read_text()
    with pytest.raises(InputError, match=says) as error:
        launch(make("run", "grpo", "data.options.api_key=a", *overrides, **sections))
    assert (Path(first.run.dir) / "config.json").read_text() == record
    # these may change
    assert "api_key" not in str(error.value) and "train.steps" not in str(error.value)


def test_a_prompt_that_speaks_of_passwords_is_read_back_and_compared(
    make: Callable[..., Config],
) -> None:
    def saying(guess: str, *more: str) -> Config:
        return make(
            "run",
            "grpo",
            *more,
            data={"source": "python", "fixed": {"hint": f"basic arithmetic, password={guess}"}},
        )

    launch(saying("first"))
    record = json.loads((Path(saying("first").run.dir) / "config.json").read_text())
    assert Config.model_validate(record).data.fixed == {"hint": "basic arithmetic, password=first"}
    with pytest.raises(
        InputError, match="password=first' and is 'basic arithmetic, password=second'"
    ):
        launch(saying("second", "train.steps=5"))


def test_another_python_reward_is_refused_by_its_name(make: Callable[..., Config]) -> None:
    launch(make())
    with pytest.raises(InputError, match=r"rewards\.0\.name was 'odd' and is 'reward'"):
        launch(make("run", "grpo", "train.steps=5"), reward_by_step([0.0]))


def test_what_may_change_is_recorded(make: Callable[..., Config]) -> None:
    cfg = make("run", "grpo", "data.options.api_key=a")
    launch(cfg)
    changed = make(
        "run",
        "grpo",
        "data.options.api_key=b",
        "train.steps=5",
        "train.tokens_per_microbatch=64",
        "eval.every=2",
        "run.checkpoint.keep=1",
        "run.log.samples=2",
        "rollout.max_batch=7",
        "rollout.on_reward_error=unscored",
        "model.device=cpu",
        "rollout.kv_gib=0.02",
        "eval.early_stop.patience=9",
    )
    assert launch(changed).steps == 5
    (event,) = [e for e in lines(cfg, "events.jsonl") if e["kind"] == "config_changed"]
    assert event["step"] == 3 and event["changes"].pop("eval.early_stop.patience") == [None, 9]
    assert {k: v for k, v in event["changes"].items() if not k.startswith("eval.early_stop")} == {
        "train.steps": [3, 5],
        "train.tokens_per_microbatch": ["auto", 64],
        "eval.every": [0, 2],
        "run.checkpoint.keep": [2, 1],
        "run.log.samples": [4, 2],
        "rollout.max_batch": [512, 7],
        "rollout.on_reward_error": ["raise", "unscored"],
        "model.device": ["auto", "cpu"],
        "rollout.kv_gib": [0.01, 0.02],
    }
    with pytest.raises(InputError, match=r"train\.tokens_per_microbatch was 64 and is 'auto'"):
        launch(cfg)


def test_a_record_of_before_a_key_existed(make: Callable[..., Config]) -> None:
    cfg = make()
    launch(cfg)
    path = Path(cfg.run.dir) / "config.json"
    record = json.loads(path.read_text())
    del record["algorithm"]["max_refills"]
    path.write_text(json.dumps(record))
    assert launch(make("run", "grpo", "train.steps=4")).steps == 4
    path.unlink()
    view = SilentView()
    train_config(
        make("run", "grpo", "train.steps=4"), CallerObjects(data=DATA, rewards=[odd]), view
    )
    assert any("could not be checked" in message for message in view.messages)


def test_terminate_from_another_thread(make: Callable[..., Config]) -> None:
    """The reward's thread asks in the third step: the state of step 2 is saved, and the resumed run
    is the one never stopped.
    """
    whole = make("whole", "grpo", "train.steps=4")
    launch(whole)
    cfg = make("cut", "grpo", "train.steps=4")
    calls = [0]

    def asks(completions: list[str]) -> list[float]:
        calls[0] += 1
        if calls[0] == 9:
            trainer.run.terminate()
            trainer.run.terminate()
        return odd(completions)

    asks.__name__ = "odd"
    trainer = build(cfg, SilentView(), CallerObjects(data=DATA, rewards=asks))

    async def go() -> None:
        with trainer.run:
            async for _ in trainer.steps():
                pass

    with pytest.raises(Terminated, match="SIGINT at step 2 of 4"):
        asyncio.run(go())
    trainer.run.terminate()  # when nothing runs any more: no effect
    launch(cfg)
    assert digest(cfg) == digest(whole)


@pytest.mark.parametrize(
    "kinds",
    [
        [signal.SIGHUP],
        [signal.SIGUSR1],
        [signal.SIGHUP, signal.SIGHUP],
        [signal.SIGUSR1, signal.SIGTERM],
    ],
    ids=str,
)
def test_a_warning_saves_a_checkpoint_too(
    make: Callable[..., Config], kinds: list[signal.Signals]
) -> None:
    """A terminal that closes (its view cannot be written to any more) and a batch system before its
    time limit.
    """
    whole = make("whole", "grpo", "train.steps=4")
    cut = make("cut", "grpo", "train.steps=4")
    launch(whole)
    calls = [0]

    class Closed(SilentView):
        def message(self, text: str) -> None:
            if calls[0] >= 9 and kinds[0] is signal.SIGHUP:
                raise OSError(errno.EIO, "Input/output error")

        def update(self, step: int, metrics: dict[str, float]) -> None:
            self.message("")

    def hears(completions: list[str]) -> list[float]:
        calls[0] += 1
        if calls[0] == 9:
            for kind in kinds:
                os.kill(os.getpid(), kind)
        return odd(completions)

    hears.__name__ = "odd"
    with pytest.raises(Terminated, match=f"{kinds[-1].name} at step 2 of 4") as caught:
        train_config(cut, CallerObjects(data=DATA, rewards=[hears]), Closed())
    assert caught.value.exit_code == 128 + kinds[-1]
    assert all(
        signal.getsignal(kind) is signal.SIG_DFL for kind in kinds if kind is not signal.SIGTERM
    ), "as they were before the run"
    launch(cut)
    assert digest(cut) == digest(whole)


def test_who_ignores_a_warning_keeps_it_so(make: Callable[..., Config]) -> None:
    """nohup starts a program with SIGHUP ignored: it goes on when the terminal closes."""
    before = {
        kind: signal.signal(kind, handler)
        for kind, handler in (
            (signal.SIGHUP, signal.SIG_IGN),
            (signal.SIGUSR1, lambda *_: heard.append(1)),
        )
    }
    heard: list[int] = []

    def warns(completions: list[str]) -> list[float]:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
        return odd(completions)

    try:
        result = launch(make("run", "grpo", "train.steps=1"), warns)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    assert result.steps == 1 and heard


def test_a_run_whose_directory_was_moved_says_so(make: Callable[..., Config]) -> None:
    cfg = make("run", "grpo", "train.steps=4", "run.checkpoint.every=1")
    there = Path(cfg.run.dir)
    calls = [0]

    def moves(completions: list[str]) -> list[float]:
        calls[0] += 1
        if calls[0] == 9:
            there.rename(there.with_name("elsewhere"))
        return odd(completions)

    moves.__name__ = "odd"
    with pytest.raises(
        InputError, match=r"directory is gone: it was moved or deleted.*Move it back"
    ):
        launch(cfg, moves)
    assert not there.exists(), "nothing new was begun in its place"
    there.with_name("elsewhere").rename(there)
    (there / "run.lock").unlink()  # its owner, this process, would be dead
    assert launch(cfg, moves).steps == 4


def test_a_damaged_checkpoint_that_is_refused_leaves_an_event(make: Callable[..., Config]) -> None:
    cfg = make("run", "grpo", "train.steps=2")
    launch(cfg)
    (newest,) = store.steps(Path(cfg.run.dir))
    with (newest / "state.json").open("a") as file:
        file.write(" ")
    with pytest.raises(InputError, match="truncated or changed"):
        launch(make("run", "grpo", "train.steps=3"))
    event = lines(cfg, "events.jsonl")[-1]
    assert (
        event["kind"] == "damaged_checkpoint"
        and event["checkpoint"] == newest.name
        and "state.json" in event["error"]
    )


def test_trackers_get_the_configuration_without_its_secrets(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(
        "reinforge.loops.run.make_sinks", lambda names, target: told.append(target) or []
    )
    launch(make("run", "grpo", "train.steps=1", "data.fixed={url: 'http://me:PW@host'}"))
    assert told[0].config["data"]["fixed"] == {"url": "http://(hidden)@host"}


def test_the_start_of_a_tracker_is_no_part_of_a_step(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]  # the clock of the phases: it moves while the trackers are made

    def slow(names: Any, target: Any) -> list[Any]:
        now[0] += 100.0
        return []

    monkeypatch.setattr("reinforge.loops.run.make_sinks", slow)
    clocked = functools.partial(PhaseTimer, lambda: now[0])
    monkeypatch.setattr("reinforge.loops.run.PhaseTimer", clocked)
    cfg = make("run", "grpo", "train.steps=1")
    launch(cfg)
    [step] = [line for line in lines(cfg, "metrics.jsonl") if "time/step" in line]
    assert now == [100.0] and step["time/step"] == 0.0


# evaluation at boundaries


def reward_by_step(values: list[float]) -> Callable[..., list[float]]:
    """A reward for EVAL rows that follows a script, one value per evaluation; training rows get
    `odd`.
    """
    count = [0]

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        if "*" not in prompts[0]:
            return odd(completions)
        value = values[min(count[0] // len(EVAL), len(values) - 1)]
        count[0] += 1
        return [value] * len(completions)

    return reward


EVALUATED = (
    "eval.every=1",
    "eval.at_start=true",
    "train.steps=8",
    "train.learning_rate=1e-4",
    "run.checkpoint.keep=1",
)


def test_early_stop_after_patience_keeps_the_best(make: Callable[..., Config]) -> None:
    cfg = make(
        "run",
        "grpo",
        *EVALUATED,
        "run.checkpoint.best=eval/reward",
        "eval.early_stop.metric=eval/reward",
        "eval.early_stop.patience=2",
    )
    result = launch(cfg, reward_by_step([0.1, 0.3, 0.8, 0.4, 0.8, 0.9]), eval_data=EVAL)
    assert (
        result.steps == 4
        and result.stopped is not None
        and "did not improve in 2" in result.stopped
    )
    there = [store.step_of(p) for p in store.steps(Path(cfg.run.dir))]
    assert there == [4, 2]  # the newest, and the best (equal is not better)
    assert [m["eval/reward"] for m in lines(cfg) if "eval/reward" in m] == [0.1, 0.3, 0.8, 0.4, 0.8]
    assert launch(cfg, reward_by_step([0.0]), eval_data=EVAL).steps == 4  # stopped is stopped


def test_patience_survives_a_resume(make: Callable[..., Config]) -> None:
    """Two evaluations without improvement before the cut, one after it: with a patience of 3 that
    is the end.
    """
    patient = (*EVALUATED, "eval.early_stop.metric=eval/reward", "eval.early_stop.patience=3")
    assert (
        launch(
            make("run", "grpo", *patient, "train.steps=2"),
            reward_by_step([0.5, 0.4, 0.4]),
            eval_data=EVAL,
        ).stopped
        is None
    )
    again = launch(make("run", "grpo", *patient), reward_by_step([0.4]), eval_data=EVAL)
    assert again.steps == 3 and again.stopped == "eval/reward did not improve in 3 evaluations"


def test_a_run_whose_lock_was_taken_saves_nothing(make: Callable[..., Config]) -> None:
    """Another process took the directory over while this one was suspended: its checkpoints are not
    to be overwritten.
    """
    cfg = make("run", "grpo", "train.steps=2")
    owner = Path(cfg.run.dir) / LOCK

    def suspended(completions: list[str]) -> list[float]:
        owner.write_text(json.dumps({**json.loads(owner.read_text()), "nonce": "another"}))
        return odd(completions)

    suspended.__name__ = "odd"
    with pytest.raises(InputError, match="no longer owns the run directory"):
        launch(cfg, suspended)
    assert (
        store.steps(Path(cfg.run.dir)) == [] and json.loads(owner.read_text())["nonce"] == "another"
    )


def test_early_stop_at_a_threshold_and_downwards(make: Callable[..., Config]) -> None:
    cfg = make(
        "up",
        "grpo",
        *EVALUATED,
        "eval.early_stop.metric=eval/reward",
        "eval.early_stop.threshold=0.5",
    )
    result = launch(cfg, reward_by_step([0.1, 0.2, 0.6]), eval_data=EVAL)
    assert result.steps == 2 and result.stopped == "eval/reward reached 0.6"
    down = make(
        "down",
        "sft",
        *EVALUATED,
        "run.checkpoint.best=min:eval/loss",
        "train.learning_rate=1e-2",
        "eval.early_stop.metric=eval/loss",
        "eval.early_stop.mode=min",
        "eval.early_stop.threshold=4.5",
    )
    result = launch(down, eval_data=EVAL)
    losses = [m["eval/loss"] for m in lines(down) if "eval/loss" in m]
    assert (
        losses[-1] <= 4.5 < losses[-2]
        and 0 < result.steps < 8
        and losses[0] == pytest.approx(5.7, abs=0.3)
    )  # log 300: a model that knows nothing


def test_an_unknown_metric_says_which_there_are(make: Callable[..., Config]) -> None:
    with pytest.raises(InputError, match=r"no metric 'eval/acuracy'.*eval/accuracy"):
        launch(make("run", "grpo", *EVALUATED, "run.checkpoint.best=eval/acuracy"), eval_data=EVAL)


def test_evaluation_sees_the_weights_of_its_step(make: Callable[..., Config]) -> None:
    """With a learning rate of 0 every evaluation is the same, with a real one they differ; its
    draws are the same every time.
    """
    same = make("same", "grpo", "train.learning_rate=0", "eval.every=1", "eval.temperature=1")
    launch(same, eval_data=EVAL)
    rewards = [m["eval/reward"] for m in lines(same) if "eval/reward" in m]
    assert len(rewards) == 4 and len(set(rewards)) == 1
    moving = make(
        "moving", "grpo", "train.learning_rate=3e-2", "eval.every=1", "eval.temperature=1"
    )
    launch(moving, eval_data=EVAL)
    assert len({m["eval/reward"] for m in lines(moving) if "eval/reward" in m}) > 1


# supervised


def test_sft_learns_its_rows_and_micro_batches_do_not_matter(make: Callable[..., Config]) -> None:
    results = []
    for budget in (16, 4096):
        cfg = make(
            f"b{budget}",
            "sft",
            f"train.tokens_per_microbatch={budget}",
            "train.steps=12",
            "train.learning_rate=1e-2",
            "train.prompts_per_step=8",
        )
        launch(cfg, eval_data=EVAL)
        results.append([m["sft/loss"] for m in lines(cfg) if "sft/loss" in m])
    assert results[0] == pytest.approx(results[1], rel=1e-3) and results[0][-1] < results[0][0] - 2


def test_dropping_rows_keeps_ids_and_rows_together(make: Callable[..., Config]) -> None:
    """A row that is too long is dropped, and the others keep their own prompts."""
    data = [{"prompt": "x" * 200, "answer": "1"}, *DATA]
    trainer = build(
        make("run", "grpo", "data.shuffle=false"),
        SilentView(),
        CallerObjects(data=data, rewards=[odd]),
    )
    assert isinstance(trainer, RLTrainer)
    rollout: Any = trainer.source.rollout
    assert [r.prompt for r in trainer.source.rows] == [d["prompt"] for d in DATA]
    assert all(rollout.decode(rollout.encode(r)) == r.prompt for r in trainer.source.rows)


def recorded_steps(cfg: Config, name: str) -> list[int]:
    return sorted({line["step"] for line in lines(cfg, name)})


def test_the_last_step_is_recorded(make: Callable[..., Config]) -> None:
    """Also one that nobody knew to be the last; a run that goes on keeps its samples."""
    cfg = make("run", "grpo", "train.steps=4", "run.log.samples_every=2")
    trainer = ConfigTrainer(cfg, CallerObjects(data=DATA, rewards=[odd]), SilentView())
    for step in trainer:
        if step.number == 2:
            trainer.stop("enough")
    assert recorded_steps(cfg, "samples.jsonl") == [1, 2]
    foreseen, last = lines(cfg, "groups.jsonl")
    assert (foreseen["step"], last["step"]) == (1, 2) and last["policy_trained"]
    assert last["minibatches"] and last["loss"] is not None
    # rewards and advantages that fit each other; what the loss said of single samples was not asked
    assert not any(wrong_advantages(last, group) for group in last["groups"])
    for record, told in ((foreseen, True), (last, False)):
        trained = [s for g in record["groups"] for s in g["samples"] if not s["no_signal"]]
        assert trained and all(("loss" in s) is told and "advantage" in s for s in trained)
    launch(cfg)
    assert recorded_steps(cfg, "samples.jsonl") == [1, 2, 3, 4]
    assert recorded_steps(cfg, "groups.jsonl") == [1, 2, 3, 4]
    never = make("never", "grpo", "train.steps=2", "run.log.samples_every=0")
    launch(never)
    assert not recorded_steps(never, "samples.jsonl")


def test_a_run_ends_when_its_time_is_used_up(make: Callable[..., Config]) -> None:
    """A nanosecond is used up after one step; the last boundary is evaluated and saved, and a
    longer time continues the run.
    """
    cfg = make("timed", "grpo", "train.steps=3", "run.max_seconds=1e-9", "run.checkpoint.every=0")
    result = launch(cfg, eval_data=EVAL)
    assert (
        result.steps == 1
        and "max_seconds" in (result.stopped or "")
        and len(store.steps(Path(cfg.run.dir))) == 1
    )
    assert [line["step"] for line in lines(cfg) if "eval/reward" in line] == [0, 1]
    assert launch(cfg, eval_data=EVAL).steps == 1  # its time is still used up
    more = make("timed", "grpo", "train.steps=3", "run.max_seconds=1000", "run.checkpoint.every=0")
    result = launch(more, eval_data=EVAL)
    assert (result.steps, result.stopped) == (3, None)
