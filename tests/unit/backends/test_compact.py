"""Optimizers in less memory: split masters bit for bit, moments in 8 bits, narrow gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.tiny_runs import digest, launch, tensors
from helpers.toys import make_model, make_samples, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends import block_codes, compact, memory_model
from reinforge.backends.block_codes import BLOCK, decoded, dither, encoded, levels
from reinforge.backends.compact import CompactOptimizer
from reinforge.backends.ema import WeightAverage
from reinforge.backends.local import LocalBackend
from reinforge.backends.optimizer import MasterOptimizer
from reinforge.backends.split_master import joined, split
from reinforge.config.optimizer import OptimizerConfig
from reinforge.config.schema import Config
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import InputError
from reinforge.core.model_facts import ModelFacts

ALL = {"name": "adamw_8bit", "masters": "split", "gradients": "bfloat16"}
CPU = torch.device("cpu")


def model(width: int = 96, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, width), nn.Tanh(), nn.Linear(width, 40)).to(dtype)


def backward(module: nn.Module, seed: int, parts: int = 2) -> None:
    for part in range(parts):
        generator = torch.Generator().manual_seed(100 * seed + part)
        x = torch.randn(8, 40, generator=generator).to(next(module.parameters()).dtype)
        (module(x) - x.roll(1, 1)).float().square().mean().backward()


def one_step(module: nn.Module, optimizer: MasterOptimizer, seed: int) -> None:
    backward(module, seed)
    norm = float(optimizer.gradient_norm())
    optimizer.step(0.01, min(1.0, 0.5 / norm))
    optimizer.zero()


# split masters


def test_a_weight_and_its_rest_are_the_master() -> None:
    """Any bits of a finite float32, and all middles between two weights: even and odd, of both
    signs, tiny and large. The weight is the master rounded as it always is.
    """
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (200_003,), generator=generator).to(torch.int32)
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    middles = torch.cat([high + (1 << 15), high + (1 << 15) - 1, high + (1 << 15) + 1, high])
    values = torch.cat([bits, middles]).view(torch.float32)
    values = values[values.isfinite()]
    weight, rest, ties = split(values)
    assert torch.equal(weight, values.bfloat16())
    found = joined(weight, rest, ties)
    assert torch.equal(found.view(torch.int32), values.view(torch.int32))
    # half of the middles are rounded down to an even weight, which 16 bits cannot say
    assert int((ties != 0).sum()) > 30_000 // 8


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_two_hundred_steps_are_those_of_float32_masters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, masters and moments, with several micro-batches, clipping, decay and chunks that do
    not divide a tensor. Some masters fell in the middle between two weights on the way.
    """
    monkeypatch.setattr(compact, "CHUNK", 7 * BLOCK)
    cfg = OptimizerConfig(name=name, weight_decay=0.1)
    modules = [model(64), model(64)]
    pair = [
        MasterOptimizer(modules[0], cfg),
        CompactOptimizer(modules[1], cfg.model_copy(update={"masters": "split"})),
    ]
    averages = [WeightAverage(optimizer, 0.9) for optimizer in pair]
    ties = 0
    for step in range(200):
        for module, optimizer in zip(modules, pair, strict=True):
            one_step(module, optimizer, step)
        ties += sum(int((t != 0).sum()) for t in pair[1].masters.ties.values())  # type: ignore[attr-defined]
        if step % 20 == 0:
            for average in averages:
                average.after_step()
    a, b = (optimizer.tensors() for optimizer in pair)
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert all(torch.equal(*both) for both in zip(*(m.parameters() for m in modules), strict=True))
    assert all(torch.equal(averages[0].values[n], averages[1].values[n]) for n in pair[0].masters)
    assert ties > 0
    pair[1].load(a)  # and on from the other's state
    for module, optimizer in zip(modules, pair, strict=True):
        one_step(module, optimizer, 777)
    a, b = (optimizer.tensors() for optimizer in pair)
    assert all(torch.equal(a[key], b[key]) for key in a)


# 8 bits


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_as_near_as_their_levels(signed: bool) -> None:
    """The largest of a block is kept as it is; all else is at one of the two levels around it; 0
    stays 0, and without a sign nothing else becomes 0.
    """
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(10 * BLOCK + 17, generator=generator) * torch.logspace(
        -6, 3, 10 * BLOCK + 17
    )
    values = values if signed else values.abs()
    values[5] = 0.0
    between = dither(0, len(values), 3, CPU)
    codes, largest = encoded(values, signed=signed, between=between)
    found = decoded(codes, largest, signed=signed)
    assert codes.dtype == torch.uint8 and len(largest) == 11
    blocks = torch.arange(len(values)) // BLOCK
    tops = values.abs() == largest[blocks]
    assert torch.equal(found[tops], values[tops]) and int(tops.sum()) == 11
    table = levels(signed, CPU)
    assert len(table) == 255 and table[-1] == 1 and bool((table.diff() > 0).all())
    unit = values / largest[blocks]
    gap = (table[1:] - table[:-1])[(torch.bucketize(unit, table, right=True) - 1).clamp(0, 253)]
    assert bool(((found - values).abs() <= 1.001 * gap * largest[blocks]).all())
    large = unit.abs() > 1e-3
    off = ((found - values).abs() / values.abs())[large]
    assert float(off.max()) < 0.6
    assert float(off.mean()) < 0.05
    assert found[5] == 0 and (signed or bool((found[values > 0] > 0).all()))


