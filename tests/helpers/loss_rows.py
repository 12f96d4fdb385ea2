"""Rows, streams and micro-batches for tests of losses over pairs and rows, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from reinforge.backends.microbatch import combine
from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.metrics import LossMetrics
from reinforge.core.sample import Sample

LENGTHS = [3, 5, 4, 1, 2, 2, 6, 3]  # trained tokens of four pairs (or eight rows)


def rows(
    lengths: Sequence[int] = LENGTHS, *, seed: int = 0, **constants: Sequence[float]
) -> list[Sample]:
    """Rows of 2 prompt tokens and `lengths` trained ones.

    Streams: `policy` (the leaf), `old` (equal to it), `reference`, constants.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i, n in enumerate(lengths):
        policy = -torch.rand(n + 2, generator=generator) * 2
        streams = {
            "policy": policy,
            "old": policy.clone(),
            "reference": policy + torch.randn(n + 2, generator=generator) * 0.7,
        }
        streams |= {
            name: torch.full((n + 2,), float(values[i])) for name, values in constants.items()
        }
        samples.append(
            Sample.from_tokens(
                f"r{i}", [1, 2, *([3] * n)], [False] * 2 + [True] * n, streams=streams
            )
        )
    return samples


def tokens_of(batch: Batch, leaf: Tensor, field: str = "logprobs") -> TrainedTokens:
    streams = {name: value.double() for name, value in batch.streams.items()}
    return TrainedTokens(
        **{
            "logprobs": leaf,
            "entropy": None,
            "sequence": batch.sequence,
            "lengths": batch.trained_lengths(),
            "episode_tokens": batch.trained_lengths()[batch.sequence],
            "streams": streams,
            field: leaf,
        }
    )


def run(
    loss: Any,
    samples: Sequence[Sample],
    budget: int,
    *,
    field: str = "logprobs",
    companions: Sequence[Batch] = (),
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """The loss of one optimizer batch cut into packs: its value, the gradient of every row's leaf
    by uid, the metrics.
    """
    batches = pack(samples, budget, unit=loss.unit)
    totals = Totals.of(batches)
    if hasattr(loss, "prepare"):
        loss.prepare(batches, companions)
    value = 0.0
    measured: list[LossMetrics] = []
    gradients = {}
    for batch in batches:
        leaf = batch.streams["policy"].double().requires_grad_()
        part, found = loss(tokens_of(batch, leaf, field), totals)
        part.backward()
        value += part.item()
        measured.append(found)
        assert leaf.grad is not None
        gradients |= dict(
            zip(
                (s.uid for s in batch.samples),
                leaf.grad.split(batch.trained_lengths().tolist()),
                strict=True,
            )
        )
    return value, gradients, dict(combine(measured))


def assert_cut_does_not_matter(
    make: Callable[[], Any],
    samples: Sequence[Sample],
    *,
    field: str = "logprobs",
    companions: Sequence[Batch] = (),
) -> None:
    whole, gradients, metrics = run(make(), samples, 10**6, field=field, companions=companions)
    assert any(float(g.abs().max()) > 1e-4 for g in gradients.values() if len(g))
    for budget in (1, 12, 20):
        value, parts, found = run(make(), samples, budget, field=field, companions=companions)
        assert abs(value - whole) < 1e-12, budget
        assert found.keys() == metrics.keys() and all(
            abs(found[k] - metrics[k]) < 1e-9 for k in metrics
        ), (budget, found, metrics)
        for uid, gradient in gradients.items():
            torch.testing.assert_close(parts[uid], gradient, atol=1e-12, rtol=1e-9)


def slope(function: Callable[[Tensor], Tensor], x: Tensor, h: float = 1e-6) -> Tensor:
    """Central finite differences of a sum of outputs."""
    out = torch.zeros_like(x)
    for i in range(x.numel()):
        step = torch.zeros_like(x)
        step.view(-1)[i] = h
        out.view(-1)[i] = (function(x + step).sum() - function(x - step).sum()) / (2 * h)
    return out
