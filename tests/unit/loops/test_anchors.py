"""Digests of a step see every bit of a small model and of every sample."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch

from helpers.toys import make_model, make_samples, train_config
from reinforge.backends.local import LocalBackend
from reinforge.core.backend import Backend
from reinforge.core.report import StepReport
from reinforge.core.sample import Sample
from reinforge.loops.anchors import (
    SPACED,
    samples_digests,
    to_host,
    update_digest,
    weights_digest,
)


def test_one_bit_of_any_weight_is_seen() -> None:
    backend = LocalBackend(make_model(), train_config(), total_steps=1)
    before = weights_digest(backend)
    for parameter in backend.model.module.parameters():
        assert parameter.numel() <= SPACED, "all of a small model is hashed"
        flat = parameter.data.view(-1)
        kept = float(flat[-1])
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(math.inf))
        assert weights_digest(backend) != before
        flat[-1] = kept
        assert weights_digest(backend) == before


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_on_their_way_to_the_host_stay_what_they_are(device: str) -> None:
    """Of one kind they go together, of several one by one: the same values in the same order."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    wide = [torch.arange(7.0), torch.tensor([]), torch.arange(3.0) + 0.5]
    for values in (wide, [*wide, torch.arange(4)]):
        found = to_host([x.to(device) for x in values])
        assert all(torch.equal(a, b) and not a.is_cuda for a, b in zip(found, values, strict=True))


def test_weights_of_other_processes_are_not_gathered() -> None:
    """A backend on ranks that trains on given rows has no whole copy to ask for."""

    class OnRanks:
        devices = 1

        def weights(self) -> Any:
            raise AssertionError("nobody asked for them")

    assert weights_digest(cast(Backend, OnRanks())) is None


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (0, {"tokens": 1}),
        (1, {"logprobs": 1e-7}),
        (2, {"reward": 0.25}),
    ],
)
def test_a_digest_says_what_of_a_sample_differs(place: int, change: dict[str, Any]) -> None:
    samples = make_samples()
    [(name, value)] = change.items()
    old = getattr(samples[1], name)
    if isinstance(old, torch.Tensor):
        value = old.index_add(0, torch.tensor([len(old) - 1]), old.new_tensor([value]))
    other = [samples[0], samples[1].with_(**{name: value}), *samples[2:]]
    ours, theirs = (
        [one.split() for group in samples_digests(side).values() for one in group]
        for side in (samples, other)
    )
    apart = [
        (i, j)
        for i, (one, another) in enumerate(zip(ours, theirs, strict=True))
        for j in range(3)
        if one[j] != another[j]
    ]
    assert apart == [(1, place)]


def test_the_order_and_every_bit_of_gradient_norms() -> None:
    reports = [StepReport(1.0, 0.1), StepReport(2.0, 0.1)]
    assert update_digest(reports) == update_digest(list(reports))
    assert update_digest(reports) != update_digest(reports[::-1])
    nearly = StepReport(math.nextafter(1.0, 2.0), 0.1)
    assert update_digest([nearly, reports[1]]) != update_digest(reports)


def test_digests_are_those_of_earlier_versions() -> None:
    """What old runs wrote down can be compared with new ones: the expected values are of the
    version that hashed the bytes of torch's tensors.
    """
    ids = [3, 1, 4, 1, 5]
    made = Sample(
        uid="a#0",
        group="a",
        episode="a#0",
        tokens=torch.tensor(ids),
        trained=torch.tensor([False, False, True, True, True]),
        logprobs=torch.tensor([0, 0, -0.5, -0.25, -1.5]),
        versions=torch.tensor([-1, -1, 7, 7, 7], dtype=torch.int32),
        rewards={"x": 0.5, "y": None},
        reward=0.5,
        token_rewards=torch.zeros(5),
    )
    assert samples_digests([made]) == {"a": ["3e90fb81 71dfc194 743109f3"]}
