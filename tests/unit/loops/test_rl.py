"""THE loop on a tiny model: what must hold at step 0, what a step must leave alone, and what must
not matter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_runs import DATA, LORA, digest, launch, lines, tensors
from helpers.toy_rewards import odd
from helpers.toys import SilentView
from reinforge.backends.local import LocalBackend
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.checkpoint import store
from reinforge.config.schema import Config
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Batch, Totals
from reinforge.core.errors import StoppedByPolicy
from reinforge.core.sample import Group
from reinforge.loops.rl import RLTrainer
from reinforge.loops.step import TrainingStep
from reinforge.loops.troubles import UNSCORED, what_is_bad, why_bad

# step 0


@pytest.mark.parametrize(
    ("algorithm", "overrides", "sections"),
    [
        ("grpo", (), {}),
        ("grpo", ("rollout.temperature=0.7", "algorithm.kl.coefficient=0.1"), {}),
        ("grpo", ("algorithm.kl.coefficient=0.1",), LORA),
        ("dr_grpo", ("rollout.temperature=1.3",), {}),
        ("dapo", (), {}),
        ("grpo", ("train.tokens_per_microbatch=20",), {}),
        ("grpo", ("algorithm.epochs=2", "algorithm.minibatches=2", "train.learning_rate=0"), {}),
        ("grpo", ("algorithm.correction.name=tis",), {}),
    ],
    ids=str,
)
def test_before_the_first_step_everything_agrees(
    make: Callable[..., Config], algorithm: str, overrides: tuple[str, ...], sections: dict
) -> None:
    """Ratio 1, nothing clipped, KL 0, no mismatch between the engine and the trainer: one test for
    shifts, masks, temperature and dropout.
    """
    cfg = make("run", algorithm, "train.steps=1", *overrides, **sections)
    launch(cfg)
    first = next(m for m in lines(cfg) if "policy/ratio" in m)
    assert first["policy/ratio"] == pytest.approx(1.0, abs=1e-6) and first[
        "policy/ratio/max"
    ] == pytest.approx(1.0, abs=1e-5)
    assert (
        first["policy/clip_fraction"] == 0
        and first["mismatch/mean"] < 1e-6
        and first["mismatch/max"] < 1e-5
    )
    if "algorithm.kl.coefficient=0.1" in overrides:
        assert 0 <= first["policy/kl"] < 1e-9
    assert first["train/grad_norm"] > 1e-3 and first["train/empty"] == first["train/skipped"] == 0
    assert first["tokens/trained"] == first["tokens/sampled"] - first["tokens/dropped"] > 0


def test_off_policy_ratios_move_after_the_first_update(make: Callable[..., Config]) -> None:
    cfg = make(
        "run",
        "grpo",
        "train.steps=1",
        "algorithm.epochs=3",
        "train.learning_rate=0.01",
        "algorithm.kl.coefficient=0.1",
    )
    launch(cfg)
    first = lines(cfg)[0]
    assert first["policy/ratio/max"] > 1.05 and first["policy/kl"] > 1e-5
    assert store.load(store.latest(Path(cfg.run.dir)))[1]["counters"]["updates"] == 3  # type: ignore[arg-type]


# steps that must change nothing


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
@pytest.mark.parametrize("value", [1.0, None], ids=["equal", "unscored"])
def test_a_step_without_signal_touches_nothing(
    make: Callable[..., Config], algorithm: str, value: float | None
) -> None:
    """All rewards equal, or none at all: weights and Adam as before, the step is counted as empty,
    the run goes on and can be saved.
    """
    cfg = make(
        "run",
        algorithm,
        "train.steps=2",
        "run.checkpoint.every=1",
        "algorithm.overlong_buffer=0",
        "train.optimizer.weight_decay=0.1",
    )
    result = launch(cfg, lambda completions: [value] * len(completions))
    found = tensors(cfg)
    from reinforge.models.load import load_model

    start = dict(load_model(cfg.model).module.named_parameters())
    assert all(torch.equal(found[f"model/{name}"], p) for name, p in start.items())
    assert not any(name.startswith("optimizer/") for name in found)
    steps = lines(cfg)
    assert [m["step"] for m in steps] == [1, 2] and [m["train/empty"] for m in steps] == [1, 1]
    assert (
        len([e for e in lines(cfg, "events.jsonl") if e["kind"] == "empty_step"]) == 2
        and result.steps == 2
    )
    assert (
        steps[0]["reward/unscored"] == float(value is None)
        and steps[0]["groups/zero_variance"] == 1.0
    )
    json.loads(
        (Path(cfg.run.dir) / "summary.json").read_text(),
        parse_constant=lambda text: pytest.fail(f"{text} is not JSON"),
    )


@pytest.mark.parametrize("skip", [True, False])
def test_a_step_without_signal_keeps_its_metrics(make: Callable[..., Config], skip: bool) -> None:
    """A run that stops learning is when one looks at entropy and mismatch."""
    cfg = make(
        "run",
        "grpo",
        "train.steps=2",
        "algorithm.minibatches=2",
        f"train.skip_idle={str(skip).lower()}",
    )
    launch(cfg, lambda completions: [1.0] * len(completions))
    for step in lines(cfg):
        assert step["policy/entropy"] > 0 and step["policy/ratio/max"] == pytest.approx(1.0)
        assert step["policy/loss"] == 0 and "mismatch/mean" in step and step["train/grad_norm"] == 0


def test_unscored_samples_are_not_trained_and_not_zero(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of every group has no score: their tokens are dropped, and the mean is over
    the others.
    """
    seen: list[Group] = []
    original = RLTrainer._pack

    def spy(self: RLTrainer, groups: list[Group]) -> Any:
        seen.extend(groups)
        batches = original(self, groups)
        for batch in (b for m in batches for b in m):
            for sample, trained in zip(
                batch.samples, batch.trained_lengths().tolist(), strict=True
            ):
                assert (trained == 0) == (sample.reward is None)
        return batches

    monkeypatch.setattr(RLTrainer, "_pack", spy)
    cfg = make("run", "grpo", "train.steps=1")
    launch(cfg, lambda completions: [None, 0.5, None, 1.0])
    metrics = lines(cfg)[0]
    assert metrics["reward/mean"] == 0.75 and metrics["reward/unscored"] == 0.5
    dropped = sum(s.n_trained for g in seen for s in g.samples if s.reward is None)
    assert (
        metrics["tokens/dropped"] == dropped > 0
        and metrics["tokens/sampled"] == metrics["tokens/trained"] + dropped
    )


