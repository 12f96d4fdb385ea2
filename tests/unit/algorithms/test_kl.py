"""Exact (tabular, float64): the policy is a softmax over five tokens, expectations are sums over
all of them.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reinforge.algorithms.build import build
from reinforge.algorithms.parts.kl import ESTIMATORS, k1, k2, k3, k3_plus
from reinforge.algorithms.parts.terms import LossTerms, adaptive_entropy, adaptive_kl
from reinforge.core.backend import State
from reinforge.core.batch import Batch
from reinforge.core.sample import Sample

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.5, 0.4, -1.5, 0.3], dtype=torch.float64).log_softmax(0)
SAMPLER = torch.tensor([0.0, -0.4, 1.2, 0.5, 0.2], dtype=torch.float64).log_softmax(0)


def gradient_of(make_loss) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(make_loss(logits.log_softmax(0)), logits)
    return gradient


REVERSE = gradient_of(lambda p: (p.exp() * (p - REFERENCE)).sum())  # KL(policy || reference)
# KL(reference || policy)
FORWARD = gradient_of(lambda p: (REFERENCE.exp() * (REFERENCE - p)).sum())


def expected_loss(kl, weights: Tensor):
    """The expectation of the estimator as a loss over tokens drawn with `weights`, which carry no
    gradient.
    """
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
    """The policy gradient of the reward -k1 (no gradient inside) descends KL(policy ||
    reference).
    """
    policy = LOGITS.softmax(0)
    reward = -k1(LOGITS.log_softmax(0), REFERENCE)
    assert close(gradient_of(lambda p: -(policy * reward * p).sum()), REVERSE)


def test_off_policy_needs_the_importance_weight() -> None:
    """Tokens drawn by another policy: unweighted, every estimator's gradient is off; weighted by
    the ratio it is right again.
    """
    sampled = SAMPLER.exp()
    ratio = (LOGITS.log_softmax(0) - SAMPLER).exp()
    for kl, exact in ((k2, REVERSE), (k3, FORWARD)):
        assert not torch.allclose(gradient_of(expected_loss(kl, sampled)), exact, atol=1e-2)
        assert close(gradient_of(expected_loss(kl, sampled * ratio)), exact)


def test_values() -> None:
    policy = LOGITS.softmax(0)
    logprobs = LOGITS.log_softmax(0)
    exact = (policy * (logprobs - REFERENCE)).sum()
    for kl in (k1, k3, k3_plus):  # unbiased
        assert (policy * kl(logprobs, REFERENCE)).sum().item() == pytest.approx(
            exact.item(), abs=1e-12
        )
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
    assert k1(d, torch.zeros(2), clamp=1.0).tolist() == [-1.0, 1.0]
    assert k3(d, torch.zeros(2), clamp=1.0).tolist() == pytest.approx([math.e - 2, math.exp(-1)])


@pytest.mark.parametrize("kl", [k1, k2, k3])
def test_gradients_by_finite_differences(kl) -> None:
    logprobs = torch.tensor([-0.3, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: kl(x, torch.tensor([-1.0, -1.5, -1.0], dtype=torch.float64)), logprobs
    )


# in the reward


def test_other_estimators_in_the_reward_are_biased() -> None:
    """k3 there descends reverse minus forward KL, k3+ has the same value and so the same gradient,
    k2 descends neither.
    """
    policy = LOGITS.softmax(0)
    logprobs = LOGITS.log_softmax(0)
    ascent = {
        name: gradient_of(lambda p, f=f: (policy * f(logprobs, REFERENCE).detach() * p).sum())
        for name, f in ESTIMATORS.items()
    }
    assert (
        close(ascent["k1"], REVERSE)
        and close(ascent["k3"], REVERSE - FORWARD)
        and close(ascent["k3+"], ascent["k3"])
    )
    assert not torch.allclose(ascent["k2"], REVERSE, atol=1e-2)


def kl_samples() -> list[Sample]:
    """Two answers of two tokens; KL to the reference by k1: (0.5, -0.1) and (0.2, 0.4)."""
    out = []
    for i, (reward, behaviour, reference) in enumerate(
        ((1.0, (-1.0, -2.0), (-1.5, -1.9)), (0.0, (-0.5, -1.0), (-0.7, -1.4)))
    ):
        sample = Sample.from_tokens(
            f"s{i}", [1, 2, 3], [False, True, True], group="g", reward=reward
        )
        out.append(
            sample.with_(
                logprobs=torch.tensor([0.0, *behaviour]),
                streams={"reference": torch.tensor([0.0, *reference])},
            )
        )
    return out


def test_kl_in_the_reward_of_a_group() -> None:
    """beta 0.5: the totals are 1 - 0.5 * 0.4 and 0 - 0.5 * 0.6, the advantages +-(0.8 +
    0.3) / 2.
    """
    batch = Batch.pack(kl_samples())
    algorithm = build("dr_grpo", kl_placement="reward", kl_coefficient=0.5)
    metrics = algorithm.advantages([batch])
    assert algorithm.needs == {"reference"} and algorithm.loss.needs == frozenset()
    assert batch.streams["advantages"].tolist() == pytest.approx([0.55, 0.55, -0.55, -0.55])
    assert metrics == pytest.approx({"policy/kl": 0.25, "batch/samples": 2.0})


def test_kl_in_the_reward_with_return_to_go() -> None:
    """Token by token: rewards (-0.25, 1 + 0.05) and (-0.1, -0.2); what is left to come of each is
    what counts.
    """
    batch = Batch.pack(kl_samples())
    build("reinforce_pp", kl_coefficient=0.5, settings={"whiten": False}).advantages([batch])
    assert batch.streams["advantages"].tolist() == pytest.approx([0.8, 1.05, -0.3, -0.2])


def test_kl_in_the_reward_takes_recomputed_log_probs_first_and_clamps() -> None:
    samples = [
        s.with_(
            streams={**s.streams, "old": s.streams["reference"] + torch.tensor([0.0, 3.0, -3.0])}
        )
        for s in kl_samples()
    ]
    batch = Batch.pack(samples)
    build("reinforce_pp", kl_coefficient=1.0, kl_clamp=2.0, settings={"whiten": False}).advantages(
        [batch]
    )
    assert batch.streams["advantages"].tolist() == pytest.approx([1.0, 3.0, 0.0, 2.0])


# coefficients that adapt


def test_proportional_controller() -> None:
    """Ziegler et al.: the error is clipped to a fifth, and a batch counts by its share of the
    horizon.
    """
    step = lambda kl, samples=100: adaptive_kl(0.1, kl, target=0.05, horizon=1000, samples=samples)  # noqa: E731
    assert (
        step(0.05) == 0.1
        and step(0.055) == pytest.approx(0.1 * 1.01)
        and step(0.045) == pytest.approx(0.1 * 0.99)
    )
    assert step(5.0) == pytest.approx(0.1 * 1.02) and step(0.0) == step(-5.0) == pytest.approx(
        0.1 * 0.98
    )
    assert step(5.0, 10**6) == pytest.approx(0.12)


def test_the_controller_finds_its_target() -> None:
    """A policy whose KL falls with the coefficient as 0.01 / beta: beta goes to 0.2 from both
    sides.
    """
    for beta in (0.02, 2.0):
        for _ in range(300):
            beta = adaptive_kl(beta, 0.01 / beta, target=0.05, horizon=1000, samples=200)
        assert beta == pytest.approx(0.2, rel=1e-3)


def test_adaptive_entropy() -> None:
    move = lambda c, entropy: adaptive_entropy(c, entropy, target=0.3, rate=0.01, limit=0.05)  # noqa: E731
    assert move(0.0, 0.1) == 0.01 and move(0.02, 0.5) == 0.01 and move(0.02, 0.3) == 0.02
    assert move(0.0, 0.5) == 0.0 and move(0.045, 0.1) == 0.05


def test_terms_adapt_by_what_was_measured() -> None:
    terms = LossTerms(
        kl=0.1, kl_target=0.05, kl_horizon=1000, entropy_target=0.3, entropy_rate=0.01
    )
    assert terms.adapt({"policy/kl": 0.055, "batch/samples": 100.0, "policy/entropy": 0.1}) == {
        "policy/kl_coefficient": 0.1,
        "policy/entropy_coefficient": 0.0,
    }
    assert (terms.kl, terms.entropy) == pytest.approx((0.101, 0.01))
    before = (terms.kl, terms.entropy)
    terms.adapt({})
    terms.adapt({"policy/kl": math.nan, "policy/entropy": math.inf, "batch/samples": 100.0})
    assert (terms.kl, terms.entropy) == before
    still = LossTerms(kl=0.1, entropy=0.1)
    assert still.adapt({"policy/kl": 9.0, "policy/entropy": 9.0, "batch/samples": 9.0}) == {} and (
        still.kl,
        still.entropy,
    ) == (0.1, 0.1)


def test_an_algorithm_remembers_what_adapted() -> None:
    """As a part of a run: plain values that JSON keeps to the bit, and nothing of what the
    configuration says.
    """
    import json

    options = {"kl_coefficient": 0.1, "kl_target": 0.05, "kl_estimator": "k2"}
    first = build("grpo", **options)
    second = build("grpo", **options)
    for kl in (0.3, 0.07, 0.011):
        first.adapt({"policy/kl": kl, "batch/samples": 37.0})
    state = first.state()
    assert state.tensors == {} and set(state.meta) == {"kl"} and state.meta["kl"] != 0.1
    second.load(State(meta=json.loads(json.dumps(state.meta))))
    assert second.terms == first.terms and second.loss.terms.kl == first.terms.kl  # type: ignore[attr-defined]
    assert build("grpo", kl_coefficient=0.1).state().meta == {}
