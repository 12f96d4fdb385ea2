"""Estimators of KL(policy || reference) per token. d = logp - logp_ref at the sampled token.

| name | value           | gradient as an on-policy loss (one step)  | in the reward            |
|------|-----------------|-------------------------------------------|--------------------------|
| k1   | d               | zero in expectation: it only adds noise   | exact                    |
| k2   | d^2 / 2         | of the reverse KL(policy || reference):   | biased                   |
|      |                 | the one wanted                            |                          |
| k3   | exp(-d) + d - 1 | of the forward KL(reference || policy)    | reverse minus forward KL |
| k3+  | value of k3     | of k2                                     | as k3: only values count |

As a loss all of them leave out the effect of a token on the KL of later ones; in the reward, with
return-to-go or a whole sequence's return, it is there. Off-policy a loss needs the importance
weight (`PolicyLoss` applies it). d is clamped to +-`clamp`; beyond it the gradient is 0. Values:
http://joschu.net/blog/kl-approx.html; gradients: worked out exactly in
tests/unit/algorithms/test_kl.py.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

KL = Callable[[Tensor, Tensor], Tensor]

CLAMP = 20.0


def k1(logprobs: Tensor, reference: Tensor, *, clamp: float = CLAMP) -> Tensor:
    """d. Unbiased, high variance, negative for single tokens."""
    return (logprobs - reference).clamp(-clamp, clamp)


def k2(logprobs: Tensor, reference: Tensor, *, clamp: float = CLAMP) -> Tensor:
    """d^2 / 2. Biased value, unbiased gradient."""
    return 0.5 * k1(logprobs, reference, clamp=clamp).square()


def k3(logprobs: Tensor, reference: Tensor, *, clamp: float = CLAMP) -> Tensor:
    """exp(-d) + d - 1.

    Unbiased value, never negative; what the GRPO paper (2402.03300 eq. 4) uses.
    """
    d = k1(logprobs, reference, clamp=clamp)
    return (-d).expm1() + d


def k3_plus(logprobs: Tensor, reference: Tensor, *, clamp: float = CLAMP) -> Tensor:
    """The value of k3 with the gradient of k2: what rho * k3 gives when its gradient also goes
    through rho (2512.02556).
    """
    straight = k2(logprobs, reference, clamp=clamp)
    return straight + (k3(logprobs, reference, clamp=clamp) - straight).detach()


ESTIMATORS: dict[str, KL] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}

NOTES: dict[str, str] = {
    "k1": (
        "kl.estimator k1 as a loss has zero expected gradient: it does not pull the policy to the"
        " reference. Use k2 or k3+."
    ),
    "k3": (
        "kl.estimator k3 as a loss has the gradient of the forward KL(reference || policy). k2 and"
        " k3+ have that of the reverse KL."
    ),
}

REWARD_NOTES: dict[str, str] = {
    "k2": "kl.estimator k2 in the reward is biased: its value is not the KL. Use k1 there.",
    "k3": (
        "kl.estimator k3 in the reward has the gradient of the reverse KL minus the forward KL, not"
        " of the KL. Use k1 there."
    ),
    "k3+": (
        "kl.estimator k3+ in the reward is k3 (only values count there): reverse minus forward KL."
        " Use k1 there."
    ),
}

SCALED_NOTE = (
    "kl.placement reward with algorithm.scale {scale}: advantages are divided by a std, and the KL"
    " coefficient with them, so its strength varies. Use algorithm.scale none for a fixed one."
)