def test_masked_truncation_counts_in_the_group_but_is_not_trained(
    make: Callable[..., Config],
) -> None:
    cfg = make("run", "grpo", "train.steps=1", "algorithm.overlong=mask")
    launch(cfg)
    metrics = lines(cfg)[0]
    assert (
        metrics["response/truncated"] > 0.5
        and metrics["tokens/dropped"] > 0
        and metrics["reward/unscored"] == 0
    )


def bad_loss(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """The gradient of these optimizer steps (from 0) is NaN."""
    from reinforge.backends.local import LocalBackend

    original = LocalBackend.forward_backward

    def spoiled(self: LocalBackend, batches: Any, loss: Any, totals: Any) -> Any:
        out = original(self, batches, loss, totals)
        if self.steps in steps:
            next(iter(self.optimizer.masters.values())).grad.fill_(float("nan"))  # type: ignore[union-attr]
        return out

    monkeypatch.setattr(LocalBackend, "forward_backward", spoiled)


def test_one_bad_step_is_skipped_reported_and_saved(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_loss(monkeypatch, {1})
    cfg = make("run", "grpo", "train.steps=4", "run.checkpoint.every=1", "run.checkpoint.keep=9")
    launch(cfg)
    saved = [store.load(p)[0].tensors for p in reversed(store.steps(Path(cfg.run.dir)))]
    same = lambda a, b: all(torch.equal(a[k], b[k]) for k in a)  # noqa: E731
    assert len(saved) == 4 and same(saved[0], saved[1]) and not same(saved[1], saved[2])
    steps = lines(cfg)
    assert (
        [m["train/skipped"] for m in steps] == [0, 1, 0, 0]
        and steps[1]["train/grad_norm"] is None
        and "train/grad_norm" in steps[1]["nonfinite"]
    )
    assert [e["step"] for e in lines(cfg, "events.jsonl") if e["kind"] == "skipped_step"] == [2]


def test_three_bad_steps_in_a_row_end_the_run(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_loss(monkeypatch, {0, 1, 3, 4, 5})
    cfg = make("run", "grpo", "train.steps=20", "run.checkpoint.every=1")
    with pytest.raises(StoppedByPolicy, match="3 steps in a row"):
        launch(cfg)
    assert len(lines(cfg)) == 6


def test_rewards_that_score_nothing_for_three_steps_end_the_run(
    make: Callable[..., Config],
) -> None:
    """Not silently at the end, with nothing learned.

    Two such steps and a good one are no reason.
    """
    asked = iter([None] * 2 + [1.0] + [None] * 10)
    per_step = {"n": 0, "value": None}

    def flaky(completions: list[str]) -> list[float | None]:
        if per_step["n"] % 4 == 0:  # prompts per step
            per_step["value"] = next(asked)
        per_step["n"] += 1
        return [per_step["value"]] * len(completions)

    cfg = make("run", "grpo", "train.steps=20", "run.checkpoint.every=1")
    assert cfg.train.prompts_per_step == 4
    with pytest.raises(
        StoppedByPolicy, match="3 steps in a row had no sample that could be scored.*check rewards"
    ):
        launch(cfg, flaky)
    assert [m["reward/unscored"] for m in lines(cfg)] == [1, 1, 0, 1, 1, 1]


def test_where_the_reason_is_that_nothing_was_scored() -> None:
    """Events, if a reward failed; and no word of events where there are none, because rewards
    returned None themselves.
    """
    assert what_is_bad(TrainingStep({}, unscored=True)) == UNSCORED
    train = TrainConfig(steps=3)
    silent = why_bad(UNSCORED, TrainingStep({}, unscored=True), train)
    assert "returned None for every completion" in silent and "events.jsonl" not in silent
    failed = why_bad(UNSCORED, TrainingStep({}, unscored=True, faults=True), train)
    assert "events.jsonl (kind fault)" in failed and "returned None" not in failed
    assert not what_is_bad(TrainingStep({"reward/unscored": 0.5}))


def test_a_directory_without_a_checkpoint_begins_again_and_says_so(
    make: Callable[..., Config],
) -> None:
    cfg = make("run", "grpo", "train.steps=2", "run.checkpoint.every=1")
    launch(cfg)
    view = SilentView()
    view.message = (heard := list[str]()).append  # type: ignore[method-assign]
    shutil.rmtree(Path(cfg.run.dir) / "checkpoints")
    train_config(cfg, CallerObjects(data=DATA, rewards=[odd]), view)
    assert any("has no checkpoint: what was begun there begins again" in text for text in heard)
    assert [m["step"] for m in lines(cfg)] == [1, 2]


# the same run, however it is cut


def test_micro_batches_do_not_matter(make: Callable[..., Config]) -> None:
    """Budget 40 against 4096: rollouts, rewards and, up to rounding, weights are those of the same
    run.
    """
    results = []
    for budget in (40, 4096):
        cfg = make(
            f"b{budget}",
            "grpo",
            f"train.tokens_per_microbatch={budget}",
            "train.learning_rate=1e-4",
            "train.steps=4",
            "algorithm.kl.coefficient=0.05",
            "algorithm.entropy=0.01",
            "algorithm.epochs=2",
            "algorithm.minibatches=2",
        )
        launch(cfg)
        results.append(
            ({k: v for k, v in tensors(cfg).items() if k.startswith("model/")}, lines(cfg))
        )
    (a, one), (b, two) = results
    gap = max(float((a[k] - b[k]).abs().max()) for k in a)
    assert gap < 2e-5  # a fifth of one step's rate; sixteen steps were made
    for m, n in zip(one, two, strict=True):
        assert m["reward/mean"] == n["reward/mean"] and m["train/grad_norm"] == pytest.approx(
            n["train/grad_norm"], rel=1e-3
        )
        assert m["policy/loss"] == pytest.approx(n["policy/loss"], abs=1e-5) and m[
            "policy/entropy"
        ] == pytest.approx(n["policy/entropy"], rel=1e-5)


def test_a_tight_engine_does_not_matter(make: Callable[..., Config]) -> None:
    """One sequence at a time or all together: the same tokens, so nearly the same weights."""
    results = []
    for batch in (1, 512):
        cfg = make(f"e{batch}", "grpo", f"rollout.max_batch={batch}", "train.learning_rate=1e-4")
        launch(cfg)
        results.append((tensors(cfg), [m["reward/mean"] for m in lines(cfg)]))
    (a, one), (b, two) = results
    assert (
        one == two
        and max(float((a[k] - b[k]).abs().max()) for k in a if k.startswith("model/")) < 2e-5
    )


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_the_same_seed_gives_the_same_bits(make: Callable[..., Config], algorithm: str) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(digests))  # the global stream has no part in it
        cfg = make(name, algorithm, f"run.seed={seed}")
        launch(cfg)
        digests.append(digest(cfg))
    assert digests[0] == digests[1] != digests[2]


# what is sampled


def test_versions_rows_and_draws_of_each_step(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's tokens are stamped with the optimizer steps before it; rows and samples of a step
    differ from every other's.
    """
    batches: list[list[Group]] = []
    original = RLTrainer._pack
    monkeypatch.setattr(
        RLTrainer,
        "_pack",
        lambda self, groups: (batches.append(groups), original(self, groups))[1],
    )
    cfg = make(
        "run",
        "grpo",
        "train.steps=4",
        "train.learning_rate=0",
        "algorithm.minibatches=2",
        "train.prompts_per_step=8",
    )
    launch(cfg)
    versions = [
        {int(v) for g in groups for s in g.samples for v in s.versions[s.trained]}
        for groups in batches
    ]
    assert versions == [{0}, {2}, {4}, {6}]
    names = [g.samples[0].group for groups in batches for g in groups]
    assert len(set(names)) == 32 and sorted(
        g.row.prompt for g in batches[0] + batches[1]
    ) == sorted(d["prompt"] for d in DATA)
    by_row: dict[Any, list[list[int]]] = {}
    for g in (g for groups in batches for g in groups):
        by_row.setdefault(g.row.prompt, []).extend(s.tokens.tolist() for s in g.samples)
    # unchanged weights, second epoch: other draws
    assert all(len({tuple(t) for t in samples}) == 8 for samples in by_row.values())


def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Batch], Totals]]:
    """What each `forward_backward` was given, in a list that fills while a run goes."""
    seen: list[tuple[list[Batch], Totals]] = []
    original = LocalBackend.forward_backward

    def spy(self: LocalBackend, batches: Any, loss: Any, totals: Totals) -> Any:
        seen.append((list(batches), totals))
        return original(self, batches, loss, totals)

    monkeypatch.setattr(LocalBackend, "forward_backward", spy)
    return seen


def test_every_optimizer_step_divides_by_its_own_totals(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two minibatches are two optimizer steps: each has the counts of its own rows, not those of
    both.
    """
    seen = passes(monkeypatch)
    launch(make("run", "grpo", "train.steps=1", "algorithm.minibatches=2", "train.skip_idle=false"))
    assert len(seen) == 2
    for batches, totals in seen:
        assert totals.tokens == sum(b.n_trained for b in batches) > 0 == totals.left_out
        assert totals.sequences == len(
            {s.episode for b in batches for s in b.samples if s.n_trained}
        )
    first, second = ({s.uid for b in batches for s in b.samples} for batches, _ in seen)
    assert first and second and not first & second


def test_rows_that_are_left_out_still_count(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without gradient are not computed, and the mean is over all rows still: the loss and the
    gradient are the same, not larger by the share that was left out (Adam would hide that).
    """
    seen = passes(monkeypatch)

    def half(prompts: list[str], completions: list[str]) -> list[float]:
        """Every other prompt is solved by everybody."""
        return [1.0] * len(completions) if int(prompts[0].split("+")[0]) % 2 else odd(completions)

    told = []
    for skip in ("true", "false"):
        cfg = make(
            skip,
            "grpo",
            "algorithm.reduce=token_mean",
            "train.steps=2",
            "train.prompts_per_step=8",
            f"train.skip_idle={skip}",
        )
        launch(cfg, half)
        told.append([(m["train/grad_norm"], m["train/loss"]) for m in lines(cfg)])
    assert any(totals.left_out for _, totals in seen[:2]) and not any(
        totals.left_out for _, totals in seen[2:]
    )
    for skipped, computed in zip(*told, strict=True):
        assert skipped == pytest.approx(computed, rel=1e-3, abs=1e-7) and computed[0] > 1e-3
