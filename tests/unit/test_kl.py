"""Exact (tabular, float64): the policy is a softmax over five tokens, expectations are sums over all of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reinforge.algorithms.kl import ESTIMATORS, k1, k2, k3, k3_plus

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.5, 0.4, -1.5, 0.3], dtype=torch.float64).log_softmax(0)
SAMPLER = torch.tensor([0.0, -0.4, 1.2, 0.5, 0.2], dtype=torch.float64).log_softmax(0)


def gradient_of(make_loss) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(make_loss(logits.log_softmax(0)), logits)
    return gradient


REVERSE = gradient_of(lambda p: (p.exp() * (p - REFERENCE)).sum())  # KL(policy || reference)
FORWARD = gradient_of(lambda p: (REFERENCE.exp() * (REFERENCE - p)).sum())  # KL(reference || policy)


def expected_loss(kl, weights: Tensor):
    """The expectation of the estimator as a loss over tokens drawn with `weights`, which carry no gradient."""
    return lambda p: (weights.detach() * kl(p, REFERENCE)).sum()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-12, rtol=0)


def test_expected_gradients_on_policy() -> None:
    policy = LOGITS.softmax(0)
    assert REVERSE.abs().max() > 0.05 and not torch.allclose(REVERSE, FORWARD, atol=1e-2)
    assert close(gradient_of(expected_loss(k1, policy)), torch.zeros(5, dtype=torch.float64))
    assert close(gradient_of(expected_loss(k2, policy)), REVERSE)
    assert close(gradient_of(expected_loss(k3, policy)), FORWARD)
    assert close(gradient_of(expected_loss(k3_plus, policy)), REVERSE)


def test_k1_in_the_reward_is_the_reverse_kl() -> None:
    """The policy gradient of the reward -k1 (no gradient inside) descends KL(policy || reference)."""
    policy = LOGITS.softmax(0)
    reward = -k1(LOGITS.log_softmax(0), REFERENCE)
    assert close(gradient_of(lambda p: -(policy * reward * p).sum()), REVERSE)


def test_off_policy_needs_the_importance_weight() -> None:
    """Tokens drawn by another policy: unweighted, every estimator's gradient is off; weighted by the ratio it is right again."""
    sampled = SAMPLER.exp()
    ratio = (LOGITS.log_softmax(0) - SAMPLER).exp()
    for kl, exact in ((k2, REVERSE), (k3, FORWARD)):
        assert not torch.allclose(gradient_of(expected_loss(kl, sampled)), exact, atol=1e-2)
        assert close(gradient_of(expected_loss(kl, sampled * ratio)), exact)


def test_values() -> None:
    policy, logprobs = LOGITS.softmax(0), LOGITS.log_softmax(0)
    exact = (policy * (logprobs - REFERENCE)).sum()
    for kl in (k1, k3, k3_plus):  # unbiased
        assert (policy * kl(logprobs, REFERENCE)).sum().item() == pytest.approx(exact.item(), abs=1e-12)
    d = torch.tensor([0.5, -1.0], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    assert k1(d, zero).tolist() == [0.5, -1.0] and k2(d, zero).tolist() == [0.125, 0.5]
    assert k3(d, zero).tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1, math.e - 2], abs=1e-15)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k3+"])
def test_equal_policies_and_extreme_ratios(name: str) -> None:
    logprobs = torch.tensor([-1.0, -250.0, -1.0, -float("inf")], requires_grad=True)
    value = ESTIMATORS[name](logprobs, torch.tensor([-1.0, -1.0, -250.0, -1.0]))
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.isfinite().all() and gradient.isfinite().all()
    assert value[0] == 0 and gradient[1:].tolist() == [0, 0, 0]


def test_clamp_bounds_the_log_ratio() -> None:
    d = torch.tensor([-3.0, 3.0], dtype=torch.float64)
    assert k1(d, torch.zeros(2), 1.0).tolist() == [-1.0, 1.0]
    assert k3(d, torch.zeros(2), 1.0).tolist() == pytest.approx([math.e - 2, math.exp(-1)])


@pytest.mark.parametrize("kl", [k1, k2, k3])
def test_gradients_by_finite_differences(kl) -> None:
    logprobs = torch.tensor([-0.3, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kl(x, torch.tensor([-1.0, -1.5, -1.0], dtype=torch.float64)), logprobs)
