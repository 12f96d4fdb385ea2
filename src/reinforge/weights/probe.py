"""The proof after an update: log-probs of a few fixed tokens by the engine against those by the
trainer's own forward.

A tied head that kept the old weights, a bucket that never came, a name that the engine ignored: all
of them generate fluent text and train on wrong log-probs. All of them move the probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.core.errors import WeightMismatch
from reinforge.core.weights import ProbeScores

LENGTH = 48  # tokens of a probe
# [T] log-probs at temperature 1 of each token; 0 at position 0
Scorer = Callable[[Sequence[int]], Tensor]
# mean |Δ|; bfloat16 rounds: 0.02 is its usual noise, and 0.154 was seen after a right update of a
# small model whose server and trainer both rounded
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
HEAD = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}  # of logits of a tied head, relative


def probe_tokens(vocabulary: int, length: int = LENGTH, number: int = 0) -> list[int]:
    """Tokens that are the same for every run, spread over the vocabulary. Those of another `number`
    begin otherwise: no engine has them in a cache.

    >>> probe_tokens(100, 4), probe_tokens(100, 4, 1)
    ([3, 22, 41, 60], [10, 29, 48, 67])
    """
    stride = max(1, int(vocabulary * 0.6180339887) | 1) if vocabulary > 1000 else 19
    return [(3 + 7 * number + i * stride) % vocabulary for i in range(length)]


def probe_of(vocabulary: int, context: int, number: int) -> list[int]:
    """The probe of an update, as long as the model's context allows."""
    return probe_tokens(vocabulary, min(LENGTH, context // 2), number)


def scores_of(score: Scorer, vocabulary: int, context: int, number: int) -> ProbeScores:
    """What the trainer says about the probe of this update, and about the next one."""
    want, ahead = (
        score(probe_of(vocabulary, context, n)).float().cpu() for n in (number, number + 1)
    )
    return ProbeScores(number, want, ahead)


@dataclass(frozen=True, slots=True)
class ProbeCheck:
    """What one engine said after an update. `compare` makes it; the largest error of a step becomes
    a metric.
    """

    error: float  # mean |Δ log-prob| over the probe
    version: int


def compare(
    found: Tensor,
    want: Tensor,
    *,
    version: int,
    dtype: str,
    before: Tensor | None,
    head_error: float,
    tolerance: float | None = None,
) -> ProbeCheck:
    """Raises `WeightMismatch` with the likeliest culprit where engine and trainer differ by more
    than rounding. `before` are the trainer's values of this probe under the weights served before;
    `head_error` is that of the engine's own look at its tied head.
    """
    error = float((found[1:] - want[1:]).abs().mean())
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    stale_head = head_error > HEAD[dtype]
    if error <= limit and not stale_head:
        return ProbeCheck(error, version)
    if stale_head:
        culprit = (
            "its output head gives other logits than the embedding that it is tied to (by"
            f" {head_error:.2g} of the largest): the tied lm_head is stale, it kept the weights of"
            " before"
        )
    elif before is not None and _nearer(found, before, want):
        culprit = (
            "it still serves the weights of before: nothing of the update arrived, or cached"
            " results were kept"
        )
    elif version == 0 or before is None:
        culprit = (
            f"it computes another function: another model, precision ({dtype}), attention or rope"
            " than the trainer's"
        )
    else:
        culprit = (
            "some weights did not arrive: a name that the engine does not know, or a layer that was"
            " packed before"
        )
    raise WeightMismatch(
        f"after the update to version {version} the engine's log-probs of the probe differ from the"
        f" trainer's by {error:.3g} nats on average (limit {limit:.3g}). Likely culprit: {culprit}."
    )


def _nearer(found: Tensor, before: Tensor, want: Tensor) -> bool:
    """Whether what was found is what was there before rather than what should be there now."""
    to_old = float((found - before).abs().mean())
    to_new = float((found - want).abs().mean())
    return to_old < 0.1 * to_new and not torch.equal(before, want)