def test_rounding_is_right_on_average() -> None:
    """Over 256 steps the mean of a number is off by a sixteenth of what one rounding is."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(4 * BLOCK, generator=generator)
    found = [
        decoded(
            *encoded(values, signed=True, between=dither(0, len(values), step, CPU)), signed=True
        )
        for step in range(256)
    ]
    once = float((found[0] - values).abs().mean())
    mean = float((torch.stack(found).mean(0) - values).abs().mean())
    assert 0.03 * once < mean < 0.12 * once
    assert torch.equal(dither(0, 600, 9, CPU)[256:], dither(256, 344, 9, CPU))


def test_a_second_moment_fades_as_it_should() -> None:
    """A thousand steps without a gradient: 0.999 ** 1000 of it is left, though each changes it by
    less than a level. Rounded to the nearest it would stay.
    """
    weight = nn.Linear(BLOCK, 4, bias=False)
    optimizer = CompactOptimizer(weight, OptimizerConfig(name="adamw_8bit"))
    sizes = torch.rand(4, BLOCK, generator=torch.Generator().manual_seed(0)) + 0.1
    for step in range(1001):
        weight.weight.grad = sizes.clone() if step == 0 else torch.zeros_like(sizes)
        weight.weight.grad[:, 0] = 2.0  # keeps the scale of a block where it is
        optimizer.step(0.0, 1.0)
    kept = optimizer.kept["weight"]
    second = optimizer._moment(kept, "exp_avg_sq", slice(0, 4 * BLOCK)).view(4, BLOCK)
    expected = 0.001 * sizes.square() * 0.999**1000
    assert float(second[:, 1:].mean()) == pytest.approx(float(expected[:, 1:].mean()), rel=0.15)


def test_moments_in_8_bits_learn_the_same() -> None:
    """Three seeds of a small language model: the losses with 8 bits, and with split masters and
    bfloat16 gradients too, are nearer to those of float32 than the seeds are to each other.
    """
    found: dict[str, list[float]] = {}
    for seed in range(3):
        for kind, settings, dtype in (
            ("float32", {}, torch.float32),
            ("8 bits", {"name": "adamw_8bit"}, torch.float32),
            ("all", ALL, torch.bfloat16),
        ):
            toy = make_model(seed=seed, num_hidden_layers=1)
            toy.module.to(dtype)
            cfg = train_config(learning_rate=1e-2, optimizer=settings, max_grad_norm=1.0)
            backend = LocalBackend(toy, cfg, total_steps=15)
            batches = pack(make_samples((14, 10), seed), 64)
            for _ in range(15):
                metrics = backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
                backend.step()
            found.setdefault(kind, []).append(float(metrics["sft/loss"]))
    plain = torch.tensor(found["float32"])
    spread = float(plain.std())
    assert float(plain.max()) < 2.5  # it began at 4.2
    for kind in ("8 bits", "all"):
        assert float((torch.tensor(found[kind]) - plain).abs().mean()) < spread, found


# gradients in bfloat16


def test_what_adding_up_in_bfloat16_costs() -> None:
    """Of one micro-batch nothing; of 32 about a thousandth to a hundredth of the gradient."""
    errors = {}
    for parts in (1, 32):
        sums = []
        for gradients in ("float32", "bfloat16"):
            module = model()
            cfg = OptimizerConfig(masters="split", gradients=gradients)  # type: ignore[arg-type]
            optimizer = CompactOptimizer(module, cfg)
            backward(module, 5, parts)
            sums.append(torch.cat([g.double().view(-1) for g in optimizer.gradients()]))
            assert {g.dtype for g in optimizer.gradients()} == {getattr(torch, gradients)}
            norm = float(sums[-1].norm())
            assert float(optimizer.gradient_norm()) == pytest.approx(norm, rel=1e-5)
        errors[parts] = float((sums[1] - sums[0]).norm() / sums[0].norm())
    assert errors[1] == 0.0
    assert 1e-4 < errors[32] < 0.02


# memory


class Allocations(TorchDispatchMode):
    """The largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            x.untyped_storage().data_ptr()
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        found = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(found):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, x.numel())
        return found


