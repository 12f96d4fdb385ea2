"""Weights on their way from the trainer's actor to engines over servers elsewhere, which hold none
themselves: under the names of a checkpoint, in buckets, each checked on arrival, and with what the
trainer says about the probe.

Where only an adapter is trained it travels alone; what it is added to is sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from reinforge.cluster.tensors import buckets_of, fingerprint
from reinforge.core.weights import ProbeScores, Weights
from reinforge.engines.served.dialect import ServerSetup
from reinforge.models.named_weights import base_weights, low_rank, low_rank_pairs, named_weights
from reinforge.weights.probe import Scorer, scores_of

Bucket = list[tuple[str, Tensor]]
Put = Callable[[Bucket], Any]  # into the object store: a reference
Get = Callable[[Any], Bucket]  # of a reference


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Named tensors in the object store: what finds them, and what they are recognised by, for each
    bucket. `ServedWeights` has one or two.
    """

    refs: tuple[Any, ...]
    marks: tuple[str, ...]

    @classmethod
    def of(cls, pairs: Iterator[tuple[str, Tensor]], put: Put) -> StoredTensors:
        """One bucket after the other: no more of them is in memory here."""
        stored = [(put(bucket), fingerprint(dict(bucket))) for bucket in buckets_of(pairs)]
        return cls(tuple(ref for ref, _ in stored), tuple(mark for _, mark in stored))

    def pairs(self, get: Get) -> Iterator[tuple[str, Tensor]]:
        for ref, mark in zip(self.refs, self.marks, strict=True):
            bucket = get(ref)
            found = fingerprint(dict(bucket))
            if found != mark:
                raise RuntimeError(
                    "the weights that arrived are not those that were sent: fingerprint"
                    f" {found[:12]}, not {mark[:12]}"
                )
            yield from bucket

    def weights(self, kind: Literal["full", "adapter"], get: Get) -> Weights:
        return Weights(kind, buckets=partial(self.pairs, get), fingerprint="".join(self.marks))


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """One set of weights in the object store, for engines over servers. The trainer's actor makes
    it for every update (`store`); an engine's actor opens it (`weights`).
    """

    new: StoredTensors
    base: StoredTensors | None  # what `new`, an adapter, is added to
    scores: ProbeScores

    def weights(self, get: Get) -> Weights:
        """As `ServedEngine.update` takes them: read bucket by bucket, when they are written for the
        servers.
        """
        kind: Literal["full", "adapter"] = "full" if self.base is None else "adapter"
        found = self.new.weights(kind, get)
        return Weights(
            kind,
            buckets=found.buckets,
            fingerprint=found.fingerprint,
            scores=self.scores,
            base=None if self.base is None else self.base.weights("full", get),
        )


@torch.no_grad()
def store(
    weights: Weights,
    setup: ServerSetup,
    number: int,
    score: Scorer,
    put: Put,
    base: StoredTensors | None = None,
) -> ServedWeights:
    """The trainer's newest weights as these servers take them. `number`: of the probe. `base`: what
    was stored below the adapter before, which has not changed.
    """
    assert weights.module is not None, f"weights of kind {weights.kind} have no module to read"
    module = weights.module
    dtype = getattr(torch, setup.dtype)
    low = low_rank(module)
    if low is None:
        base = None
        new = StoredTensors.of(_cast(named_weights(module, dtype=dtype), dtype), put)
    else:
        base = base or StoredTensors.of(_cast(base_weights(module), dtype), put)
        new = StoredTensors.of(low_rank_pairs(low), put)
    scores = scores_of(score, setup.vocabulary, setup.context, number)
    return ServedWeights(new, base, scores)


def _cast(pairs: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """In the precision that the servers compute in."""
    return ((name, t.to(dtype) if t.is_floating_point() else t) for name, t in pairs)
