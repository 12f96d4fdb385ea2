"""`for step in reinforge.Trainer(...)`: the loop of `reinforge train`, in a program's hands."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reinforge
from helpers.tiny_runs import DATA, EVAL, digest, launch, lines, tensors
from helpers.toy_rewards import odd
from reinforge.build.execute import OpenRun
from reinforge.build.run import ConfigTrainer
from reinforge.checkpoint import store
from reinforge.cli.train import train as train_command
from reinforge.config.schema import Config
from reinforge.core.errors import InputError

Make = Callable[..., Config]


def trainer_of(cfg: Config, **more: Any) -> reinforge.Trainer:
    return reinforge.Trainer(cfg, data=DATA, rewards=[odd], **more)


def weights(cfg: Config) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors(cfg).items() if name.startswith("model/")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# the same run


def yaml_of(cfg: Config, folder: Path, rows: list[dict[str, Any]]) -> Path:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "run.yaml"
    raw = cfg.model_dump(mode="json", exclude_unset=True)
    file.write_text(json.dumps({**raw, "data": {"source": str(data)}}))
    return file


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [("grpo", ()), ("grpo", ("algorithm.epochs=2", "rollout.staleness=1")), ("sft", ())],
    ids=str,
)
def test_stepping_and_the_command_give_the_same_digest(
    make: Make, tmp_path: Path, algorithm: str, overrides: tuple[str, ...]
) -> None:
    rows = [{**row, "completion": row["answer"]} for row in DATA]
    file = yaml_of(make("command", algorithm, *overrides), tmp_path, rows)
    train_command(str(file), [])
    stepped = f"run.dir={tmp_path / 'stepped'}"
    with reinforge.Trainer(file, overrides=[stepped]) as trainer:
        seen = [(step.number, step.total, step.done) for step in trainer]
    assert seen == [(1, 3, False), (2, 3, False), (3, 3, False)]
    assert store.digest_run(tmp_path / "stepped") == store.digest_run(tmp_path / "command")
    assert trainer.result.steps == 3 and trainer.result.report is not None


def test_what_a_step_has_in_hand(make: Make) -> None:
    """Rewards of four answers to four prompts, and GRPO's advantages of them by hand."""
    cfg = make("run", "grpo")
    with trainer_of(cfg) as trainer:
        for step in trainer:
            assert len(step.groups) == 4 and [len(r) for r in step.rewards] == [4] * 4
            assert len(step.samples) == 16 == sum(len(b.samples) for b in step.batches)
            known = step.metrics
            scored = [r for group in step.rewards for r in group if r is not None]
            assert known["reward/mean"] == pytest.approx(sum(scored) / 16)
            assert "train/loss" not in known
            for group, rewards, advantages in zip(
                step.groups, step.rewards, step.advantages, strict=True
            ):
                values = torch.tensor(rewards)
                expected = (values - values.mean()) / (values.std() + 1e-4)
                for sample, want, found in zip(group.samples, expected, advantages, strict=True):
                    assert found.shape == (sample.n_trained,)
                    assert found.tolist() == pytest.approx([float(want)] * len(found), abs=1e-5)
            after = step.update()
            assert step.done and after is step.metrics and after["train/loss"] is not None
            assert trainer.step == step.number and lines(cfg)[-1]["step"] == step.number
    assert digest(cfg) == digest(_whole(make))


def _whole(make: Make, *overrides: str) -> Config:
    whole = make("whole", "grpo", *overrides)
    launch(whole)
    return whole


# what may be changed


