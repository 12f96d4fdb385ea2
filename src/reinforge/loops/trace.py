"""What a step did with its groups, as numbers that people can follow: rewards, advantages, ratios,
denominators, each sample's part of the loss. `reinforge runs why` shows them.

Nothing is computed again: advantages and log-probs are the streams that the batches were trained
with, the rest is what the loss itself said (core/trace.py) in the first update that saw a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from reinforge.algorithms.algorithm import Algorithm
from reinforge.algorithms.explain import explained, place_of
from reinforge.core.batch import DOMAIN, Batch, Totals
from reinforge.core.metrics import Metrics, StepMetrics
from reinforge.core.sample import Group, Sample
from reinforge.core.signal import why_masked
from reinforge.core.trace import STREAM, TOKENS, take_traced
from reinforge.rewards.combine import combined
from reinforge.rollout.scoring import RewardScorer
from reinforge.rollout.source import RolloutBatch, has_signal
from reinforge.watch.recorder import asked_text, pick

TEXT = 160  # characters of a prompt's end and of an answer's beginning
DIGITS = 7
LOGPROBS = ("behaviour", "old", "reference", "teacher")
SPREAD = ("values", "returns")
CONSTANT = ("wins", "score", DOMAIN)  # streams with one number for a whole answer
HIDDEN = (STREAM, "by_reference")
REWARD = [place_of(combined), place_of(RewardScorer.total)]


@dataclass(frozen=True)
class Tracer:
    """Which groups of a step are recorded. Made with the trainer, asked once per step that is.

    `samples`: rows of samples.jsonl; `groups`: of groups.jsonl; `tokens`: one number per sample, or
    one per token.
    """

    algorithm: Algorithm
    weights: dict[str, float]  # of the components of the reward
    samples: int = 0
    groups: int = 0
    tokens: Literal["summary", "all"] = "summary"

    def begin(
        self,
        rollout_batch: RolloutBatch,
        minibatches: Sequence[Sequence[Batch]],
        changed: Collection[str] = (),
        *,
        asks_loss: bool = True,
    ) -> StepTrace | None:
        """After the advantages of a step are there, before it is trained. `changed`: of rewards
        and advantages, what the caller has set. `asks_loss`: the loss tells numbers of single
        samples, which sorts the tokens of every pass.
        """
        if not self.groups:
            return None
        return StepTrace(self, rollout_batch, minibatches, sorted(changed), asks_loss)


@dataclass(frozen=True, slots=True)
class _RowPosition:
    """Where a sample is in the step's batches: which pack, and which of its trained tokens.
    `StepTrace` looks samples up by it.
    """

    minibatch: int
    batch: Batch
    sample: Sample
    begin: int
    end: int
    partner: Sample | None  # the other side of its pair
    side: str  # chosen, rejected, or nothing


@dataclass
class StepTrace:
    """The record of one step. Made by `Tracer.begin`, which gives the batches their stream; told
    what the loss said by `add_loss_metrics`; read once by `record`.
    """

    tracer: Tracer
    rollout_batch: RolloutBatch
    minibatches: Sequence[Sequence[Batch]]
    changed: list[str] = field(default_factory=list)  # what the caller has set
    asks_loss: bool = True
    slots: int = 0
    totals: list[Totals] = field(default_factory=list)

    def __post_init__(self) -> None:
        # now: coefficients may move after the step
        self._algorithm = explained(self.tracer.algorithm)
        self._computed_by = self._algorithm.pop("computed_by")
        self._first_slot: dict[str, int] = {}
        self._said: dict[int, Metrics] = {}
        if self.asks_loss:
            self._give_slots()

    @cached_property
    def _places(self) -> dict[str, _RowPosition]:
        """By the uid of a sample."""
        unit = self.tracer.algorithm.loss.unit
        found: dict[str, _RowPosition] = {}
        for number, minibatch in enumerate(self.minibatches):
            for batch in minibatch:
                ends = [0, *batch.trained_lengths().cumsum(0).tolist()]
                for i, sample in enumerate(batch.samples):
                    other = batch.samples[i + 1 - 2 * (i % 2)] if unit == 2 else None
                    side = ("chosen", "rejected")[i % 2] if unit == 2 else ""
                    place = _RowPosition(number, batch, sample, ends[i], ends[i + 1], other, side)
                    found.setdefault(sample.uid, place)
        return found

    @cached_property
    def _no_signal(self) -> dict[str, str | None]:
        """Why a sample has no gradient, by its uid."""
        return {
            s.uid: self._why(s, group, kind)
            for kind, group in self._groups()
            for s in group.samples
        }

    def _groups(self) -> list[tuple[str, Group]]:
        rollout_batch = self.rollout_batch
        return [
            *(("trained", group) for group in rollout_batch.groups),
            *(("replayed", group) for group in rollout_batch.replayed),
            *(("dropped", group) for group in rollout_batch.discarded),
            *(("stale", group) for group in rollout_batch.stale),
        ]

    @cached_property
    def _shown(self) -> list[tuple[str, Group]]:
        """Groups that teach come first."""

        def idle(item: tuple[str, Group]) -> bool:
            return all(self._no_signal[s.uid] for s in item[1].samples)

        return sorted(self._groups(), key=idle)[: self.tracer.groups]

    def _give_slots(self) -> None:
        """Every sample that is shown gets a slot, or each of its tokens one."""
        shown = [s for _, group in self._shown for s in group.samples]
        shown += [s for _, s, _ in pick(self.rollout_batch.groups, self.tracer.samples)]
        for batch in (batch for minibatch in self.minibatches for batch in minibatch):
            batch.streams[STREAM] = torch.zeros(batch.n_trained, device=batch.targets.device)
        for uid in dict.fromkeys(s.uid for s in shown):
            place = self._places.get(uid)
            if place is None or place.begin == place.end:
                continue
            wanted = place.end - place.begin if self.tracer.tokens == "all" else 1
            self._first_slot[uid] = self.slots + 1
            numbers = torch.arange(wanted) + self.slots + 1.0
            place.batch.streams[STREAM][place.begin : place.end] = numbers
            self.slots += wanted

    def add_loss_metrics(self, metrics: StepMetrics, totals: Totals) -> None:
        """What the loss said in an optimizer step; it is taken out of the metrics."""
        self._said |= take_traced(metrics)
        self.totals.append(totals)

    # ---- why nothing was learned ----

    def _why(self, sample: Sample, group: Group, kind: str) -> str | None:
        """Why a sample has no gradient, as a word; None where it has one."""
        if kind in ("dropped", "stale"):
            return kind
        algorithm = self.tracer.algorithm
        if masked := why_masked(sample, algorithm.overlong):
            return masked
        place = self._places.get(sample.uid)
        signal = has_signal(group, algorithm.compared)
        if place is None:
            return "not_picked" if signal else "equal"
        if place.begin == place.end:
            return "empty"
        advantages = self._stream(place, "advantages")
        if advantages is None or bool(advantages.any()):
            return None
        return "zero" if signal else "equal"

    @staticmethod
    def _stream(place: _RowPosition, name: str) -> Tensor | None:
        stream = place.batch.streams.get(name)
        return None if stream is None else stream[place.begin : place.end]

    # ---- the record ----

    def record(self, skipped: bool, loss: float | None) -> dict[str, Any]:
        """Plain values for groups.jsonl and samples.jsonl. `skipped` and `loss`: of the whole
        step; None where the policy was not trained.
        """
        everything = self._groups()
        idle = Counter(
            self._no_signal[group.samples[0].uid]
            for _, group in everything
            if group.samples and all(self._no_signal[s.uid] for s in group.samples)
        )
        return {
            "algorithm": self._algorithm,
            "computed_by": {"reward": REWARD, **self._computed_by},
            "weights": self.tracer.weights,
            "changed": self.changed,
            "groups_of_step": len(everything),
            "idle_groups": dict(idle),
            "batch": self._batch(),
            "minibatches": [
                {
                    "tokens": totals.tokens,
                    "sequences": totals.sequences,
                    "max_length": totals.max_length,
                    "rows": totals.samples,
                }
                for totals in self.totals
            ],
            "policy_trained": bool(self.totals),
            "skipped": skipped,
            "loss": None if loss is None else _short(loss),
            "groups": [self._group(kind, group) for kind, group in self._shown],
            "samples": {
                s.uid: self._sample(s)
                for _, s, _ in pick(self.rollout_batch.groups, self.tracer.samples)
            },
        }

    def _batch(self) -> dict[str, Any]:
        """Mean and standard deviation of the scored episodes of the whole batch."""
        totals: dict[str, float] = {}
        for place in self._places.values():
            sample = place.sample
            if sample.reward is not None:
                totals.setdefault(sample.episode, sample.reward)
                totals[sample.episode] += self._token_reward(place)
        values = sorted(totals.values())
        if not values:
            return {"episodes": 0}
        mean = sum(values) / len(values)
        ddof = int(self.tracer.algorithm.options.std == "sample")
        var = sum((x - mean) ** 2 for x in values) / max(1, len(values) - ddof)
        return {"episodes": len(values), "mean": _short(mean), "std": _short(var**0.5)}

    def _token_reward(self, place: _RowPosition) -> float:
        found = self._stream(place, "token_rewards")
        return 0.0 if found is None else float(found.double().sum())

    def _group(self, kind: str, group: Group) -> dict[str, Any]:
        texts = [*group.texts, *[""] * len(group.samples)]
        return {
            "group": group.samples[0].group if group.samples else "",
            "row": group.row.id,
            "status": kind,
            "prompt": asked_text(group)[-TEXT:],
            "samples": [
                {
                    "uid": sample.uid,
                    "episode": sample.episode,
                    "text": text[:TEXT],
                    "reward": sample.reward,
                    "components": sample.rewards,
                    "stop": str(sample.stop),
                    **self._sample(sample),
                }
                for sample, text in zip(group.samples, texts, strict=False)
            ],
        }

    def _sample(self, sample: Sample) -> dict[str, Any]:
        """What training did with one sample."""
        found: dict[str, Any] = {
            "group": sample.group,
            "sampled": sample.n_trained,
            "no_signal": self._no_signal.get(sample.uid),
        }
        sampled_by = sample.versions[sample.trained]
        if len(sampled_by):
            found["versions"] = [int(sampled_by.min()), int(sampled_by.max())]
        if sample.baseline is not None:
            found["baseline"] = sample.baseline
        place = self._places.get(sample.uid)
        if place is None:
            return found
        found["tokens"] = place.end - place.begin
        found["minibatch"] = place.minibatch
        if place.partner is not None:
            found["pair"] = {"side": place.side, "with": place.partner.uid}
        if place.end > place.begin:
            found |= self._streams(place)
            found |= self._of_loss(place)
            if self.tracer.tokens == "all":
                found["by_token"] = self._by_token(place)
        return found

    def _streams(self, place: _RowPosition) -> dict[str, Any]:
        """The streams that the batch was trained with, in a few numbers each."""
        found: dict[str, Any] = {}
        for name, stream in place.batch.streams.items():
            own = stream[place.begin : place.end].double()
            if name == "advantages":
                found["advantage"] = _number_or_spread(own)
            elif name in LOGPROBS:
                found[name] = _short(own.mean())
            elif name in SPREAD:
                found[name] = _spread(own)
            elif name in CONSTANT:
                found[name] = _short(own[-1])
            elif name == "token_rewards":
                found["token_reward"] = _short(own.sum())
            elif name == "selected":
                found["selected"] = _short(own.mean())
        if place.batch.bootstrap is not None:
            row = next(i for i, s in enumerate(place.batch.samples) if s is place.sample)
            found["bootstrap"] = _short(place.batch.bootstrap[row])
        return found

    def _of_loss(self, place: _RowPosition) -> dict[str, Any]:
        """What the loss said of the sample in its first update. Nothing where it was not computed:
        a row without an advantage has no gradient.
        """
        said = [self._said[slot] for slot in self._slots_of(place) if slot in self._said]
        if not said:
            return {}
        tokens = sum(numbers[TOKENS] for numbers in said)
        names = {name for numbers in said for name in numbers} - {TOKENS}

        def total(name: str) -> float:
            return sum(numbers[name] for numbers in said)

        found: dict[str, Any] = {"loss": _short(total("loss"))}
        for name in ("logprob", "kl", "entropy", "divergence"):
            if name in names:
                found[name] = _short(total(name) / tokens)
        if "clip_fraction" in names:
            found["clipped"] = _short(total("clip_fraction") / tokens)
        if "weight" in names:
            found["denominator"] = _short(tokens / total("weight"))
        if "implicit_reward" in names:
            found["implicit_reward"] = _short(total("implicit_reward"))
        if "ratio" in names:
            found["ratio"] = {
                "mean": _short(total("ratio") / tokens),
                "min": _short(min(numbers["ratio/min"] for numbers in said)),
                "max": _short(max(numbers["ratio/max"] for numbers in said)),
            }
        return found

    def _slots_of(self, place: _RowPosition) -> range:
        first = self._first_slot.get(place.sample.uid)
        if first is None:
            return range(0)
        return range(first, first + (place.end - place.begin if self.tracer.tokens == "all" else 1))

    def _by_token(self, place: _RowPosition) -> dict[str, list[float]]:
        """Every stream and everything that the loss said, token by token."""
        found: dict[str, list[float]] = {
            "ids": place.sample.tokens[place.sample.trained].tolist(),
        }
        for name, stream in place.batch.streams.items():
            if name not in HIDDEN and stream.ndim == 1:
                found[name] = _shorts(stream[place.begin : place.end].tolist())
        said = [self._said.get(slot) for slot in self._slots_of(place)]
        if said and all(numbers is not None for numbers in said):
            for name in ("logprob", "ratio", "entropy", "clip_fraction", "kl", "loss"):
                if name in (said[0] or {}):
                    found[name] = _shorts([(numbers or {})[name] for numbers in said])
        return found


def _short(value: float | Tensor) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def _shorts(values: Iterable[float]) -> list[float]:
    return [_short(value) for value in values]


def _spread(values: Tensor) -> dict[str, float]:
    return {
        "mean": _short(values.mean()),
        "min": _short(values.min()),
        "max": _short(values.max()),
        "first": _short(values[0]),
        "last": _short(values[-1]),
    }


def _number_or_spread(values: Tensor) -> float | dict[str, float]:
    """One number where all are equal."""
    return _short(values[0]) if bool((values == values[0]).all()) else _spread(values)
