"""Preference losses: one number per pair from the log-probs of two answers under the policy and
under the reference.

A loss is `fn(policy_w, policy_l, reference_w, reference_l, *, beta, ...) -> (loss [P], metrics
{name: [P]})`; w is the chosen answer, l the rejected one. Log-probs are summed over the answer's
trained tokens, or averaged where the method says so (the row of the method in
`preference.PREFERENCE` says which). The metrics are the implied rewards of both answers, their
margin and accuracy.

    a = log pi_w - log ref_w,  b = log pi_l - log ref_l,  D = beta (s(a) - s(b))

with s the identity, or another f-divergence's (2309.16240). Methods without a reference ignore the
last two tensors.

Legend: P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, softplus

from reinforge.core.errors import InputError

Result = tuple[Tensor, dict[str, Tensor]]
Divergence = Callable[[Tensor], Tensor]


def reverse_kl(ratio: Tensor) -> Tensor:
    """s = f'(e^x) = x up to a constant: DPO's own."""
    return ratio


def forward_kl(ratio: Tensor) -> Tensor:
    """f' = 1 - e^-x."""
    return -torch.expm1(-ratio)


def js(ratio: Tensor) -> Tensor:
    """f' = log(2 e^x / (1 + e^x)) = log 2 - softplus(-x)."""
    return math.log(2) - softplus(-ratio)


def alpha_divergence(ratio: Tensor, *, alpha: float = 0.5) -> Tensor:
    """f' = (e^((alpha-1) x) - 1) / (alpha - 1); alpha -> 1 is reverse_kl, 0 forward_kl.

    The exponent is cut at 80 (float32 overflows at 88).
    """
    if abs(alpha - 1) < 1e-6:
        return ratio
    return torch.expm1(((alpha - 1) * ratio).clamp(max=80.0)) / (alpha - 1)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js": js,
    "alpha": alpha_divergence,
}


def result(loss: Tensor, chosen: Tensor, rejected: Tensor) -> Result:
    """The loss with what everybody wants to watch. A tie counts as wrong."""
    assert loss.ndim == 1 and loss.shape == chosen.shape == rejected.shape
    chosen = chosen.detach()
    rejected = rejected.detach()
    accuracy = (chosen > rejected).to(chosen.dtype)
    return loss, {
        "chosen": chosen,
        "rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": accuracy,
    }


def smoothed(delta: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigma(D) - e log sigma(-D): the label is right with probability 1 - e."""
    if label_smoothing == 0:
        return -logsigmoid(delta)
    return -(1 - label_smoothing) * logsigmoid(delta) - label_smoothing * logsigmoid(-delta)


def _scores(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    beta: float,
    divergence: Divergence,
) -> tuple[Tensor, Tensor]:
    assert (
        policy_w.shape == policy_l.shape == reference_w.shape == reference_l.shape
        and policy_w.ndim == 1
    )
    return beta * divergence(policy_w - reference_w), beta * divergence(policy_l - reference_l)


def sigmoid(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    divergence: Divergence = reverse_kl,
) -> Result:
    """DPO: -log sigma(D) (2305.18290 eq. 7).

    With label smoothing conservative DPO; with averaged log-probs sigmoid_norm (2411.15124).
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, divergence)
    return result(smoothed(w - l, label_smoothing), w, l)


def hinge(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
    divergence: Divergence = reverse_kl,
) -> Result:
    """max(0, 1 - D) (SLiC 2305.10425, RSO 2309.06657)."""
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, divergence)
    return result(relu(1 - (w - l)), w, l)


def ipo(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
    divergence: Divergence = reverse_kl,
) -> Result:
    """((a - b) - 1/(2 beta))^2 with averaged log-probs (2310.12036 eq. 17; averaging as its authors
    ran it).
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, 1.0, divergence)
    return result((w - l - 1 / (2 * beta)) ** 2, beta * w, beta * l)


def robust(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
    divergence: Divergence = reverse_kl,
) -> Result:
    """(-(1-e) log sigma(D) + e log sigma(-D)) / (1 - 2e): unbiased when a share e of the labels is
    flipped (2403.00409).
    """
    if not 0 <= label_smoothing < 0.5:
        raise InputError(
            f"robust needs a share of flipped labels in [0, 0.5), not {label_smoothing}.",
            where="label_smoothing",
            fix="Give the share of wrong labels you expect, e.g. 0.1.",
        )
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, divergence)
    flipped = -(1 - label_smoothing) * logsigmoid(w - l) + label_smoothing * logsigmoid(l - w)
    return result(flipped / (1 - 2 * label_smoothing), w, l)


def exo_pair(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
    divergence: Divergence = reverse_kl,
) -> Result:
    """KL(q || p), q = (sigma(D), sigma(-D)), p = (1 - e, e): DPO's KL the other way around
    (2402.00856 eq. 16).
    """
    if not 0 < label_smoothing < 1:
        raise InputError(
            f"exo_pair divides by the label smoothing, which is {label_smoothing}.",
            where="label_smoothing",
            fix="Use 1e-3, as the paper does.",
        )
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, divergence)
    log_w = logsigmoid(w - l)
    log_l = logsigmoid(l - w)
    loss = log_w.exp() * (log_w - math.log1p(-label_smoothing)) + log_l.exp() * (
        log_l - math.log(label_smoothing)
    )
    return result(loss, w, l)


def nca_pair(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
) -> Result:
    """-log sigma(w) - 1/2 log sigma(-w) - 1/2 log sigma(-l), w = beta a, l = beta b: absolute, not
    only relative, likelihoods (2402.05369).
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, reverse_kl)
    return result(-logsigmoid(w) - 0.5 * logsigmoid(-w) - 0.5 * logsigmoid(-l), w, l)


