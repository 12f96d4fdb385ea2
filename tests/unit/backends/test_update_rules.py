"""Optimizers by name: against their formulas, by pattern, and through a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.tiny_runs import digest, launch, tensors
from helpers.toys import make_model, make_samples, parameters, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.local import LocalBackend
from reinforge.backends.optimizer import MasterOptimizer, learning_rate
from reinforge.backends.update_rules import RATIO
from reinforge.config.optimizer import OptimizerConfig
from reinforge.config.schema import Config
from reinforge.config.train import ScheduleConfig
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import InputError

OWN = '''
import torch


class Heavy(torch.optim.Optimizer):
    """Heavy ball, with a number beside the tensors, and one of the group that changes."""

    def __init__(self, params, lr, pull=0.5):
        super().__init__(params, {"lr": lr, "pull": pull, "seen": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("speed", torch.zeros_like(p))
                state["count"] = state.get("count", 0) + 1
                state["speed"].mul_(group["pull"]).add_(p.grad)
                p.sub_(state["speed"], alpha=group["lr"] / (state["count"] + group["seen"]))


class Odd(Heavy):
    def step(self):
        super().step()
        for state in self.state.values():
            state["list"] = [1]


def nothing(params, lr):
    return "nothing"
'''


def small(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Linear(6, 4)]), "head": nn.Linear(4, 3, bias=False)}
    ).to(dtype)


def give(optimizer: MasterOptimizer, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grads = {n: torch.randn(m.shape, generator=generator) for n, m in optimizer.masters.items()}
    for name, grad in grads.items():
        optimizer.masters[name].grad = grad.clone()
    return grads


def test_lion_by_hand() -> None:
    """In float64, over three rates; only matrices decay."""
    optimizer = MasterOptimizer(
        small(torch.bfloat16),
        OptimizerConfig(name="lion", weight_decay=0.1, options={"betas": [0.8, 0.95]}),
    )
    value = {k: m.detach().double() for k, m in optimizer.masters.items()}
    momentum = {k: torch.zeros_like(v) for k, v in value.items()}
    for t, (rate, scale) in enumerate([(0.1, 1.0), (0.05, 0.25), (0.2, 1.0)]):
        grads = give(optimizer, t)
        optimizer.step(rate, scale)
        optimizer.zero()
        for k, g in grads.items():
            g = g.double() * scale
            direction = (0.8 * momentum[k] + 0.2 * g).sign()
            decay = 0.1 if value[k].ndim > 1 else 0.0
            value[k] = value[k] - rate * (direction + decay * value[k])
            momentum[k] = 0.95 * momentum[k] + 0.05 * g
    for k, m in optimizer.masters.items():
        torch.testing.assert_close(m.detach().double(), value[k], atol=1e-6, rtol=1e-5)
        assert torch.equal(optimizer.parameters[k].detach(), m.detach().bfloat16())


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest() -> None:
    """The step of a matrix is nearly orthogonal, 0.2 sqrt(larger side) times the rate long in every
    direction; the rest moves as with AdamW, bit for bit.
    """
    moved = {}
    for name in ("muon", "adamw"):
        optimizer = MasterOptimizer(small(), OptimizerConfig(name=name, eps=1e-6))
        before = {k: m.detach().clone() for k, m in optimizer.masters.items()}
        give(optimizer, 3)
        optimizer.step(0.01, 1.0)
        moved[name] = {k: m.detach() - before[k] for k, m in optimizer.masters.items()}
        if name == "muon":
            kept = {key.rpartition("/")[2] for key in optimizer.tensors()}
            assert kept == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    step = moved["muon"].pop("layers.0.weight")
    sizes = torch.linalg.svdvals(step / (0.01 * 0.2 * math.sqrt(6)))
    assert float(sizes.min()) > 0.5 and float(sizes.max()) < 1.4
    assert all(torch.equal(moved["adamw"][k], change) for k, change in moved["muon"].items())


def test_adafactor_keeps_rows_and_columns() -> None:
    """The first step of a vector is the sign of its gradient, as long as the vector's own mean;
    of a matrix two vectors are kept.
    """
    optimizer = MasterOptimizer(small(), OptimizerConfig(name="adafactor"))
    bias = optimizer.masters["layers.0.bias"]
    before = bias.detach().clone()
    grad = give(optimizer, 0)["layers.0.bias"]
    optimizer.step(0.01, 1.0)
    length = 0.01 * float(before.square().mean().sqrt())
    torch.testing.assert_close(bias.detach(), before - length * grad.sign())
    kept = optimizer.tensors()
    assert kept["layers.0.weight/row_var"].shape == (4, 1)
    assert kept["layers.0.weight/col_var"].shape == (1, 6)


# groups


def test_weights_by_pattern_have_their_own_rate_and_decay() -> None:
    """The first group that matches; moved as far as AdamW's first step says, and decayed."""
    groups = [
        {"match": ["head"], "rate": 0.5, "weight_decay": 0.0},
        {"match": ["*.bias"], "rate": 0.0},
        {"match": ["layers.*"], "rate": 2.0},
    ]
    cfg = OptimizerConfig(weight_decay=0.1, groups=groups)  # type: ignore[arg-type]
    optimizer = MasterOptimizer(small(), cfg)
    before = {k: m.detach().clone() for k, m in optimizer.masters.items()}
    grads = give(optimizer, 1)
    optimizer.step(0.1, 1.0)
    expected = {
        "head.weight": before["head.weight"] - 0.05 * grads["head.weight"].sign(),
        "layers.0.bias": before["layers.0.bias"],
        "layers.0.weight": 0.98 * before["layers.0.weight"] - 0.2 * grads["layers.0.weight"].sign(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(optimizer.masters[name].detach(), value, atol=1e-6, rtol=1e-5)
    ratios = {g[RATIO] for update in optimizer.updates for g in update.param_groups}
    assert ratios == {0.5, 0.0, 2.0}


def test_a_pattern_that_means_nothing_is_refused() -> None:
    groups = [{"match": ["head"]}, {"match": ["lm_hed"]}]
    with pytest.raises(InputError, match="'lm_hed' is the name of no weight") as found:
        MasterOptimizer(small(), OptimizerConfig(groups=groups))  # type: ignore[arg-type]
    assert found.value.where == "train.optimizer.groups.1.match"


# the schedule


def test_warmup_as_a_share() -> None:
    """0.25 of 10 steps are 3, and what follows is as with 3."""
    for kind in ("constant", "cosine"):
        share = ScheduleConfig(kind=kind, warmup=0.25)  # type: ignore[arg-type]
        steps = ScheduleConfig(kind=kind, warmup=3)  # type: ignore[arg-type]
        rates = [[learning_rate(i, 2.0, one, 10) for i in range(12)] for one in (share, steps)]
        assert rates[0] == rates[1]
        assert rates[0][:3] == pytest.approx([2 / 3, 4 / 3, 2.0])
    assert ScheduleConfig(warmup=1).warmup == 1
    with pytest.raises(ValueError, match="warmup"):
        ScheduleConfig(warmup=1.5)  # type: ignore[arg-type]


# settings that nobody reads


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "adamv"}, "did you mean adamw"),
        ({"name": "sgd"}, "torch.optim:SGD"),
        ({"name": "lion", "options": {"momentum": 0.9}}, "lion does not read 'momentum'"),
        ({"name": "lion", "betas": (0.9, 0.95)}, "betas: read by"),
        ({"name": "adafactor", "eps": 1e-6}, "eps: read by"),
        ({"name": "torch.optim:SGD", "options": {"lr": 0.1}}, "train.learning_rate"),
    ],
)
def test_what_an_optimizer_does_not_read_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OptimizerConfig(**settings)


