"""How a step would have been with other settings: the same state, the same answers, other rewards,
another algorithm, another learning rate.

The run is done again up to the step. Then the step is done twice from that state: as it was, with
its rollouts kept, and with the changed settings on those rollouts (rollout/kept.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.execute import OpenRun
from reinforge.build.replay import (
    ReplayPlan,
    as_replayed,
    go,
    go_on,
    prepare,
    scratch_directory,
    threads_of,
    with_kept_rollouts,
)
from reinforge.checkpoint import store
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.backend import Backend
from reinforge.core.batch import pack
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.core.token_text import token_text
from reinforge.loops.config_changes import Changes, check_branch
from reinforge.loops.open_step import RunStep
from reinforge.models.load import load_tokenizer
from reinforge.watch.past import difference, read_anchors

CONTEXT = 12  # tokens before one that moved


@dataclass
class StepProbe:
    """What one side of a counterfactual did in the step: filled while the step is open and once it
    is done.
    """

    number: int
    samples: list[Sample] = field(default_factory=list)
    prompts: dict[str, Any] = field(default_factory=dict)  # of the row, by sample
    texts: dict[str, str] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)  # log-probs of trained tokens
    after: dict[str, Tensor] = field(default_factory=dict)
    advantages: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    update: dict[str, Tensor] = field(default_factory=dict)  # by parameter: weights after - before

    def __call__(self, opened: OpenRun, step: RunStep) -> None:
        if step.number != self.number:
            return
        backend = opened.run.checkpointer.backend
        if not step.done:
            self.samples = step.samples
            for group in step.groups:
                for i, sample in enumerate(group.samples):
                    self.prompts[sample.uid] = group.row.prompt
                    self.texts[sample.uid] = group.texts[i] if i < len(group.texts) else ""
            self.before = current_logprobs(backend, self.samples)
            self.update = _weights(backend)
            return
        self.after = current_logprobs(backend, self.samples)
        now = _weights(backend)
        self.update = {name: now[name] - old for name, old in self.update.items()}
        self.metrics = dict(step.metrics)
        try:
            shaped = step.advantages
        except InputError:  # an algorithm without advantages
            return
        for group, values in zip(step.groups, shaped, strict=True):
            for sample, value in zip(group.samples, values, strict=True):
                self.advantages[sample.uid] = value


def _weights(backend: Backend) -> dict[str, Tensor]:
    module = backend.weights().module
    if module is None or backend.devices > 1:
        raise InputError(
            "the weights are in other processes, where updates cannot be compared.",
            where="--change",
            fix="Use train.backend: local for a run that is to be looked at like this.",
        )
    found = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return {name: p.detach().float().cpu().clone() for name, p in found}


def current_logprobs(backend: Backend, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Of the trained tokens of every sample, with the weights of now."""
    found: dict[str, Tensor] = {}
    batches = pack(list(samples), backend.budget, share=backend.share)
    backend.annotate(batches, frozenset({"old"}))
    for batch in batches:
        ends = [0, *batch.trained_lengths().cumsum(0).tolist()]
        for i, sample in enumerate(batch.samples):
            found[sample.uid] = batch.streams["old"][ends[i] : ends[i + 1]]
    return found


@dataclass(frozen=True)
class TokenMove:
    """A token whose log-prob the two updates moved differently. Part of a counterfactual."""

    sample: str
    position: int  # among the trained tokens of its sample
    token: str
    context: str  # what stands before it
    before: float  # log-prob before the step
    original: float  # ... after it, as it was
    changed: float  # ... after it, with the changed settings


@dataclass(frozen=True)
class SampleChange:
    """What became of one sample on both sides. Part of a counterfactual."""

    sample: str
    text: str
    rewards: tuple[float | None, float | None]
    advantages: tuple[float | None, float | None]  # means over its tokens


@dataclass(frozen=True)
class Counterfactual:
    """A step as it was, and as it would have been. `counterfactual` makes it."""

    step: int
    changes: Changes
    equal: bool | None  # whether the original came out as the run recorded it
    metrics: tuple[dict[str, float], dict[str, float]]
    norms: tuple[float, float]  # of the updates
    cosine: float | None  # between them; None: one of them is 0
    samples: list[SampleChange]  # the largest changes of an advantage first
    tokens: list[TokenMove]  # those that moved most first


