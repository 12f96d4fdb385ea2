"""Losses of reward models by hand, and which value is the score of an answer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.loss_rows import LENGTHS, assert_cut_does_not_matter, rows, run, slope
from reinforge.algorithms.losses.reward_model import (
    REWARD,
    RewardLoss,
    bradley_terry,
    centred,
    logexp,
    margin,
    process,
    regression,
    scaled,
)
from reinforge.algorithms.losses.rows import last, places
from reinforge.core.errors import InputError

W = [1.2, -0.4, 0.5]
L = [0.7, 0.1, -2.0]
M = [0.5, 1.0, 2.0]
SCORE = {
    "gap": [0.5, 0, 1.0, 0, 2.0, 0, 0.1, 0],
    "target": [1.0, -1, 0.5, 2, 0, 0, 3, 1],
    "label": [1, 0, 0, 1, 1, 0, 0.5, 1],
}


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


GOLDEN: dict[str, tuple[Any, tuple[list[float], ...], Any]] = {
    "bradley_terry": (bradley_terry, (W, L), lambda w, l: -math.log(s(w - l))),
    "margin": (margin, (W, L, M), lambda w, l, m: -math.log(s(w - l - m))),
    "scaled": (scaled, (W, L, M), lambda w, l, m: -m * math.log(s(w - l))),
    "logexp": (logexp, (W, L), lambda w, l: math.log(1 + math.exp(l - w))),
    "regression": (regression, (W, M), lambda w, m: (w - m) ** 2),
    "centred": (centred, (W, L), lambda w, l: 0.01 * (w + l) ** 2),
    "process": (
        process,
        (W, [1.0, 0.0, 0.3]),
        lambda w, y: -y * math.log(s(w)) - (1 - y) * math.log(1 - s(w)),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_and_slope(name: str) -> None:
    function, given, formula = GOLDEN[name]
    first = f64(given[0]).requires_grad_()
    rest = [f64(x) for x in given[1:]]
    loss = function(first, *rest)
    torch.testing.assert_close(
        loss, f64([formula(*row) for row in zip(*given, strict=True)]), atol=1e-12, rtol=1e-12
    )
    loss.sum().backward()
    torch.testing.assert_close(
        first.grad, slope(lambda x: function(x, *rest), f64(given[0])), atol=1e-8, rtol=1e-6
    )


def test_process_is_the_two_class_cross_entropy() -> None:
    logits = f64([[0.3, 1.4], [-2.0, 0.5]])
    label = torch.tensor([1, 0])
    want = torch.nn.functional.cross_entropy(logits, label, reduction="none")
    torch.testing.assert_close(process(logits[:, 1] - logits[:, 0], label.double()), want)


def test_scores_far_apart_stay_finite() -> None:
    for function in (bradley_terry, logexp):
        assert function(torch.tensor([-500.0]), torch.tensor([500.0])).tolist() == [1000.0]


# ---- over packs: the stream `policy` plays the values


@pytest.mark.parametrize("name", REWARD)
def test_cutting_the_batch_changes_nothing(name: str) -> None:
    assert_cut_does_not_matter(lambda: RewardLoss(name, centre=0.01), rows(**SCORE), field="values")


def test_the_score_is_the_last_trained_value() -> None:
    samples = rows(**SCORE)
    scores = [float(x.streams["policy"][-1]) for x in samples]
    value, gradients, metrics = run(RewardLoss(centre=0.01), samples, 12, field="values")
    pairs = list(zip(scores[::2], scores[1::2], strict=True))
    assert value == pytest.approx(
        sum(-math.log(s(w - l)) + 0.01 * (w + l) ** 2 for w, l in pairs) / 4, abs=1e-7
    )
    assert metrics["reward/accuracy"] == sum(w > l for w, l in pairs) / 4
    assert metrics["reward/max"] == pytest.approx(max(scores)) and metrics[
        "reward/min"
    ] == pytest.approx(min(scores))
    for i, n in enumerate(LENGTHS):  # only there is a gradient
        assert (gradients[f"r{i}"] != 0).tolist() == [False] * (n - 1) + [True]
    value, _, _ = run(RewardLoss("margin"), samples, 12, field="values")
    assert value == pytest.approx(
        sum(-math.log(s(w - l - m)) for (w, l), m in zip(pairs, (0.5, 1.0, 2.0, 0.1), strict=True))
        / 4,
        abs=1e-7,
    )


def test_regression_and_process_over_packs() -> None:
    samples = rows(**SCORE)
    value, _, _ = run(RewardLoss("regression"), samples, 12, field="values")
    want = (
        sum(
            (float(x.streams["policy"][-1]) - t) ** 2
            for x, t in zip(samples, SCORE["target"], strict=True)
        )
        / 8
    )
    assert value == pytest.approx(want, abs=1e-6)
    value, gradients, metrics = run(RewardLoss("process"), samples, 12, field="values")
    want = 0.0
    right = 0
    for sample, y in zip(samples, SCORE["label"], strict=True):
        for r in sample.streams["policy"][2:].tolist():
            want += -y * math.log(s(r)) - (1 - y) * math.log(1 - s(r))
            right += (r > 0) == (y > 0.5)
    assert value == pytest.approx(want / sum(LENGTHS), abs=1e-6) and metrics[
        "reward/accuracy"
    ] == pytest.approx(right / sum(LENGTHS))
    assert all((g != 0).all() for g in gradients.values())


def test_units_and_what_is_read() -> None:
    assert (
        RewardLoss().unit == 2 and RewardLoss("regression").unit == RewardLoss("process").unit == 1
    )
    assert RewardLoss.reads == {"values_after"}
    with pytest.raises(InputError, match="bradley"):
        RewardLoss("bradly_terry")


def test_rows_helpers() -> None:
    lengths = torch.tensor([2, 0, 3, 1, 0])
    sequence = torch.tensor([0, 0, 2, 2, 2, 3])
    assert last(torch.arange(6.0), lengths).tolist() == [1, 0, 4, 5, 0]
    assert places(sequence, lengths).tolist() == [0, 1, 0, 1, 2, 0]
    assert last(torch.zeros(0), torch.tensor([0, 0])).tolist() == [0, 0]
