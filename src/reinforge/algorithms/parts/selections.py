"""Selections: which trained tokens a part of the loss applies to, decided once for a whole
optimizer batch.

A selection is `fn(rollouts) -> [M]` of 1 and 0, with settings as keywords. It sees every token of
the batch, so "the highest fifth" means of the batch and not of a micro-batch, and it does not
depend on the order of the rows: where the last place is tied, all of the tied are taken. Log-probs
are those of the stream `old`, or else `behaviour`; they are not looked at again in later updates of
the same batch.

1 = selected. What becomes of the selected is said in `catalogue.SELECTIONS`: `keep` (only they have
a surrogate), `drop` (they have none) or `penalise` (they get a penalty on top). Whatever is left
out still counts in denominators.

Legend: M trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from reinforge.algorithms.parts.advantages import Rollouts
from reinforge.algorithms.parts.ratios import log_ratio, per_sequence

Selection = Callable[..., Tensor]


def clip_cov(
    rollouts: Rollouts, *, share: float = 2e-4, lower: float = 1.0, upper: float = 5.0
) -> Tensor:
    """Selects, to be dropped, the `share` of all tokens with the highest covariance in (lower,
    upper) (Clip-Cov, 2505.22617).

        cov_t = (logp_t - mean logp) (A_t - mean A), means over the batch

    Tokens that are likely and good, or unlikely and bad, are those that cost entropy. At least one
    is selected if any is in the range. The paper draws them at random from the range; the highest
    are taken here, which is the same every time. Goes with ppo_clip.
    """
    covariance = _covariance(rollouts)
    inside = (covariance > lower) & (covariance < upper)
    return _highest(covariance, inside, max(math.floor(share * len(covariance)), 1)).float()


def kl_cov(rollouts: Rollouts, *, share: float = 2e-4) -> Tensor:
    """Selects, to be penalised, the `share` of all tokens with the highest (positive) covariance
    (KL-Cov, 2505.22617).

    L = -rho A + beta KL where selected and -rho A elsewhere, without a clip and with beta = 1 in
    the paper. Its KL(pi_old || pi) is taken as |logp - old|, as its authors and veRL do: that
    always pulls back. At least one is selected.
    """
    covariance = _covariance(rollouts)
    return _highest(covariance, covariance > 0, max(math.floor(share * len(covariance)), 1)).float()


def top_entropy(rollouts: Rollouts, *, share: float = 0.2) -> Tensor:
    """Selects, to be kept, the `share` of all tokens with the highest entropy: the forks of the
    text (2506.01939).

    Reads the stream `entropy`. TRL (top_entropy_quantile) takes the quantile of each micro-batch.
    """
    entropy = _stream(rollouts, "entropy")
    count = math.ceil(share * len(entropy) - 1e-9)
    return _highest(entropy, torch.ones_like(entropy, dtype=torch.bool), count).float()


def off_policy_mask(rollouts: Rollouts, *, drift: float = 0.5) -> Tensor:
    """Selects, to be dropped, rows with negative advantage that the policy no longer writes
    (DeepSeek-V3.2, 2512.02556 eq. 9):

        1 if A < 0 and mean_t (behaviour_t - old_t) > drift, else 0

    with A the mean over the row. It catches stale weights and rollout/trainer mismatch; needs the
    stream `old`. TRL (off_policy_mask_threshold) compares with the policy at each update instead.
    """
    far = (
        per_sequence(
            -log_ratio(_stream(rollouts, "old"), _stream(rollouts, "behaviour")),
            rollouts.sequence,
            mean=True,
        )
        > drift
    )
    negative = per_sequence(_stream(rollouts, "advantages"), rollouts.sequence, mean=True) < 0
    return (far & negative).float()


SELECTIONS: dict[str, Selection] = {
    f.__name__: f for f in (clip_cov, kl_cov, top_entropy, off_policy_mask)
}


def _stream(rollouts: Rollouts, name: str) -> Tensor:
    assert name in rollouts.streams, (
        f"a selection needs the stream {name!r}; there are {sorted(rollouts.streams)}"
    )
    return rollouts.streams[name].double()


def _covariance(rollouts: Rollouts) -> Tensor:
    """[M]. Means of sorted values: the order of the rows cannot change a bit."""
    logprobs = _stream(rollouts, "old" if "old" in rollouts.streams else "behaviour")
    advantages = _stream(rollouts, "advantages")
    return (logprobs - logprobs.sort().values.mean()) * (
        advantages - advantages.sort().values.mean()
    )


def _highest(values: Tensor, candidates: Tensor, count: int) -> Tensor:
    """[M] bool: the `count` highest candidates, and those equal to the last of them.

    All if there are fewer.
    """
    among = values[candidates]
    if count < 1 or not len(among):
        return torch.zeros_like(candidates)
    last = among.topk(min(count, len(among))).values[-1]
    return candidates & (values >= last)
