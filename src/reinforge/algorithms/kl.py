"""Estimators of KL(policy || reference) per token, for use as a term of the loss. d = logp - logp_ref at the sampled token.

| name | value           | gradient as an on-policy loss (one step)                      |
|------|-----------------|---------------------------------------------------------------|
| k1   | d               | zero in expectation: it only adds noise                       |
| k2   | d^2 / 2         | that of the reverse KL(policy || reference): the one wanted   |
| k3   | exp(-d) + d - 1 | that of the forward KL(reference || policy)                   |
| k3+  | value of k3     | of k2                                                         |

Over a sequence all of them leave out the effect of a token on the KL of later ones. Off-policy each needs the
importance weight (`PolicyLoss` applies it). d is clamped to +-`clamp`; beyond it the gradient is 0.
Values: http://joschu.net/blog/kl-approx.html; gradients: worked out exactly in tests/unit/test_kl.py.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

KL = Callable[[Tensor, Tensor], Tensor]

CLAMP = 20.0


def k1(logprobs: Tensor, reference: Tensor, clamp: float = CLAMP) -> Tensor:
    """d. Unbiased, high variance, negative for single tokens."""
    return (logprobs - reference).clamp(-clamp, clamp)


def k2(logprobs: Tensor, reference: Tensor, clamp: float = CLAMP) -> Tensor:
    """d^2 / 2. Biased value, unbiased gradient."""
    return 0.5 * k1(logprobs, reference, clamp).square()


def k3(logprobs: Tensor, reference: Tensor, clamp: float = CLAMP) -> Tensor:
    """exp(-d) + d - 1. Unbiased value, never negative; what the GRPO paper (2402.03300 eq. 4) uses."""
    d = k1(logprobs, reference, clamp)
    return (-d).expm1() + d


def k3_plus(logprobs: Tensor, reference: Tensor, clamp: float = CLAMP) -> Tensor:
    """The value of k3 with the gradient of k2: what rho * k3 gives when its gradient also goes through rho (2512.02556)."""
    straight = k2(logprobs, reference, clamp)
    return straight + (k3(logprobs, reference, clamp) - straight).detach()


ESTIMATORS: dict[str, KL] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}

NOTES: dict[str, str] = {
    "k1": "kl.estimator k1 as a loss has zero expected gradient: it does not pull the policy to the reference. Use k2 or k3+.",
    "k3": "kl.estimator k3 as a loss has the gradient of the forward KL(reference || policy). k2 and k3+ have that of the reverse KL.",
}
