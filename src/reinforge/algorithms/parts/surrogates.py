"""Surrogates: the loss of each trained token whose gradient improves the policy.

A surrogate is `fn(logprobs, old, advantages, sequence) -> (loss [M], metrics {name: [M]})`;
settings are bound by `build.py`. `old` and `advantages` carry no gradient; `sequence` says which
tokens belong together. Those here look at each token by itself; those with ratios of whole
sequences are in `sequence.py`. rho = exp(logp - old); sg(x) is x without gradient. With old = logp
each of them has the gradient of -A logp.

Legend: M trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reinforge.algorithms.parts.ratios import (
    choose,
    clip_loss,
    finished,
    log_ratio,
    safe_ratio,
    straight_through,
)
from reinforge.algorithms.parts.sequence import gmpo, gspo, gspo_token, sequence_clip, vespo

__all__ = [
    "SURROGATES",
    "Surrogate",
    "cispo",
    "dppo_kl",
    "dppo_tv",
    "gmpo",
    "gspo",
    "gspo_token",
    "ppo_clip",
    "reinforce",
    "safe_ratio",
    "sapo",
    "sequence_clip",
    "vespo",
]

Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


def ppo_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor | None = None,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    delta: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -min(rho A, clip(rho, 1 - low, 1 + high) A) (PPO, 1707.06347 eq. 7).

    Dual clip (1912.09729), only where A < 0: L = min(L, -dual A), so a token that became much more
    likely cannot dominate. Two-sided clip (INTELLECT-2, 2505.07291): L = -min(min(rho, delta) A,
    clip(rho) A), with delta above 1 + high the same as a dual clip at delta. TRL's `delta` is this
    one.
    """
    assert logprobs.shape == old.shape == advantages.shape and logprobs.ndim == 1
    ratio = safe_ratio(logprobs, old)
    loss, metrics = clip_loss(ratio, advantages, low, high, delta)
    if dual is not None:
        clipped_dual = (advantages < 0) & (ratio > dual)
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
        metrics |= {
            "clip_dual": clipped_dual,
            "clip_fraction": metrics["clip_fraction"] | clipped_dual,
        }
    return loss, finished(metrics, loss.dtype)


def reinforce(
    logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -A logp (Williams 1992).

    No ratio enters the loss, so it is right for one update per rollout only.

    With the reducer sequence_sum this is -A times the summed log-prob of the sequence, averaged
    over sequences (RLOO, 2402.14740).
    """
    assert logprobs.shape == old.shape == advantages.shape and logprobs.ndim == 1
    return -advantages * logprobs, {"ratio": safe_ratio(logprobs, old).detach()}


def cispo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor | None = None,
    *,
    cap: float = 5.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -sg(min(rho, cap)) A logp (CISPO, 2506.13585): the weight is clipped, and no token loses
    its gradient.

    `cap` is the bound itself. So is TRL's epsilon_high; the paper and veRL write 1 + eps_high, and
    have a lower bound too, which the paper switches off. Reducer: token_mean.
    """
    assert logprobs.shape == old.shape == advantages.shape and logprobs.ndim == 1
    ratio = safe_ratio(logprobs, old).detach()
    loss = -ratio.clamp(max=cap) * advantages * logprobs
    return loss, finished(
        {"ratio": ratio, "clip_high": ratio > cap, "clip_fraction": ratio > cap}, loss.dtype
    )


def sapo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor | None = None,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -(4 / tau) sigmoid(tau (rho - 1)) A, tau by the sign of A (SAPO, 2511.20347).

    The gradient is rho A times the gate 4 p (1 - p), which is 1 at rho = 1 and falls off smoothly
    where a clip would cut. tau_negative also serves A = 0, where it does not matter. The paper, TRL
    and veRL average within sequences first (sequence_mean); here the reducer is token_mean unless
    told otherwise.
    """
    assert logprobs.shape == old.shape == advantages.shape and logprobs.ndim == 1
    ratio = safe_ratio(logprobs, old)
    tau = choose(advantages > 0, tau_positive, tau_negative, ratio)
    p = torch.sigmoid(tau * (ratio - 1))
    loss = -4 / tau * p * advantages
    return loss, finished({"ratio": ratio, "gate": 4 * p * (1 - p)}, loss.dtype)


def dppo_tv(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor | None = None,
    *,
    threshold: float = 0.15,
    truncate: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -m rho A, where m = 0 for tokens that have left the trust region in the direction A
    pushes them (DPPO, 2602.04879):

        m = 0 if D > threshold and (A > 0 and pi > mu, or A < 0 and pi < mu), else 1,  D = |pi - mu|

    with pi and mu the probabilities of the sampled token: the total variation of "this token or
    another". A ratio clip forbids 1e-5 -> 1e-3 and allows 0.99 -> 0.8; this does the opposite. The
    paper takes mu from the policy that sampled (stream behaviour), not from a recomputation.
    `truncate` bounds rho (its value; the gradient stays). Reducer: token_mean.
    """
    prob = _probability(logprobs)
    old_prob = _probability(old)
    return _dppo(logprobs, old, advantages, (prob - old_prob).abs() > threshold, truncate)


def dppo_kl(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor | None = None,
    *,
    threshold: float = 0.05,
    truncate: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `dppo_tv` with the KL of "this token or another" (DPPO, 2602.04879):

    D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), 1 - p not below 1e-8.
    """
    prob = _probability(logprobs)
    old_prob = _probability(old)
    rest = (1 - prob).clamp(min=1e-8)
    old_rest = (1 - old_prob).clamp(min=1e-8)
    divergence = old_prob * -log_ratio(logprobs.detach(), old) + old_rest * (old_rest / rest).log()
    return _dppo(logprobs, old, advantages, divergence > threshold, truncate)


def _dppo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, far: Tensor, truncate: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    assert logprobs.shape == old.shape == advantages.shape and logprobs.ndim == 1
    ratio = safe_ratio(logprobs, old).detach()
    clipped_high = far & (advantages > 0) & (logprobs.detach() > old)
    clipped_low = far & (advantages < 0) & (logprobs.detach() < old)
    weight = ratio if truncate is None else ratio.clamp(max=truncate)
    loss = -advantages * torch.where(
        clipped_high | clipped_low, 0.0, straight_through(weight, logprobs)
    )
    metrics = {
        "ratio": ratio,
        "clip_low": clipped_low,
        "clip_high": clipped_high,
        "clip_fraction": clipped_low | clipped_high,
    }
    return loss, finished(metrics, loss.dtype)


def _probability(logprobs: Tensor) -> Tensor:
    """In float64: 1 - p of a sure token would be 0 in float32."""
    return logprobs.detach().double().clamp(max=0.0).exp()


# with settings: bind them to get a `Surrogate`
SURROGATES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    f.__name__: f
    for f in (
        ppo_clip,
        reinforce,
        gspo,
        gspo_token,
        sequence_clip,
        cispo,
        sapo,
        gmpo,
        vespo,
        dppo_tv,
        dppo_kl,
    )
}
