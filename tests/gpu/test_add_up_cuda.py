"""Gradients that are added up by one kernel: the bits of adding each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from reinforge.backends import gradient_sums
from reinforge.backends.gradient_sums import GradientSums
from reinforge.backends.optimizer import MasterOptimizer
from reinforge.config.optimizer import OptimizerConfig

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(5,), (64, 33), (4096,), (3, 4097), (1,), (128, 96)]


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_have_the_bits_of_adding_at_once(dtype: torch.dtype) -> None:
    totals = [normal(shape, i) for i, shape in enumerate(SIZES)]
    want = [total.clone() for total in totals]
    sums = GradientSums(at_once=True)
    for round_ in range(3):
        for i, shape in enumerate(SIZES):
            part = normal(shape, 100 * round_ + i).to(dtype)
            want[i].add_(part)
            sums.add(totals[i], part)
    sums.settle()
    assert all(torch.equal(a, b) for a, b in zip(totals, want, strict=True))


def test_slices_of_one_gradient_and_numbers_that_lie_badly() -> None:
    """Rows of a joint gradient; one that does not begin where loads are quick; a transposed one."""
    joint = normal((6, 16), 1).to(torch.bfloat16)
    parts = [joint[:2], joint[2:], normal((33,), 2).to(torch.bfloat16)[1:], joint.t()]
    totals = [normal(tuple(part.shape), 9) for part in parts]
    want = [total + part for total, part in zip(totals, parts, strict=True)]
    sums = GradientSums(at_once=True)
    for total, part in zip(totals, parts, strict=True):
        sums.add(total, part)
    sums.settle()
    assert all(torch.equal(a, b) for a, b in zip(totals, want, strict=True))


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "MOST_WAITING", 100)
    sums = GradientSums(at_once=True)
    first, second = torch.zeros(2, 40, device=DEVICE)
    sums.add(first, torch.ones(40, dtype=torch.bfloat16, device=DEVICE))
    assert not first.any()
    sums.add(second, torch.ones(40, dtype=torch.bfloat16, device=DEVICE))
    assert first.eq(1).all() and second.eq(1).all()


def test_an_optimizer_sees_all_that_was_added() -> None:
    """Three backward passes, norm, update: as with a sum for every gradient."""

    def trained(at_once: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).to(DEVICE, torch.bfloat16)
        optimizer = MasterOptimizer(model, OptimizerConfig())
        optimizer.adding = GradientSums(at_once=at_once)
        for step in range(2):
            for micro in range(3):
                model(
                    normal((4, 32), 10 * step + micro).to(torch.bfloat16)
                ).square().sum().backward()
            optimizer.step(1e-2, 0.5 / float(optimizer.gradient_norm()))
            optimizer.zero()
        return list(optimizer.masters.values())

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_what_was_given_up_is_not_added() -> None:
    sums = GradientSums(at_once=True)
    total = torch.zeros(8, device=DEVICE)
    sums.add(total, torch.ones(8, dtype=torch.bfloat16, device=DEVICE))
    sums.forget()
    sums.settle()
    assert not total.any()


def test_an_optimizer_forgets_what_waits() -> None:
    """A pass that was given up half way leaves nothing to the next, and holds no memory."""
    model = nn.Linear(32, 16, bias=False).to(DEVICE, torch.bfloat16)
    optimizer = MasterOptimizer(model, OptimizerConfig())
    optimizer.adding = GradientSums(at_once=True)

    def passes(*seeds: int) -> None:
        for seed in seeds:
            model(normal((4, 32), seed).to(torch.bfloat16)).sum().backward()

    passes(1, 2)
    want = optimizer.gradients()[0].clone()
    passes(3)
    assert optimizer.adding._parts
    optimizer.zero()
    assert not optimizer.adding._parts and not optimizer.gradients()
    passes(1, 2)
    assert torch.equal(optimizer.gradients()[0], want)