def test_a_reward_that_changes_half_way(make: Make) -> None:
    """From the third step on the first answer of every group is the good one: its advantage is
    (1 - 1/4) / (1/2 + 1e-4) = 1.4997, that of the others a third of it below 0.
    """
    cfg = make("run", "grpo", "train.steps=4")
    means = []
    with trainer_of(cfg) as trainer:
        for step in trainer:
            if step.number > 2:
                if step.number == 4:
                    assert len(step.advantages) == 4  # they are there, and are computed again
                step.set_rewards([[1.0, 0.0, 0.0, None]] * 3 + [[1.0, 0.0, 0.0, 0.0]])
                first = [float(a[0]) for a in step.advantages[3]]
                assert first == pytest.approx([1.4997, -0.4999, -0.4999, -0.4999], abs=1e-4)
                third = [float(a[0]) for a in step.advantages[0][:3]]
                # of three scored ones: (1 - 1/3) / (0.57735 + 1e-4)
                assert third == pytest.approx([1.15450, -0.57725, -0.57725], abs=1e-4)
                assert len(step.advantages[0][3]) == 0  # unscored: not trained
            means.append(step.update()["reward/mean"])
    assert means[2:] == pytest.approx([4 / 13, 4 / 13])
    plain = _whole(make, "train.steps=4")
    assert [m["reward/mean"] for m in lines(plain)][:2] == means[:2]
    assert not same(weights(cfg), weights(plain))


def test_advantages_that_are_set(make: Make) -> None:
    """All 0: no gradient. Twice as large as they were: twice the gradient."""
    norms = {}
    for name, factor in (("one", 1.0), ("two", 2.0), ("none", 0.0)):
        cfg = make(name, "grpo", "train.steps=1", "train.max_grad_norm=0")
        with trainer_of(cfg) as trainer:
            for step in trainer:
                step.set_advantages([[a * factor for a in group] for group in step.advantages])
                norms[name] = step.update()["train/grad_norm"]
    assert norms["two"] == pytest.approx(2 * norms["one"], rel=1e-4) and norms["none"] == 0


def test_a_step_that_is_skipped_counts_and_trains_nothing(make: Make) -> None:
    cfg = make("run", "grpo", "train.steps=3", "run.checkpoint.every=1", "run.checkpoint.keep=9")
    with trainer_of(cfg) as trainer:
        for step in trainer:
            if step.number == 2:
                step.skip()
                assert step.update()["tokens/trained"] == 0 and step.metrics["train/empty"] == 1
    first, second, third = (
        store.load(path)[0].tensors for path in reversed(store.steps(Path(cfg.run.dir)))
    )
    name = next(n for n in first if n.startswith("model/") and first[n].ndim > 1)
    assert torch.equal(first[name], second[name]) and not torch.equal(second[name], third[name])
    events = [e["kind"] for e in lines(cfg, "events.jsonl")]
    assert events.count("step_skipped_by_caller") == 1 and len(lines(cfg)) == 3


def test_rows_that_are_given_can_be_skipped_too(make: Make) -> None:
    cfg = make("run", "sft", "train.steps=2")
    rows = [{"prompt": d["prompt"], "completion": d["answer"]} for d in DATA]
    with reinforge.Trainer(cfg, data=rows) as trainer:
        for step in trainer:
            assert step.groups == [] and len(step.samples) == 4 and len(step.batches) == 1
            with pytest.raises(InputError, match=r"step\.set_rewards: .*no rewards"):
                step.set_rewards([])
            with pytest.raises(InputError, match="has no advantages"):
                step.set_advantages([])
            step.skip()
    assert [m["tokens/trained"] for m in lines(cfg)] == [0, 0]