def bco_pair(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
    delta: float = 0.0,
) -> Result:
    """-log sigma(w - delta) - log sigma(-(l - delta)): a binary classifier of good and bad
    (2404.04656).
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, reverse_kl)
    return result(-logsigmoid(w - delta) - logsigmoid(delta - l), w, l)


def sppo_hard(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
) -> Result:
    """(a - 1/(2 beta))^2 + (b + 1/(2 beta))^2: self-play with win probabilities 1 and 0 (2405.00675
    eq. 4.7).
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, 1.0, reverse_kl)
    return result((w - 0.5 / beta) ** 2 + (l + 0.5 / beta) ** 2, beta * w, beta * l)


def aot(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Result:
    """DPO on sorted log-ratios: the k-th smallest log pi_w - log pi_l against the k-th smallest of
    the reference (2406.05882).

    The whole batch at once. `PairLoss` ranks the batch beforehand instead, so that it may be cut.
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, reverse_kl)
    ranked = (policy_w - policy_l).sort(stable=True).values - (reference_w - reference_l).sort(
        stable=True
    ).values
    return result(smoothed(beta * ranked, label_smoothing), w, l)


def aot_unpaired(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Result:
    """The k-th smallest a against the k-th smallest b: which answers were a pair does not matter
    (2406.05882).
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, reverse_kl)
    return result(
        smoothed(w.sort(stable=True).values - l.sort(stable=True).values, label_smoothing), w, l
    )


def apo_zero(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
) -> Result:
    """1 - sigma(w) + sigma(l): chosen up, rejected down; for answers better than the model's own
    (2408.06266 eq. 7).
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, reverse_kl)
    return result(torch.sigmoid(-w) + torch.sigmoid(l), w, l)


def apo_down(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
) -> Result:
    """sigma(w) + 1 - sigma(w - l): both down, rejected more; for a model better than the chosen
    answers (2408.06266 eq. 8).
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, reverse_kl)
    return result(torch.sigmoid(w) + torch.sigmoid(l - w), w, l)


def discopop(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 0.1,
    tau: float = 0.05,
    divergence: Divergence = reverse_kl,
) -> Result:
    """(1 - g)(-log sigma(D)) + g e^-D with g = sigma(D / tau): the loss a language model found
    (2406.08414 eq. 5).
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, divergence)
    gate = torch.sigmoid((w - l) / tau)
    # where the gate is shut e^-D may overflow: it is taken at most at D = -80, where the gate is 0
    # for any tau below 0.9
    return result(
        -logsigmoid(w - l) * (1 - gate) + torch.exp(-(w - l).clamp(min=-80.0)) * gate, w, l
    )


def rpo_sq(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    gap: Tensor,
    beta: float = 0.1,
    scale: float = 1.0,
) -> Result:
    """(D - scale gap)^2, gap [P] = given reward of w minus that of l: reward-aware preference
    optimisation (2406.11704).
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, reverse_kl)
    return result((w - l - scale * gap) ** 2, w, l)


def rpo_bwd_kl(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    gap: Tensor,
    beta: float = 0.1,
    scale: float = 1.0,
) -> Result:
    """KL(p || q) of Bernoullis, p = sigma(scale gap), q = sigma(D) (2406.11704; NeMo's name).

    Its minimum is at D = scale gap.
    """
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, reverse_kl)
    return result(_bernoulli_kl(scale * gap, w - l), w, l)


def rpo_fwd_kl(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    gap: Tensor,
    beta: float = 0.1,
    scale: float = 1.0,
) -> Result:
    """KL(q || p) of Bernoullis, p = sigma(scale gap), q = sigma(D) (2406.11704; NeMo's name)."""
    w, l = _scores(policy_w, policy_l, reference_w, reference_l, beta, reverse_kl)
    return result(_bernoulli_kl(w - l, scale * gap), w, l)


def _bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(Bernoulli(sigma(p)) || Bernoulli(sigma(q))) from logits."""
    yes = logsigmoid(p)
    no = logsigmoid(-p)
    return yes.exp() * (yes - logsigmoid(q)) + no.exp() * (no - logsigmoid(-q))


def xpo(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    explore: Tensor,
    beta: float = 0.1,
    alpha: float = 1e-5,
    label_smoothing: float = 0.0,
) -> Result:
    """DPO + alpha · log pi(y) of the answers y that the *reference* sampled, on pairs of one answer
    of either (2405.21046 algorithm 1).

    `explore` [P] is that log-prob, of whichever side it was: where it falls the policy explores.
    """
    loss, metrics = sigmoid(
        policy_w, policy_l, reference_w, reference_l, beta=beta, label_smoothing=label_smoothing
    )
    return loss + alpha * explore, metrics