# of the user's own


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    return str(file)


def test_an_optimizer_from_a_file(own: str) -> None:
    cfg = OptimizerConfig(name=f"{own}:Heavy", options={"pull": 0.25})
    optimizer = MasterOptimizer(small(), cfg)
    before = {k: m.detach().clone() for k, m in optimizer.masters.items()}
    first = give(optimizer, 1)
    optimizer.step(0.1, 1.0)
    optimizer.zero()
    second = give(optimizer, 2)
    optimizer.step(0.2, 1.0)
    for name, master in optimizer.masters.items():
        speed = 0.25 * first[name] + second[name]
        expected = before[name] - 0.1 / 2 * first[name] - 0.2 / 4 * speed
        torch.testing.assert_close(master.detach(), expected)
    kept = optimizer.tensors()
    assert kept["head.weight/count:number"].item() == 2 and kept["#0/seen:number"].item() == 2


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Heavy", {"push": 1}, "cannot be made with these settings.*push"),
        ("nothing", {}, "makes a str"),
        ("Absent", {}, "has no class 'Absent'"),
    ],
)
def test_what_is_no_optimizer_is_refused(
    own: str, name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        MasterOptimizer(small(), OptimizerConfig(name=f"{own}:{name}", options=options))


def test_a_state_that_no_checkpoint_holds_is_refused(own: str) -> None:
    optimizer = MasterOptimizer(small(), OptimizerConfig(name=f"{own}:Odd"))
    give(optimizer, 1)
    optimizer.step(0.1, 1.0)
    with pytest.raises(InputError, match="Odd keeps a list as 'list'"):
        optimizer.tensors()


# through a checkpoint

NAMES = ["muon", "lion", "adafactor", "own"]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_in_two_parts_is_the_run_in_one(
    make: Callable[..., Config], own: str, name: str
) -> None:
    """The same digest: weights, optimizer, metrics, samples."""
    chosen = f"{own}:Heavy" if name == "own" else name
    settings = (f"train.optimizer.name={chosen}", "train.optimizer.weight_decay=0.1")
    whole = make("whole", "grpo", "train.steps=3", *settings)
    launch(whole)
    launch(make("parts", "grpo", "train.steps=2", *settings))
    parts = make("parts", "grpo", "train.steps=3", *settings)
    launch(parts)
    assert digest(parts) == digest(whole)
    kept = {key.rpartition("/")[2] for key in tensors(parts) if key.startswith("optimizer/")}
    assert (
        kept
        == {
            "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"},
            "lion": {"exp_avg"},
            "adafactor": {"step", "row_var", "col_var", "variance"},
            "own": {"speed", "count:number", "pull:number", "seen:number"},
        }[name]
    )


def backend_of(name: str) -> LocalBackend:
    return LocalBackend(make_model(), train_config(optimizer={"name": name}), total_steps=10)


def trained(backend: LocalBackend) -> LocalBackend:
    batches = pack(make_samples(), 64)
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    backend.step()
    return backend


@pytest.mark.parametrize("first", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("second", ["adamw", "lion", "adafactor"])
def test_the_state_of_another_optimizer_is_refused(first: str, second: str) -> None:
    """By its name, and nothing is guessed; its own is taken."""
    state = trained(backend_of(first)).state()
    other = backend_of(second)
    if first == second:
        other.load(state)
        before = parameters(other.model.module)
        trained(other)
        assert any(not torch.equal(before[n], p) for n, p in other.model.module.named_parameters())
        return
    with pytest.raises(InputError, match="the checkpoint holds") as found:
        other.load(state)
    assert found.value.where == "train.optimizer.name"
