"""One step of a run while it is open: what callbacks and `for step in trainer` look at and change.

Rollouts and rewards are there; what the update needs of them (batches, advantages) is computed when
somebody looks, and by the loop at the latest.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.html import escape, sample_table
from reinforge.core.metrics import Metrics
from reinforge.core.sample import Group, Sample
from reinforge.rollout.source import RolloutBatch

# one number for all trained tokens of an answer, or one for each
TokenValues = float | Sequence[float] | Tensor
SHOWN_GROUPS = 4  # in a notebook
ADVANTAGES = "advantages"
REWARDS = "rewards"


@dataclass(frozen=True)
class PreparedStep:
    """What an update is computed from. A loop makes it of a step."""

    minibatches: list[list[Batch]]  # packs, by optimizer step
    measured: Metrics = field(default_factory=dict)  # on the way


class RunStep:
    """One step of a run: its groups and rewards, then its batches and advantages, then its metrics.
    The loops make it; callbacks and `for step in trainer` get it.

    Until it is `done` rewards and advantages can be changed, or the step skipped. Where a run
    learns from given rows there are `samples` and no groups.
    """

    number: int  # from 1
    total: int  # steps of the run
    skipped: bool  # whether it is counted and not trained
    done: bool  # whether it is trained and logged

    def __init__(
        self,
        number: int,
        total: int,
        *,
        prepare: Callable[[RunStep], PreparedStep],
        announce: Callable[[RunStep], None],
        rollouts: RolloutBatch | None = None,
        rows: Sequence[Sample] = (),
        measure: Callable[[], Metrics] = dict,
    ):
        """`prepare` packs and annotates; `announce` is told when advantages are there; `measure`
        gives the metrics that are known before the update.
        """
        self.number = number
        self.total = total
        self.skipped = False
        self.done = False
        self.rollouts = rollouts
        self.changed: set[str] = set()  # of rewards and advantages: what the caller has set
        self._rows = list(rows)
        self._prepare = prepare
        self._announce = announce
        self._measure = measure
        self._prepared: PreparedStep | None = None
        self._announcing = False
        self._metrics: Metrics | None = None
        self._finish: Callable[[], None] | None = None

    def __repr__(self) -> str:
        parts = [f"step {self.number} of {self.total}"]
        if self.rollouts is not None:
            parts.append(f"{len(self.groups)} groups")
        parts.append(f"{len(self.samples)} samples")
        scored = [s.reward for s in self.samples if s.reward is not None]
        if scored:
            parts.append(f"mean reward {sum(scored) / len(scored):.4g}")
        return f"<{', '.join(parts)}{', done' if self.done else ''}>"

    def _repr_html_(self) -> str:
        """What a notebook shows of it: its first groups."""
        shown = [line for group in self.groups[:SHOWN_GROUPS] for line in group.lines()]
        return f"<div>{escape(repr(self)[1:-1])}</div>" + (sample_table(shown) if shown else "")

    # ---- what there is ----

    @property
    def groups(self) -> list[Group]:
        """The answers to each prompt, fresh ones and then those that are trained again."""
        return [] if self.rollouts is None else self.rollouts.trained

    @property
    def samples(self) -> list[Sample]:
        """All rows of the step, group after group."""
        if self.rollouts is None:
            return list(self._rows)
        return [sample for group in self.groups for sample in group.samples]

    @property
    def rewards(self) -> list[list[float | None]]:
        """The total reward of every answer, by group; None: it could not be scored."""
        return [[sample.reward for sample in group.samples] for group in self.groups]

    @property
    def prepared(self) -> PreparedStep:
        """Packs and annotates, unless that is done."""
        if self._prepared is None:
            self._prepared = made = self._prepare(self)
            if any(ADVANTAGES in b.streams for batches in made.minibatches for b in batches):
                self._tell_advantages()
            return made
        return self._prepared

    def _tell_advantages(self) -> None:
        self._announcing = True
        try:
            self._announce(self)
        finally:
            self._announcing = False

    @property
    def batches(self) -> list[Batch]:
        """The packs that are trained."""
        return [batch for minibatch in self.prepared.minibatches for batch in minibatch]

    @property
    def advantages(self) -> list[list[Tensor]]:
        """One number per trained token, by group and answer; nothing for an answer that is not
        trained.
        """
        places = self._places()
        empty = torch.zeros(0)
        return [
            [
                places[sample.uid].clone() if sample.uid in places else empty
                for sample in group.samples
            ]
            for group in self.groups
        ]

    @property
    def metrics(self) -> Metrics:
        """Of the rollouts until the step is done, then everything that was logged of it."""
        return self._measure() if self._metrics is None else self._metrics

    # ---- what may be changed ----

    def set_rewards(self, rewards: Sequence[Sequence[float | None]]) -> None:
        """Other rewards, in the shape of `rewards`: advantages are computed from them."""
        self._check_open("set_rewards")
        if self._announcing:
            raise InputError(
                "rewards cannot change any more when advantages are there.",
                where="on_advantages",
                fix="Change rewards in on_rewards, or set_advantages here.",
            )
        rollouts = self.rollouts
        if rollouts is None:
            raise InputError(
                "a run on given rows has no rewards.",
                where="step.set_rewards",
                fix="Train with an algorithm that generates, e.g. grpo.",
            )
        self._check_shape(rewards, "set_rewards")
        changed = [
            replace(
                group,
                samples=[
                    sample.with_(reward=_reward(value))
                    for sample, value in zip(group.samples, values, strict=True)
                ],
            )
            for group, values in zip(self.groups, rewards, strict=True)
        ]
        fresh = len(rollouts.groups)
        rollouts.groups = changed[:fresh]
        rollouts.replayed = changed[fresh:]
        self.changed.add(REWARDS)
        self._prepared = None

    def set_advantages(self, advantages: Sequence[Sequence[TokenValues]]) -> None:
        """Other advantages, in the shape of `advantages`: one number for all tokens of an answer,
        or one for each of its trained tokens.
        """
        self._check_open("set_advantages")
        places = self._places()
        self._check_shape(advantages, "set_advantages")
        for group, values in zip(self.groups, advantages, strict=True):
            for sample, value in zip(group.samples, values, strict=True):
                place = places.get(sample.uid)
                if place is None:
                    continue
                given = _numbers(value, place)
                if given.ndim and given.shape != place.shape or not bool(given.isfinite().all()):
                    raise InputError(
                        f"an answer of {len(place)} trained tokens cannot have the advantages"
                        f" {reprlib.repr(value)}.",
                        where="step.set_advantages",
                        fix="Give one finite number, or one for each trained token.",
                    )
                place.copy_(given.expand_as(place))
        self.changed.add(ADVANTAGES)

    def skip(self) -> None:
        """The step counts, and changes no weights."""
        self._check_open("skip")
        self.skipped = True

    def update(self) -> Metrics:
        """Trains the step now and does what is due after it, as the next turn of `for step in
        trainer` would; returns its metrics.
        """
        if not self.done:
            if self._finish is None:
                raise InputError(
                    "the loop trains this step itself.",
                    where="step.update",
                    fix="In a callback, leave it out: on_step is called when it is done.",
                )
            self._finish()
        return self.metrics

    # ---- for the loops and the trainer ----

    def close(self, metrics: Metrics) -> None:
        """The step is trained and logged."""
        self._metrics = metrics
        self.done = True

    def on_update(self, finish: Callable[[], None]) -> None:
        """What `update` does: whoever hands the step to plain code says it."""
        self._finish = finish

    def _check_open(self, what: str) -> None:
        if self.done:
            raise InputError(
                f"step {self.number} is trained already.",
                where=f"step.{what}",
                fix="Change a step before its update.",
            )

    def _check_shape(self, values: Sequence[Sequence[object]], what: str) -> None:
        wanted = [len(group.samples) for group in self.groups]
        try:
            found = f"{[len(part) for part in values]} values"
        except TypeError:  # it is no list of lists
            found = f"{reprlib.repr(values)} was given"
        if found != f"{wanted} values":
            raise InputError(
                f"there are {wanted} answers by group, and {found}.",
                where=f"step.{what}",
                fix="Give one list for each group, with one number for each of its answers.",
            )

    def _places(self) -> dict[str, Tensor]:
        """By sample, where its advantages are in the batches."""
        found: dict[str, Tensor] = {}
        for batch in self.batches:
            stream = batch.streams.get(ADVANTAGES)
            if stream is None:
                raise InputError(
                    "this algorithm has no advantages.",
                    where="step.advantages",
                    fix="Look at step.batches, or train with a policy gradient.",
                )
            ends = [0, *batch.trained_lengths().cumsum(0).tolist()]
            for i, sample in enumerate(batch.samples):
                found.setdefault(sample.uid, stream[ends[i] : ends[i + 1]])
        return found


def _numbers(value: TokenValues, place: Tensor) -> Tensor:
    """As a tensor, like `place`; what is no number is not finite."""
    try:
        return torch.as_tensor(value, dtype=place.dtype, device=place.device)
    except (TypeError, ValueError, RuntimeError):
        return place.new_tensor(math.nan)


def _reward(value: float | None) -> float | None:
    """A finite number, or None."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(
            f"{reprlib.repr(value)} is no reward.",
            where="step.set_rewards",
            fix="Give finite numbers, or None for an answer that is not to be trained.",
        )
    return number