def test_what_cannot_be_set_is_told(make: Make) -> None:
    with trainer_of(make("run", "grpo", "train.steps=1")) as trainer:
        for step in trainer:
            with pytest.raises(InputError, match=r"\[4, 4, 4, 4\] answers by group, and \[4\]"):
                step.set_rewards([[1.0] * 4])
            with pytest.raises(InputError, match="nan is no reward"):
                step.set_rewards([[float("nan")] * 4] * 4)
            for given in ([1, 2, 3], 1.0, None):
                flat = rf"\[4, 4, 4, 4\] answers by group, and {re.escape(repr(given))} was given"
                with pytest.raises(InputError, match=rf"{flat}.*one number for each of its ans"):
                    step.set_rewards(given)  # type: ignore[arg-type]
            with pytest.raises(InputError, match=r"step\.set_advantages: .*\[1\.0, .*was given"):
                step.set_advantages([1.0] * 16)  # type: ignore[list-item]
            for wrong_reward in ("a", [1.0], 1j):
                with pytest.raises(InputError, match="is no reward. Give finite numbers"):
                    step.set_rewards([[wrong_reward] * 4] * 4)  # type: ignore[list-item]
            for wrong_advantage in ("a", None, [[1.0], 2.0]):
                with pytest.raises(InputError, match="cannot have the advantages .*finite number"):
                    step.set_advantages([[wrong_advantage] * 4] * 4)  # type: ignore[list-item]
            wrong = step.samples[0].n_trained + 1
            with pytest.raises(InputError, match="one for each trained token"):
                step.set_advantages([[[0.5] * wrong] * 4] * 4)
        with pytest.raises(InputError, match="step 1 is trained already"):
            step.skip()
        assert step.update() is step.metrics


# stop, save, evaluate, close