@pytest.mark.parametrize("settings", [{"masters": "split"}, ALL])
def test_a_step_allocates_chunks_only(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "CHUNK", 4 * BLOCK)
    module = model(400)
    optimizer = CompactOptimizer(module, OptimizerConfig(**settings))
    one_step(module, optimizer, 0)  # makes the moments
    backward(module, 1)
    with Allocations() as seen:
        optimizer.step(0.01, 0.5)
    assert 0 < seen.largest <= 4 * BLOCK < module[0].weight.numel() == 16_000


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"masters": "split"},
        {"name": "adamw_8bit"},
        {"name": "lion", "gradients": "bfloat16"},
        ALL,
        {"name": "muon"},
        {"name": "adafactor"},
    ],
)
def test_plan_counts_what_is_allocated(settings: dict[str, Any]) -> None:
    """What a step leaves, in bytes, against the formulas of `plan`."""
    toy = make_model(hidden_size=64, intermediate_size=128)
    toy.module.bfloat16()
    backend = LocalBackend(toy, train_config(optimizer=settings), total_steps=5)
    batches = pack(make_samples(), 64)
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    sums = sum(g.nbytes for g in backend.optimizer.gradients())
    backend.step()
    facts = backend.facts()
    optimizer = backend.optimizer
    if isinstance(optimizer, CompactOptimizer):
        held = [*optimizer.masters.wide.values(), *optimizer.masters.rests.values()]
        held += optimizer.masters.ties.values()
        held += [t for kept in optimizer.kept.values() for t in kept.values()]
    else:
        held = list(optimizer.tensors().values())
    found = sum(t.nbytes for t in held)
    assert memory_model.optimizer_bytes(facts) == pytest.approx(found, rel=0.03)
    largest = facts.vocab * facts.hidden * facts.itemsize
    assert memory_model.gradient_bytes(facts) - largest == pytest.approx(sums, rel=0.01)


def test_about_eight_bytes_a_weight() -> None:
    seven = ModelFacts(28, 3584, 18944, 28, 4, 128, 152064, tied=False)
    small = replace(seven, **OptimizerConfig(**ALL).facts())  # type: ignore[arg-type]
    n = seven.parameters()
    largest = 152064 * 3584 * 2

    def bytes_of(f: ModelFacts) -> float:
        held = memory_model.weight_bytes(f) + memory_model.optimizer_bytes(f)
        return (held + memory_model.gradient_bytes(f) - largest) / n

    assert bytes_of(seven) == 18.0
    assert bytes_of(small) == pytest.approx(8.16, abs=0.01)


# through a checkpoint


def test_a_compact_run_in_two_parts_is_the_run_in_one(make: Callable[..., Config]) -> None:
    settings = ("model.dtype=bfloat16", *(f"train.optimizer.{k}={v}" for k, v in ALL.items()))
    whole = make("whole", "grpo", "train.steps=3", *settings)
    launch(whole)
    launch(make("parts", "grpo", "train.steps=2", *settings))
    parts = make("parts", "grpo", "train.steps=3", *settings)
    launch(parts)
    assert digest(parts) == digest(whole)
    kept = {key.rpartition("/")[2] for key in tensors(parts) if key.startswith("optimizer/")}
    scales = {"exp_avg_scale", "exp_avg_sq_scale"}
    assert kept == {"master", "step", "exp_avg", "exp_avg_sq", *scales}


def test_masters_may_be_split_half_way(make: Callable[..., Config]) -> None:
    """And put together again: every run has the same digest."""
    found = set()
    for name, first, second in (
        ("wide", "float32", "float32"),
        ("split", "float32", "split"),
        ("joined", "split", "float32"),
    ):
        settings = ("sft", "model.dtype=bfloat16")
        launch(make(name, *settings, "train.steps=2", f"train.optimizer.masters={first}"))
        cfg = make(name, *settings, "train.steps=4", f"train.optimizer.masters={second}")
        launch(cfg)
        found.add(digest(cfg))
    assert len(found) == 1


def test_states_of_other_forms() -> None:
    """Moments in float32 become 8 bits; 8 bits are not taken for float32."""
    module = model(dtype=torch.float32)
    wide = MasterOptimizer(module, OptimizerConfig())
    one_step(module, wide, 0)
    state = wide.tensors()
    eight = CompactOptimizer(model(dtype=torch.float32), OptimizerConfig(name="adamw_8bit"))
    eight.load(state)
    first = eight._moment(eight.kept["0.weight"], "exp_avg", slice(0, 3840))
    expected = state["0.weight/exp_avg"].view(-1)
    assert float((first - expected).norm() / expected.norm()) < 0.02
    for other in (
        MasterOptimizer(model(dtype=torch.float32), OptimizerConfig()),
        CompactOptimizer(model(), OptimizerConfig(masters="split")),
        CompactOptimizer(model(), OptimizerConfig(name="lion", masters="split")),
    ):
        with pytest.raises(InputError, match="the checkpoint holds exp_avg, exp_avg_scale"):
            other.load(eight.tensors())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "muon", "masters": "split"}, "masters: muon needs whole tensors"),
        ({"name": "torch.optim:SGD", "gradients": "bfloat16"}, "gradients: .* needs whole"),
        ({"name": "adamw_8bit", "offload": True}, "offload: of what is kept in float32"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OptimizerConfig(**settings)


def test_the_block_of_plan_is_the_block_of_the_code() -> None:
    assert block_codes.BLOCK == 256 and memory_model.SPLIT == 2 + 1 / 8
