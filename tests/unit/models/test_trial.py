"""Kernels are tried in the middle of a pass: gradients of their own inside of a checkpointed layer,
which counts what is saved for its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

from reinforge.models import convolution, delta_rule
from reinforge.models.segment_table import SegmentTable
from reinforge.models.trial import on_its_own

CPU = torch.device("cpu")


def gradient(trial: Callable[[], object], again: bool) -> Tensor:
    """Of a weight, through a layer whose first forward makes a trial; `again`: checkpointed."""
    waiting = [trial]
    weight = torch.eye(4).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        x = torch.tanh(x @ weight)
        if waiting:
            waiting.pop()()
        return torch.tanh(x @ weight)

    x = torch.arange(8.0).view(2, 4) / 8
    out = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
    assert not waiting
    [found] = torch.autograd.grad(out.sum(), weight)
    return found


def some_gradients() -> Tensor:
    x = torch.ones(3, requires_grad=True)
    return torch.autograd.grad((x * x.exp()).sum(), x)[0]


def test_a_trial_leaves_no_trace() -> None:
    def apart() -> None:
        with on_its_own(CPU):
            some_gradients()

    assert torch.equal(gradient(apart, True), gradient(apart, False))
    with pytest.raises(CheckpointError):  # what it is for
        gradient(some_gradients, True)


def test_trials_of_kernels_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run on a GPU; the plain rules stand in for them."""

    def chunked(parts: list[Tensor], table: SegmentTable, state: None, normed: bool):  # type: ignore[no-untyped-def]
        first, state = delta_rule.token_by_token([x[None, :70] for x in parts], None, normed)  # type: ignore[assignment]
        second, _ = delta_rule.token_by_token([x[None, 70:] for x in parts], state, normed)
        return torch.cat([first[0], second[0]]), None

    class Plain:
        @staticmethod
        def apply(table: convolution.TapRows, silu: bool, x: Tensor, weight: Tensor, bias: None):  # type: ignore[no-untyped-def]
            return torch.nn.functional.silu(table.by_torch(x, weight, bias))

    monkeypatch.setattr(delta_rule, "chunked", chunked)
    monkeypatch.setattr(convolution, "_Convolution", Plain)
    trials = (
        lambda: delta_rule.distance(16, 16, torch.float32, True, CPU),
        lambda: convolution.distance(4, torch.float32, CPU),
    )
    for trial in trials:
        assert trial() < 1e-5
        assert torch.equal(gradient(trial, True), gradient(trial, False))
