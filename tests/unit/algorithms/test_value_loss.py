"""The value loss: numbers by hand, gradients by finite differences, and sums that add up over
micro-batches.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reinforge.algorithms.losses.policy import PolicyLoss
from reinforge.algorithms.losses.value import PolicyAndValueLoss, ValueLoss, finish
from reinforge.algorithms.parts.reduce import token_mean
from reinforge.algorithms.parts.surrogates import ppo_clip
from reinforge.backends.microbatch import combine
from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Totals
from reinforge.core.errors import InputError
from reinforge.core.metrics import Metric

T = torch.tensor


def tokens(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, **more: torch.Tensor
) -> TrainedTokens:
    n = len(values)
    return TrainedTokens(
        torch.zeros(n, dtype=values.dtype),
        None,
        torch.zeros(n, dtype=torch.int64),
        T([n]),
        torch.full((n,), n),
        {"values": old, "returns": returns, **more},
        values,
    )


def totals(n: int) -> Totals:
    return Totals(n, 1, n, {"e": n})


def test_golden_numbers() -> None:
    """Values 1, 2, 0, 0.1 from old values 0, 2.1, 0, 0 towards 2, 0, 0.5, -1, eps 0.2:
    errors (v - R)^2 = 1, 4, 0.25, 1.21; clipped values 0.2, 2, 0, 0.1 give 3.24, 4, 0.25, 1.21; so
    L = 1/2 (3.24 + 4 + 0.25 + 1.21) / 4.
    """
    given = tokens(T([1.0, 2.0, 0.0, 0.1]), T([0.0, 2.1, 0.0, 0.0]), T([2.0, 0.0, 0.5, -1.0]))
    loss, metrics = ValueLoss(0.2)(given, totals(4))
    assert float(loss) == pytest.approx(0.5 * 8.70 / 4, rel=1e-6) and float(
        metrics["critic/loss"]
    ) == float(loss)
    assert float(metrics["critic/clip_fraction"]) == 0.25
    assert float(metrics["critic/value"]) == pytest.approx(3.1 / 4) and float(
        metrics["critic/return"]
    ) == pytest.approx(1.5 / 4)
    plain, metrics = ValueLoss(None)(given, totals(4))
    assert (
        float(plain) == pytest.approx(0.5 * 6.46 / 4, rel=1e-6)
        and float(metrics["critic/clip_fraction"]) == 0
    )
    # the batch's tokens, not the micro-batch's
    assert float(ValueLoss(None)(given, totals(8))[0]) == pytest.approx(float(plain) / 2)


@pytest.mark.parametrize("clip", [0.2, None])
def test_gradient_is_the_finite_difference(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    values = (
        old + 0.5 * torch.randn(40, generator=generator, dtype=torch.float64)
    ).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: ValueLoss(clip)(tokens(v, old, returns), totals(40))[0],
        values,
        eps=1e-7,
        atol=1e-7,
    )


def test_no_gradient_where_the_value_has_moved_far_enough() -> None:
    """Old value 0, target 1, eps 0.2: a value of 0.5 is beyond the clip on the way to the target,
    so its error is that of 0.2, a constant; a value of 0.1 is inside, and one of -0.5 on the wrong
    side is pulled back.
    """
    values = T([0.5, 0.1, -0.5], requires_grad=True)
    ValueLoss(0.2)(tokens(values, torch.zeros(3), torch.ones(3)), totals(3))[0].backward()
    assert values.grad is not None and values.grad.tolist() == pytest.approx(
        [0.0, -0.9 / 3, -1.5 / 3]
    )


@pytest.mark.parametrize("offset", [0.0, 1000.0, -30.0])
def test_explained_variance_is_that_of_float64(offset: float) -> None:
    """Over micro-batches of unequal size, and for returns that are far from 0 compared with their
    spread.
    """
    rng = np.random.default_rng(1)
    returns = (rng.normal(size=500) + offset).astype(np.float32)
    values = (returns + 0.7 * rng.normal(size=500) + 0.2).astype(np.float32)
    parts = []
    for part in np.split(np.arange(500), [3, 40, 400]):
        given = tokens(
            torch.from_numpy(values[part]), torch.zeros(len(part)), torch.from_numpy(returns[part])
        )
        parts.append(ValueLoss(None)(given, totals(500))[1])
    done = finish(combine(parts))
    r = returns.astype(np.float64)
    v = values.astype(np.float64)
    assert done["critic/explained_variance"] == pytest.approx(
        1 - np.var(r - v) / np.var(r), abs=1e-8
    )
    assert done["critic/loss"] == pytest.approx(0.5 * np.mean((r - v) ** 2), rel=1e-5)
    assert not any("moments" in name for name in done)


def test_explained_variance_of_special_critics() -> None:
    returns = T([1.0, 2.0, 3.0, 4.0])

    def of(values: torch.Tensor, target: torch.Tensor = returns) -> dict[str, float]:
        return finish(combine([ValueLoss()(tokens(values, torch.zeros(4), target), totals(4))[1]]))

    assert of(returns.clone())["critic/explained_variance"] == 1.0
    # off by a constant, which the loss shows
    assert of(returns + 5)["critic/explained_variance"] == pytest.approx(1.0)
    assert of(torch.zeros(4))["critic/explained_variance"] == pytest.approx(0.0)
    assert of(-returns)["critic/explained_variance"] == pytest.approx(-3.0)
    # nothing to explain
    assert "critic/explained_variance" not in of(torch.zeros(4), torch.full((4,), 0.1))
    assert finish({"policy/loss": Metric(1.0)}) == {"policy/loss": 1.0}


def test_a_shared_loss_is_the_sum() -> None:
    policy = PolicyLoss(ppo_clip, token_mean)
    value = ValueLoss(0.2)
    both = PolicyAndValueLoss(policy, value, 0.5)
    given = tokens(T([1.0, 2.0]), T([0.0, 2.1]), T([2.0, 0.0]), advantages=T([1.0, -2.0]))
    loss, metrics = both(given, totals(2))
    assert float(loss) == pytest.approx(
        float(policy(given, totals(2))[0]) + 0.5 * float(value(given, totals(2))[0])
    )
    assert (
        {"policy/loss", "critic/loss"} <= metrics.keys()
        and both.needs >= {"values"}
        and both.reads == {"logprobs", "values"}
    )


def test_an_advantage_without_returns_is_told() -> None:
    given = tokens(T([1.0]), T([0.0]), T([1.0]))
    with pytest.raises(InputError, match="no returns"):
        ValueLoss()(
            TrainedTokens(
                given.logprobs,
                None,
                given.sequence,
                given.lengths,
                given.episode_tokens,
                {"values": T([0.0])},
                given.values,
            ),
            totals(1),
        )
