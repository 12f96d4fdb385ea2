"""AdamW with masters against the formula, and the learning-rate schedule by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from reinforge.backends.optimizer import MasterOptimizer, learning_rate
from reinforge.config.optimizer import OptimizerConfig
from reinforge.config.train import ScheduleConfig


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        ({"kind": "constant"}, [1, 1, 1, 1, 1, 1]),
        ({"kind": "constant", "warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"kind": "linear"}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ({"kind": "linear", "warmup": 2, "floor": 0.5}, [0.5, 1, 1, 0.875, 0.75, 0.625]),
        (
            {"kind": "cosine", "warmup": 2},
            [0.5, 1, 1, *(0.5 * (1 + math.cos(math.pi * i / 4)) for i in (1, 2, 3))],
        ),
        (
            {"kind": "cosine", "floor": 0.2},
            [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(6)],
        ),
    ],
)
def test_schedule(schedule: dict, want: list[float]) -> None:
    cfg = ScheduleConfig(**schedule)
    assert [learning_rate(i, 2.0, cfg, 6) for i in range(6)] == pytest.approx([2 * w for w in want])
    # past the end
    assert learning_rate(50, 2.0, cfg, 6) == pytest.approx(
        2 * (1 if cfg.kind == "constant" else cfg.floor)
    )


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_schedule_beside_that_of_transformers(kind: str, warmup: int) -> None:
    """The same rates after the warm-up.

    In it ours are one step ahead: theirs has a first step of rate 0, which changes nothing.
    """
    from transformers import get_scheduler

    name = "constant_with_warmup" if kind == "constant" else kind
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=10
    ).lr_lambdas[0]
    ours = [learning_rate(i, 2.0, ScheduleConfig(kind=kind, warmup=warmup), 10) for i in range(10)]  # type: ignore[arg-type]
    assert ours[warmup:] == pytest.approx([2.0 * theirs(i) for i in range(warmup, 10)])
    assert (
        ours[:warmup] == pytest.approx([2.0 * theirs(i + 1) for i in range(warmup)])
        and min(ours) > 0
    )
    assert not warmup or theirs(0) == 0


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))
    with torch.no_grad():
        module[1].weight.mul_(1.5)
    return module.to(dtype)


def give_gradients(optimizer: MasterOptimizer, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grads = {
        name: torch.randn(m.shape, generator=generator) for name, m in optimizer.masters.items()
    }
    for name, g in grads.items():
        optimizer.masters[name].grad = g.clone()
    return grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_by_hand(dtype: torch.dtype) -> None:
    """m, v, bias correction and decoupled decay on matrices only, in float64."""
    cfg = OptimizerConfig(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    optimizer = MasterOptimizer(model(dtype), cfg)
    value = {k: m.detach().double() for k, m in optimizer.masters.items()}
    first = {k: torch.zeros_like(v) for k, v in value.items()}
    second = {k: torch.zeros_like(v) for k, v in value.items()}
    for t, (rate, scale) in enumerate([(0.1, 1.0), (0.05, 0.25), (0.2, 1.0)], 1):
        grads = give_gradients(optimizer, t)
        optimizer.step(rate, scale)
        optimizer.zero()
        for k, g in grads.items():
            g = g.double() * scale
            first[k], second[k] = 0.8 * first[k] + 0.2 * g, 0.9 * second[k] + 0.1 * g * g
            decay = 0.1 if value[k].ndim > 1 else 0.0
            value[k] = value[k] * (1 - rate * decay) - rate * (first[k] / (1 - 0.8**t)) / (
                (second[k] / (1 - 0.9**t)).sqrt() + 1e-6
            )
    for k, m in optimizer.masters.items():
        torch.testing.assert_close(m.detach().double(), value[k], atol=1e-6, rtol=1e-5)
        assert torch.equal(optimizer.parameters[k].detach(), m.detach().to(dtype))


def test_norm_and_missing_gradients() -> None:
    optimizer = MasterOptimizer(model(), OptimizerConfig())
    assert float(optimizer.gradient_norm()) == 0.0
    grads = give_gradients(optimizer, 0)
    assert float(optimizer.gradient_norm()) == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    )
    optimizer.masters["0.weight"].grad = None
    before = optimizer.masters["0.weight"].detach().clone()
    optimizer.step(0.1, 1.0)
    assert (
        torch.equal(optimizer.masters["0.weight"], before)
        and "0.weight/exp_avg" not in optimizer.tensors()
    )


def test_bfloat16_gradients_add_up_in_float32() -> None:
    """A thousand micro-batches of 1/1000: a bf16 sum would stop growing at a fraction of it."""
    weight = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = MasterOptimizer(weight, OptimizerConfig())
    for _ in range(1000):
        (weight(torch.ones(1, 1, dtype=torch.bfloat16)).sum() * 2.0**-10).backward()
    assert weight.weight.grad is None
    assert float(optimizer.masters["weight"].grad) == pytest.approx(1000 / 1024, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_states_give_the_same_bits(dtype: torch.dtype) -> None:
    """Several micro-batches and steps with clipping, then on from the other one's state: weights,
    masters and moments are equal.
    """
    cfg = OptimizerConfig(betas=(0.8, 0.9), weight_decay=0.1)
    modules = [model(dtype), model(dtype)]
    pair = [
        MasterOptimizer(m, c)
        for m, c in zip(modules, (cfg, cfg.model_copy(update={"offload": True})), strict=True)
    ]
    assert all(
        pair[1].masters[n] is not p and pair[1].masters[n].dtype == torch.float32
        for n, p in pair[1].parameters.items()
    )

    def train(step: int) -> None:
        for module, optimizer in zip(modules, pair, strict=True):
            for part in range(3):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + part)).to(
                    dtype
                )
                module(x).float().square().sum().backward()
            norm = float(optimizer.gradient_norm())
            assert norm > 1 and len(optimizer.gradients()) == 4
            optimizer.step(0.05, 1 / norm)
            optimizer.zero()
            assert float(optimizer.gradient_norm()) == 0.0
        a, b = (o.tensors() for o in pair)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        assert all(
            torch.equal(p, q)
            for p, q in zip(modules[0].parameters(), modules[1].parameters(), strict=True)
        )

    for step in range(3):
        train(step)
    states = [{k: v.clone() for k, v in o.tensors().items()} for o in pair]
    # each goes on from what the other saved
    for optimizer, state in zip(pair, reversed(states), strict=True):
        optimizer.load(state)
    train(3)


def test_frozen_parameters_stay_out() -> None:
    module = model()
    module[0].requires_grad_(False)
    assert set(MasterOptimizer(module, OptimizerConfig()).masters) == {"1.weight", "1.bias"}