def test_a_run_that_was_stopped_goes_on(make: Make) -> None:
    cut = make("cut", "grpo", "train.steps=4")
    with trainer_of(cut) as trainer:
        for step in trainer:
            if step.number == 2:
                trainer.stop("enough")
    assert trainer.result.stopped == "stopped by the caller: enough" and trainer.result.steps == 2
    summary = json.loads((Path(cut.run.dir) / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    with trainer_of(cut) as trainer:
        assert [step.number for step in trainer] == [3, 4]
    assert digest(cut) == digest(_whole(make, "train.steps=4"))


def test_a_loop_that_is_left_is_taken_up_again_and_closed(make: Make) -> None:
    """The step in hand is trained, and a checkpoint is there."""
    cut = make("cut", "grpo", "train.steps=4")
    trainer = trainer_of(cut)
    assert "not begun" in repr(trainer)
    trainer.close()  # nothing has begun
    assert next(iter(trainer)).number == 1
    assert next(iter(trainer)).number == 2
    trainer.close()
    assert "step 2 of 4, ended" in repr(trainer)
    assert store.step_of(store.steps(Path(cut.run.dir))[0]) == 2
    with pytest.raises(InputError, match=r"trainer\.save: the run in .* has ended"):
        trainer.save()
    launch(cut)
    assert digest(cut) == digest(_whole(make, "train.steps=4"))


def test_saving_and_evaluating_between_steps(make: Make) -> None:
    """They finish the step in hand; the run comes out as if nobody had asked."""
    cfg = make("run", "grpo", "train.steps=3")
    with trainer_of(cfg, eval_data=EVAL) as trainer:
        for step in trainer:
            if step.number == 2:
                found = trainer.evaluate()
                assert step.done and found["eval/n"] == 4
                path = trainer.save()
                assert store.step_of(path) == 2 == trainer.step and trainer.save() == path
    assert [m["step"] for m in lines(cfg) if "eval/reward" in m] == [0, 2, 3]
    assert same(weights(cfg), weights(_whole(make)))
    with (
        trainer_of(make("none", "grpo")) as trainer,
        pytest.raises(InputError, match="nothing to evaluate"),
    ):
        trainer.evaluate()


def test_an_error_of_the_program_ends_the_run(make: Make) -> None:
    """Nothing more is trained, the report tells why, and the run goes on from its checkpoint."""
    cut = make("cut", "grpo", "train.steps=3", "run.checkpoint.every=1")
    with pytest.raises(KeyError, match="mine"), trainer_of(cut) as trainer:
        for step in trainer:
            if step.number == 3:
                raise KeyError("mine")
    summary = json.loads((Path(cut.run.dir) / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2) and "mine" in summary["error"]
    launch(cut)
    assert digest(cut) == digest(_whole(make, "run.checkpoint.every=1"))


def test_a_program_that_ends_with_a_trainer_open(make: Make) -> None:
    cfg = make("run", "grpo")
    trainer = trainer_of(cfg)
    step = next(iter(trainer))
    trainer._abandon()  # what `atexit` calls
    summary = json.loads((Path(cfg.run.dir) / "summary.json").read_text())
    assert summary["status"] == "stopped" and "the program ended" in summary["error"]
    assert "Nothing was saved yet" in summary["error"]
    assert list(trainer) == []
    with pytest.raises(InputError, match="has ended before step 1 was trained"):
        step.update()


def test_a_program_that_ends_after_a_checkpoint(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given tells how to go on: a directory that was made up must be given."""
    cfg = make("run", "grpo")
    monkeypatch.chdir(tmp_path)
    made_up = reinforge.Trainer(
        model=cfg.model.path,
        data=DATA,
        rewards=[odd],
        steps=3,
        prompts_per_step=2,
        group_size=2,
        max_new_tokens=2,
        overrides=None,
    )
    folder = made_up.config.run.dir
    for trainer, told in (
        (trainer_of(cfg), "is intact: the same call continues from it."),
        (made_up, f"is intact: give dir='{folder}' to continue from it."),
    ):
        next(iter(trainer))
        trainer.save()
        trainer._abandon()
        summary = json.loads((Path(trainer.config.run.dir) / "summary.json").read_text())
        assert summary["error"].endswith(told)


def test_stepping_inside_a_running_event_loop(make: Make) -> None:
    """As in a notebook: the run has a thread of its own, which ends with it."""
    cfg = make("run", "grpo")

    async def notebook() -> list[int]:
        with trainer_of(cfg) as trainer:
            seen = []
            for step in trainer:
                step.update()
                await asyncio.sleep(0)
                seen.append(step.number)
        return seen

    assert asyncio.run(asyncio.wait_for(notebook(), 120)) == [1, 2, 3]
    assert digest(cfg) == digest(_whole(make))


def test_other_rows_do_not_continue_a_run(make: Make) -> None:
    cfg = make("run", "grpo", "train.steps=4")
    with trainer_of(cfg) as trainer:
        next(iter(trainer))
    other = [*DATA[:-1], {"prompt": "other"}]
    with pytest.raises(InputError, match="data"):
        reinforge.train(cfg, data=other, rewards=[odd])


class FakeStep:
    """A step as a trainer sees it."""

    def __init__(self, number: int):
        self.number = number
        self.done = False
        self.update: Callable[[], None] = lambda: None

    def on_update(self, finish: Callable[[], None]) -> None:
        self.update = finish


def test_a_step_that_was_cut_comes_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Ray, where an actor was lost while step 2 was trained: the run opens once more and goes
    on from a checkpoint after step 1.
    """
    first, cut, again = FakeStep(1), FakeStep(2), FakeStep(2)

    def execute(*args: Any) -> Any:
        opened = OpenRun(None, None)  # type: ignore[arg-type]
        yield opened
        yield first
        first.done = True
        yield first
        yield cut
        yield opened
        yield again
        again.done = True
        yield again

    monkeypatch.setattr("reinforge.build.execute.execute", execute)
    trainer = ConfigTrainer(make("run", "algorithm.name=grpo"))
    steps = iter(trainer)
    assert next(steps) is first
    assert next(steps) is cut and first.done
    with pytest.raises(InputError, match="step 2 was cut"):
        cut.update()
    assert next(steps) is again and not again.done
    assert next(steps, None) is None and again.done


def test_a_pipeline_is_no_run(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text("stages: []\n")
    with pytest.raises(InputError, match="this is a pipeline"):
        reinforge.Trainer(file)


def test_a_trainer_of_a_config(make: Make) -> None:
    """What the command line makes is the trainer that Python has."""
    assert issubclass(reinforge.Trainer, ConfigTrainer)
