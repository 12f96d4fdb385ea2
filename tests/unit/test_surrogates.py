from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.algorithms.corrections import finish, mis, mismatch, none, statistics, tis
from reinforge.algorithms.surrogates import ppo_clip, reinforce

LN = math.log
INF = float("inf")


def one(ratio_log: float, advantage: float, dtype=torch.float64, **clip) -> tuple[float, float, dict[str, float]]:
    """Loss, d loss / d logp and metrics of a single token whose old log-prob is -1."""
    old = torch.tensor([-1.0], dtype=dtype)
    logprobs = (old + ratio_log).requires_grad_()
    loss, metrics = ppo_clip(logprobs, old, torch.tensor([advantage], dtype=dtype), **clip)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.item(), gradient.item(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [  # clip at 0.8 and 1.28. d loss / d logp = -ratio * A, or 0 where the clip holds
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 2.0, -2.2, -2.2, False),
        (1.1, -2.0, 2.2, 2.2, False),
        (1.5, 2.0, -2.56, 0.0, True),  # already much more likely: no further push
        (1.5, -2.0, 3.0, 3.0, False),  # the wrong way: pulled back
        (0.5, 2.0, -1.0, -1.0, False),  # the wrong way: pulled back
        (0.5, -2.0, 1.6, 0.0, True),  # already much less likely
        (1.5, 0.0, 0.0, 0.0, False),
        (0.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_clip_table(ratio: float, advantage: float, loss: float, gradient: float, clipped: bool) -> None:
    value, slope, metrics = one(LN(ratio), advantage, low=0.2, high=0.28)
    assert (value, slope) == pytest.approx((loss, gradient), abs=1e-12)
    assert metrics["clip_fraction"] == clipped and metrics["ratio"] == pytest.approx(ratio)
    assert metrics["clip_low"] + metrics["clip_high"] == clipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0, INF, -INF])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_ratios_of_zero_and_infinity_stay_finite(dtype: torch.dtype, log_ratio: float, advantage: float, dual: float | None) -> None:
    value, slope, metrics = one(log_ratio, advantage, dtype, low=0.2, high=0.2, dual=dual)
    assert all(math.isfinite(x) for x in (value, slope, *metrics.values()))
    if advantage == 0:
        assert value == 0 and slope == 0
    elif advantage > 0:
        assert value == pytest.approx(-1.2 if log_ratio > 0 else 0.0, abs=1e-6) and slope == 0
    elif log_ratio < 0:
        assert value == pytest.approx(0.8) and slope == 0
    else:
        assert value == pytest.approx(3.0 if dual else math.exp(20), rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(5.0, -2.0, 6.0, 0.0), (2.5, -2.0, 5.0, 5.0), (0.5, -2.0, 1.6, 0.0), (5.0, 2.0, -2.4, 0.0), (5.0, 0.0, 0.0, 0.0)],
)
def test_dual_clip_only_for_negative_advantages(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    value, slope, metrics = one(LN(ratio), advantage, low=0.2, high=0.2, dual=3.0)
    assert (value, slope) == pytest.approx((loss, gradient), abs=1e-12)
    assert metrics["clip_dual"] == (ratio > 3 and advantage < 0)
    assert metrics["clip_fraction"] == (gradient == 0.0 and advantage != 0)


@settings(max_examples=100, deadline=None)
@given(st.floats(-3, 3), st.floats(-5, 5), st.floats(0.01, 0.9), st.floats(0.01, 2), st.one_of(st.none(), st.floats(1.1, 5)))
def test_clip_against_plain_python(log_ratio: float, a: float, low: float, high: float, dual: float | None) -> None:
    value, _, _ = one(log_ratio, a, low=low, high=high, dual=dual)
    ratio = math.exp((-1.0 + log_ratio) - -1.0)
    expected = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    if dual is not None and a < 0:
        expected = min(expected, -dual * a)
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_gradients_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(64, generator=generator, dtype=torch.float64)
    logprobs = (old + 0.4 * torch.randn(64, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(64, generator=generator, dtype=torch.float64)
    for function in (partial(ppo_clip, low=0.2, high=0.28), partial(ppo_clip, dual=1.3), reinforce):
        assert torch.autograd.gradcheck(lambda x, f=function: f(x, old, advantages)[0], logprobs)


def test_on_policy_ppo_and_reinforce_have_the_same_gradient() -> None:
    logprobs = torch.tensor([-0.5, -2.0, -0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    clip, _ = torch.autograd.grad(ppo_clip(logprobs, logprobs.detach(), advantages)[0].sum(), logprobs), None
    plain = torch.autograd.grad(reinforce(logprobs, logprobs.detach(), advantages)[0].sum(), logprobs)
    assert clip[0].tolist() == plain[0].tolist() == [-1.0, 2.0, 0.0]


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


def test_corrections() -> None:
    trainer, behaviour = logs(1.0, 0.5, 3.0, 2.0) - 1, torch.full((4,), -1.0, dtype=torch.float64)
    assert none(trainer, behaviour)[0].tolist() == [1.0] * 4
    weights, metrics = tis(trainer, behaviour, cap=2.5)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 2.5, 2.0]) and metrics["truncated"].tolist() == [0, 0, 1, 0]
    weights, metrics = mis(trainer, behaviour, cap=2.5)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 0.0, 2.0]) and metrics["dropped"].tolist() == [0, 0, 1, 0]
    huge = torch.tensor([200.0, -200.0])
    assert mis(huge, torch.zeros(2))[0][0] == 0 and tis(huge, torch.zeros(2))[0].tolist() == pytest.approx([2.0, 0.0], abs=1e-8)


def test_mismatch_statistics() -> None:
    """Ratios 1, 1/2, 3, 2: mean 6.5/4, mean square 14.25/4, ess = 6.5^2 / (4 * 14.25)."""
    trainer, behaviour = logs(1.0, 0.5, 3.0, 2.0), torch.zeros(4, dtype=torch.float64)
    s = statistics(trainer, behaviour)
    assert s["mismatch/ess"] == pytest.approx(6.5**2 / (4 * 14.25)) and "mismatch/ratio_squared" not in s
    assert s["mismatch/mean"] == pytest.approx((LN(2) + LN(3) + LN(2)) / 4) and s["mismatch/max"] == pytest.approx(LN(3))
    assert s["mismatch/ratio/min"] == pytest.approx(0.5) and s["mismatch/ratio/max"] == pytest.approx(3.0)
    assert s["mismatch/outside_2x"] == 0.25  # 3 only: 1/2 and 2 are on the edge
    assert s["mismatch/ratio/p50"] == pytest.approx(1.5)  # of 0.5, 1, 2, 3
    assert s["mismatch/ratio/p95"] == pytest.approx(2 + 0.85)
    assert statistics(trainer[:0], behaviour[:0]) == {}


def test_mismatch_adds_up_over_micro_batches() -> None:
    trainer, behaviour = logs(1.0, 0.5, 3.0, 1.9), torch.zeros(4, dtype=torch.float64)
    parts = [mismatch(trainer[i], behaviour[i], 4) for i in (slice(0, 1), slice(1, 4))]
    combine = {True: max, False: lambda a, b: a + b}
    summed = {
        k: float(min(p[k] for p in parts) if k.endswith("/min") else combine[k.endswith("/max")](*(p[k] for p in parts))) for k in parts[0]
    }
    whole = statistics(trainer, behaviour)
    assert finish(summed) == pytest.approx({k: v for k, v in whole.items() if "/p" not in k})
    assert finish({"policy/loss": 1.0}) == {"policy/loss": 1.0}