def counterfactual(
    plan: ReplayPlan,
    overrides: Sequence[str],
    given: CallerObjects | None = None,
    progress: Callable[[int], None] = lambda step: None,
    shown: int = 10,
) -> Counterfactual:
    """The last step of the plan, with and without `overrides` (key=value)."""
    original = plan.stretches[-1].config
    raw = original.model_dump(mode="json")
    changed = config_from_dict(raw, where="--change", overrides=overrides)
    changes = check_branch(original, changed)
    _check(original, changed)
    with scratch_directory() as root, threads_of(plan):
        past, checkpoint = _past(plan, root / "past", given, progress)
        sides = []
        for config, name in ((original, "original"), (changed, "changed")):
            folder = root / name
            prepare(past, checkpoint, folder)
            own = as_replayed(config, folder, plan.begins)
            probe = StepProbe(plan.step)
            kept = None if name == "original" else str(root / "original")
            go_on(_with_rollouts(own, kept), plan.step, plan.begins, given, seen=probe)
            sides.append(probe)
        recorded = plan.anchors.get(plan.step)
        now = read_anchors(root / "original")[plan.step]
        equal = None if recorded is None else difference(recorded, now) is None
    progress(plan.step)
    return _compared(plan, changes, equal, sides[0], sides[1], shown)


def _check(original: Config, changed: Config) -> None:
    if not original.algorithm.rl:
        raise InputError(
            "this run has no rollouts: it learns from given rows.",
            where="--change",
            fix="`runs branch` goes on from the step with other settings.",
        )
    if changed == original:
        raise InputError("nothing is changed.", where="--change", fix="Give KEY=VALUE.")


def _past(
    plan: ReplayPlan, folder: Path, given: CallerObjects | None, progress: Callable[[int], None]
) -> tuple[Path, Path | None]:
    """A run directory and its checkpoint before the step; None: the step is the first."""
    before = plan.step - 1
    if before == plan.begin:
        return plan.run_dir, plan.checkpoint
    stretches = [s for s in plan.stretches if s.until <= before]
    if not stretches or stretches[-1].until < before:
        rest = next(s for s in plan.stretches if s.until > before)
        stretches.append(replace(rest, until=before))
    shorter = replace(plan, step=before, stretches=stretches)
    go(shorter, folder, given, save_at={before}, step=progress)
    return folder, store.steps(folder)[0]


def _with_rollouts(config: Config, kept: str | None) -> Config:
    """Keeps its rollouts, or takes those that were kept."""
    if kept is None:
        return with_kept_rollouts(config)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"kept": kept})})


def _compared(
    plan: ReplayPlan,
    changes: Changes,
    equal: bool | None,
    original: StepProbe,
    changed: StepProbe,
    shown: int,
) -> Counterfactual:
    ours, theirs = (_flat(side.update) for side in (original, changed))
    norms = (float(ours.norm()), float(theirs.norm()))
    cosine = float(ours @ theirs) / (norms[0] * norms[1]) if all(norms) else None
    return Counterfactual(
        step=plan.step,
        changes=changes,
        equal=equal,
        metrics=(original.metrics, changed.metrics),
        norms=norms,
        cosine=cosine,
        samples=_samples(original, changed),
        tokens=_tokens(plan, original, changed, shown),
    )


def _flat(update: dict[str, Tensor]) -> Tensor:
    parts = [update[name].double().reshape(-1) for name in sorted(update)]
    return torch.cat(parts) if parts else torch.zeros(0)


def _samples(original: StepProbe, changed: StepProbe) -> list[SampleChange]:
    rewards = {sample.uid: sample.reward for sample in changed.samples}

    def mean(side: StepProbe, uid: str) -> float | None:
        values = side.advantages.get(uid)
        return float(values.mean()) if values is not None and len(values) else None

    found = [
        SampleChange(
            sample.uid,
            original.texts.get(sample.uid, ""),
            (sample.reward, rewards.get(sample.uid)),
            (mean(original, sample.uid), mean(changed, sample.uid)),
        )
        for sample in original.samples
    ]
    return sorted(found, key=lambda s: -abs((s.advantages[1] or 0) - (s.advantages[0] or 0)))


def _tokens(
    plan: ReplayPlan, original: StepProbe, changed: StepProbe, shown: int
) -> list[TokenMove]:
    moved = [
        (abs(float(theirs[i] - ours[i])), sample, i)
        for sample in original.samples
        for ours, theirs in [(original.after[sample.uid], changed.after.get(sample.uid))]
        if theirs is not None and len(theirs) == len(ours)
        for i in range(len(ours))
    ]
    moved.sort(key=lambda item: -item[0])
    tokenizer = load_tokenizer(plan.stretches[-1].config.model)
    found = []
    for distance, sample, i in moved[:shown]:
        if not distance:
            break
        at = int(sample.trained.nonzero()[i])
        found.append(
            TokenMove(
                sample.uid,
                i,
                token_text(tokenizer, sample.tokens[at : at + 1].tolist()),
                token_text(tokenizer, sample.tokens[max(0, at - CONTEXT) : at].tolist()),
                float(original.before[sample.uid][i]),
                float(original.after[sample.uid][i]),
                float(changed.after[sample.uid][i]),
            )
        )
    return found
