"""The loss of a model with several heads, against the formula written with torch by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers.loss_rows import LENGTHS, rows, tokens_of
from reinforge.algorithms.build import build
from reinforge.algorithms.losses.attributes import AttributeLoss, target
from reinforge.backends.microbatch import combine
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample

NONE = math.nan
NAMES = ("help", "length", "rare")
# of eight answers; nobody of the last three was given the first, one alone was given the last
GIVEN = {
    "help": [4.0, 3.0, 0.0, 1.0, 2.0, NONE, NONE, NONE],
    "length": [0.0, NONE, 4.0, 3.0, 2.0, 1.0, 4.0, 0.5],
    "rare": [NONE, NONE, NONE, 2.0, NONE, NONE, NONE, NONE],
}


def samples_of(given: dict[str, list[float]]) -> list[Sample]:
    return rows(**{target(name): values for name, values in given.items()})


def heads(samples: list[Sample], seed: int = 3) -> dict[str, Tensor]:
    """By uid: [n, A] what the heads say at the trained tokens of an answer."""
    generator = torch.Generator().manual_seed(seed)
    return {
        s.uid: torch.randn(s.n_trained, len(NAMES), generator=generator, dtype=torch.float64)
        for s in samples
    }


def over_packs(
    samples: list[Sample], said: dict[str, Tensor], budget: int
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """The loss of one optimizer batch in packs, the gradients by uid, the metrics."""
    loss = AttributeLoss(NAMES)
    batches = pack(samples, budget)
    totals = Totals.of(batches)
    loss.prepare(batches)
    value = 0.0
    gradients = {}
    parts = []
    for batch in batches:
        leaf = torch.cat([said[s.uid] for s in batch.samples]).requires_grad_()
        part, metrics = loss(tokens_of(batch, leaf, "values"), totals)
        part.backward()
        value += part.item()
        parts.append(metrics)
        assert leaf.grad is not None
        ends = leaf.grad.split(batch.trained_lengths().tolist())
        gradients |= dict(zip((s.uid for s in batch.samples), ends, strict=True))
    return value, gradients, dict(combine(parts))


def test_it_is_the_masked_mean_square_of_all_that_was_given() -> None:
    samples = samples_of(GIVEN)
    said = heads(samples)
    scores = torch.stack([said[s.uid][-1] for s in samples]).requires_grad_()
    targets = torch.tensor([GIVEN[name] for name in NAMES], dtype=torch.float64).T
    given = ~targets.isnan()
    want = (scores - targets)[given].square().sum() / given.sum()
    want.backward()
    assert scores.grad is not None
    for budget in (1, 12, 20, 10**6):
        value, gradients, metrics = over_packs(samples, said, budget)
        assert value == pytest.approx(want.item(), abs=1e-12), budget
        for i, (sample, n) in enumerate(zip(samples, LENGTHS, strict=True)):
            found = gradients[sample.uid]
            torch.testing.assert_close(found[-1], scores.grad[i], atol=1e-12, rtol=1e-9)
            assert not found[: n - 1].any()  # the score is read at the last token
        for a, name in enumerate(NAMES):
            own = given[:, a]
            errors = (scores[own, a] - targets[own, a]).detach()
            assert metrics[f"reward/loss/{name}"] == pytest.approx(errors.square().mean().item())
            assert metrics[f"reward/mean/{name}"] == pytest.approx(
                scores[own, a].detach().mean().item()
            )
        assert metrics["reward/loss"] == pytest.approx(want.item())
    assert not scores.grad[~given].any()


def test_what_nobody_was_given_has_no_metric_and_no_gradient() -> None:
    samples = samples_of({**GIVEN, "rare": [NONE] * 8})
    _, gradients, metrics = over_packs(samples, heads(samples), 12)
    assert "reward/loss/length" in metrics and "reward/loss/rare" not in metrics
    assert not any(gradient[:, 2].any() for gradient in gradients.values())


def test_one_attribute_is_plain_regression() -> None:
    """A model with one head gives [M] values, and the loss is that of `regression`."""
    wanted = [1.0, -1, 0.5, 2, 0, 0, 3, 1]
    samples = rows(**{target("help"): wanted, "target": wanted})
    found = []
    for loss in (build("regression", attributes=["help"]).loss, build("regression").loss):
        batches = pack(samples, 12)
        if isinstance(loss, AttributeLoss):
            loss.prepare(batches)
        parts = [
            loss(tokens_of(b, b.streams["policy"].double(), "values"), Totals.of(batches))[0]
            for b in batches
        ]
        found.append(sum(float(part) for part in parts))
    assert found[0] == pytest.approx(found[1], abs=1e-12)


def test_attributes_have_no_settings() -> None:
    with pytest.raises(InputError, match="no setting 'centre'"):
        build("regression", attributes=["help"], settings={"centre": 0.1})
