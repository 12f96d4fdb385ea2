from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.algorithms.parts.surrogates import (
    SURROGATES,
    cispo,
    dppo_kl,
    dppo_tv,
    ppo_clip,
    reinforce,
    sapo,
)

LN = math.log
INF = float("inf")


def one(
    ratio_log: float, advantage: float, dtype=torch.float64, **clip
) -> tuple[float, float, dict[str, float]]:
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
def test_clip_table(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    value, slope, metrics = one(LN(ratio), advantage, low=0.2, high=0.28)
    assert (value, slope) == pytest.approx((loss, gradient), abs=1e-12)
    assert metrics["clip_fraction"] == clipped and metrics["ratio"] == pytest.approx(ratio)
    assert metrics["clip_low"] + metrics["clip_high"] == clipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0, INF, -INF])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_ratios_of_zero_and_infinity_stay_finite(
    dtype: torch.dtype, log_ratio: float, advantage: float, dual: float | None
) -> None:
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
    [
        (5.0, -2.0, 6.0, 0.0),
        (2.5, -2.0, 5.0, 5.0),
        (0.5, -2.0, 1.6, 0.0),
        (5.0, 2.0, -2.4, 0.0),
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_dual_clip_only_for_negative_advantages(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    value, slope, metrics = one(LN(ratio), advantage, low=0.2, high=0.2, dual=3.0)
    assert (value, slope) == pytest.approx((loss, gradient), abs=1e-12)
    assert metrics["clip_dual"] == (ratio > 3 and advantage < 0)
    assert metrics["clip_fraction"] == (gradient == 0.0 and advantage != 0)


@settings(max_examples=100, deadline=None)
@given(
    st.floats(-3, 3),
    st.floats(-5, 5),
    st.floats(0.01, 0.9),
    st.floats(0.01, 2),
    st.one_of(st.none(), st.floats(1.1, 5)),
)
def test_clip_against_plain_python(
    log_ratio: float, a: float, low: float, high: float, dual: float | None
) -> None:
    value, _, _ = one(log_ratio, a, low=low, high=high, dual=dual)
    ratio = math.exp((-1.0 + log_ratio) - -1.0)
    expected = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    if dual is not None and a < 0:
        expected = min(expected, -dual * a)
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_gradients_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(64, generator=generator, dtype=torch.float64)
    logprobs = (
        old + 0.4 * torch.randn(64, generator=generator, dtype=torch.float64)
    ).requires_grad_()
    advantages = torch.randn(64, generator=generator, dtype=torch.float64)
    for function in (partial(ppo_clip, low=0.2, high=0.28), partial(ppo_clip, dual=1.3), reinforce):
        assert torch.autograd.gradcheck(lambda x, f=function: f(x, old, advantages)[0], logprobs)


def test_on_policy_ppo_and_reinforce_have_the_same_gradient() -> None:
    logprobs = torch.tensor([-0.5, -2.0, -0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    clip = torch.autograd.grad(ppo_clip(logprobs, logprobs.detach(), advantages)[0].sum(), logprobs)
    _ = None
    plain = torch.autograd.grad(
        reinforce(logprobs, logprobs.detach(), advantages)[0].sum(), logprobs
    )
    assert clip[0].tolist() == plain[0].tolist() == [-1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [  # clip at 0.8 and 1.28, delta 4: only a token of A < 0 that became much more likely changes
        (5.0, -2.0, 8.0, 0.0, "clip_delta"),
        (3.9, -2.0, 7.8, 7.8, None),
        (5.0, 2.0, -2.56, 0.0, "clip_high"),
        (0.5, -2.0, 1.6, 0.0, "clip_low"),
        (0.5, 2.0, -1.0, -1.0, None),
        (1.0, -2.0, 2.0, 2.0, None),
        (5.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_two_sided_clip_table(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: str | None
) -> None:
    value, slope, metrics = one(LN(ratio), advantage, low=0.2, high=0.28, delta=4.0)
    assert (value, slope) == pytest.approx((loss, gradient), abs=1e-12)
    names = ("clip_low", "clip_high", "clip_delta")
    assert [n for n in names if metrics[n]] == ([clipped] if clipped else []) and metrics[
        "clip_fraction"
    ] == (clipped is not None)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-3, 3), st.floats(-5, 5), st.floats(0.01, 0.9), st.floats(0.01, 2), st.floats(1.05, 5)
)
def test_two_sided_clip_against_plain_python(
    log_ratio: float, a: float, low: float, high: float, delta: float
) -> None:
    value, _, _ = one(log_ratio, a, low=low, high=high, delta=delta)
    ratio = math.exp((-1.0 + log_ratio) - -1.0)
    assert value == pytest.approx(
        -min(min(ratio, delta) * a, min(max(ratio, 1 - low), 1 + high) * a), rel=1e-12, abs=1e-12
    )
    if delta > 1 + high:
        assert value == pytest.approx(
            one(log_ratio, a, low=low, high=high, dual=delta)[0], rel=1e-12, abs=1e-12
        )


def call(
    function, logprobs: list[float], old: list[float], advantages: list[float], **settings
) -> tuple[list[float], list[float], dict]:
    """Losses, d sum(loss) / d logp and metrics."""
    x = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    fixed = [torch.tensor(v, dtype=torch.float64) for v in (old, advantages)]
    loss, metrics = function(x, *fixed, torch.arange(len(logprobs)), **settings)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    return (
        loss.tolist(),
        gradient.tolist(),
        {name: value.tolist() for name, value in metrics.items()},
    )


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    """Ratios 1/2, 1, 2, 8 at cap 3: weights 1/2, 1, 2, 3, whatever the sign of A.

    The weight itself has no gradient.
    """
    weights = [0.5, 1.0, 2.0, 3.0]
    old = [-3.0, -2.5, -3.0, -4.0]
    a = [1.0, -2.0, 3.0, -1.5]
    logprobs = [o + LN(r) for o, r in zip(old, [0.5, 1.0, 2.0, 8.0], strict=True)]
    loss, gradient, metrics = call(cispo, logprobs, old, a, cap=3.0)
    assert loss == pytest.approx(
        [-w * x * p for w, x, p in zip(weights, a, logprobs, strict=True)], abs=1e-12
    )
    assert gradient == pytest.approx([-w * x for w, x in zip(weights, a, strict=True)], abs=1e-12)
    assert metrics["clip_fraction"] == [0, 0, 0, 1] and metrics["ratio"] == pytest.approx(
        [0.5, 1.0, 2.0, 8.0]
    )


@pytest.mark.parametrize(
    ("ratio", "a", "loss", "gradient"),
    # p = 1/2 on-policy, sigmoid(1) = 0.7310585786, sigmoid(-0.525) = 0.3716838117; d loss / d logp
    # = -4 p (1 - p) rho A
    [
        (1.0, 2.0, -4.0, -2.0),
        (1.0, -2.0, 8 / 2.1, 2.0),
        (2.0, 1.0, -4 * 0.7310585786300049, -4 * 0.19661193324148185 * 2.0),
        (
            0.5,
            -1.0,
            4 / 1.05 / (1 + math.exp(0.525)),
            2 / (1 + math.exp(0.525)) / (1 + math.exp(-0.525)),
        ),
        (2.0, 0.0, 0.0, 0.0),
    ],
)
def test_sapo_golden(ratio: float, a: float, loss: float, gradient: float) -> None:
    value, slope, metrics = call(sapo, [LN(ratio) - 1], [-1.0], [a])
    assert (value[0], slope[0]) == pytest.approx((loss, gradient), abs=1e-9)
    if ratio == 1:
        assert metrics["gate"] == pytest.approx([1.0])


def test_sapo_gate_closes_far_away() -> None:
    """Where PPO's gradient is cut to 0 at once, SAPO's falls off: at rho = e^3 the sigmoid is
    saturated.
    """
    _, gradient, _ = call(sapo, [2.0 - 1, 2.5 - 1, 3.0 - 1], [-1.0] * 3, [1.0] * 3)
    assert -0.1 < gradient[0] < gradient[1] < gradient[2] < 0 and abs(gradient[2]) < 1e-6


DPPO = [  # mu, pi, A, inside by TV 0.15, inside by KL 0.05
    # a ratio of 100: PPO clips it, the distribution has hardly moved
    (1e-5, 1e-3, 1.0, True, True),
    # a ratio of 0.81: PPO does not clip it, a fifth of the mass has moved
    (0.99, 0.80, -1.0, False, False),
    (0.99, 0.80, 1.0, True, True),  # ... but A pulls it back
    (0.30, 0.50, 1.0, False, False),
    (0.30, 0.50, -1.0, True, True),
    (0.30, 0.44, 1.0, True, True),  # D = 0.14; KL 0.3 ln(0.3/0.44) + 0.7 ln(0.7/0.56) = 0.0413
    (0.60, 0.48, -1.0, True, True),  # D = 0.12; KL 0.0289
    (0.95, 0.88, -1.0, True, True),  # D = 0.07; KL 0.0289
    (0.999, 0.90, -1.0, True, False),  # D = 0.099; KL 0.0997
    (0.50, 0.50, 1.0, True, True),
]


@pytest.mark.parametrize(("function", "column"), [(dppo_tv, 3), (dppo_kl, 4)])
def test_dppo_masks_by_divergence(function, column: int) -> None:
    old = [LN(row[0]) for row in DPPO]
    logprobs = [LN(row[1]) for row in DPPO]
    a = [row[2] for row in DPPO]
    loss, gradient, metrics = call(function, logprobs, old, a)
    for t, row in enumerate(DPPO):
        mu, pi, advantage = row[:3]
        divergence = (
            abs(pi - mu) if column == 3 else mu * LN(mu / pi) + (1 - mu) * LN((1 - mu) / (1 - pi))
        )
        outward = (advantage > 0 and pi > mu) or (advantage < 0 and pi < mu)
        inside = not (outward and divergence > (0.15 if column == 3 else 0.05))
        assert inside == row[column], row
        assert loss[t] == pytest.approx(-advantage * pi / mu * inside, rel=1e-12)
        # rho has the gradient rho
        assert gradient[t] == pytest.approx(-advantage * pi / mu * inside, rel=1e-12)
        assert (
            metrics["clip_fraction"][t]
            == (not inside)
            == metrics["clip_low"][t] + metrics["clip_high"][t]
        )


def test_dppo_truncates_the_ratio_and_keeps_the_gradient() -> None:
    loss, gradient, _ = call(dppo_tv, [LN(1e-3)], [LN(1e-5)], [2.0], truncate=20.0)
    assert loss == pytest.approx([-40.0]) and gradient == pytest.approx([-40.0])


def test_dppo_kl_of_sure_tokens() -> None:
    """log-probs of exactly 0 (float32 rounds there): 0 log 0 is 0, and nothing is masked or not a
    number.
    """
    x = torch.tensor([0.0, -1e-7, 0.0], requires_grad=True)
    loss, metrics = dppo_kl(x, torch.tensor([0.0, 0.0, -1e-7]), torch.tensor([1.0, -1.0, 1.0]))
    assert loss.tolist() == pytest.approx([-1.0, 1.0, -1.0]) and metrics["clip_fraction"].sum() == 0


EXTREME = [n for n in SURROGATES if n != "reinforce"]


@pytest.mark.parametrize("name", EXTREME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(name: str, dtype: torch.dtype) -> None:
    old = torch.tensor([-1000.0, -1e-3, -1.0, -200.0, -0.5, -1.0], dtype=dtype)
    logprobs = torch.tensor(
        [-1e-3, -1000.0, -1.0, -0.1, -300.0, -1.0], dtype=dtype, requires_grad=True
    )
    for sign in (1.0, -1.0, 0.0):
        advantages = torch.full((6,), sign, dtype=dtype)
        for sequence in (torch.arange(6), torch.tensor([0, 0, 0, 1, 1, 2])):
            loss, metrics = SURROGATES[name](logprobs, old, advantages, sequence)
            (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
            assert (
                loss.isfinite().all()
                and gradient.isfinite().all()
                and all(m.isfinite().all() for m in metrics.values())
            )
            assert sign != 0 or (loss.abs().sum() == 0 and gradient.abs().sum() == 0)


@pytest.mark.parametrize("name", list(SURROGATES))
def test_on_policy_every_surrogate_has_the_gradient_of_reinforce(name: str) -> None:
    """Factor 1 for all of them: sums over a sequence of gspo, gmpo and sequence_clip put -A on each
    of its tokens.
    """
    logprobs = torch.tensor([-0.5, -2.0, -0.1, -3.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.5, 1.5, 1.5, -2.0], dtype=torch.float64)
    loss, metrics = SURROGATES[name](
        logprobs, logprobs.detach(), advantages, torch.tensor([0, 0, 0, 1])
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-1.5, -1.5, -1.5, 2.0], abs=1e-12)
    assert (
        metrics["ratio"].tolist() == pytest.approx([1.0] * 4) and not metrics["ratio"].requires_grad
    )


@pytest.mark.parametrize("name", list(SURROGATES))
def test_no_tokens(name: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss, metrics = SURROGATES[name](
        empty, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    )
    loss.sum().backward()
    assert (
        loss.shape == (0,)
        and empty.grad is not None
        and all(m.shape == (0,) for m in metrics.values())
    )
