"""LoRA+ (2402.12354): B learns faster than A."""

from __future__ import annotations

import pytest
import torch

from helpers.toys import make_module, make_samples, parameters, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.local import LocalBackend
from reinforge.backends.update_rules import RATIO
from reinforge.config.adapter import AdapterConfig
from reinforge.core.batch import Totals, pack
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel


def stepped(kind: str, ratio: float | None) -> tuple[LocalBackend, dict[str, torch.Tensor]]:
    """A backend after one step, and by how much its weights moved."""
    adapter = AdapterConfig(kind=kind, rank=4)  # type: ignore[arg-type]
    model = CausalModel(add_adapter(make_module(), adapter, seed=0))
    with torch.no_grad():
        for name, p in model.module.named_parameters():
            if "lora_B" in name:  # A has a gradient only where B is not 0
                p.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    before = parameters(model.module)
    cfg = train_config(
        learning_rate=1e-3, optimizer={"lora_plus": ratio, "weight_decay": 0.1}, max_grad_norm=0.0
    )
    backend = LocalBackend(model, cfg, total_steps=1)
    batches = pack(make_samples(), 64)
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    backend.step()
    after = parameters(model.module)
    return backend, {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_b_moves_so_many_times_as_far(kind: str) -> None:
    """The groups of the optimizer, and the first update: AdamW's is the rate times the sign of the
    gradient and the decay, both times the ratio for B; all else moves as without it.
    """
    backend, moved = stepped(kind, 16.0)
    plain, usual = stepped(kind, None)
    groups = backend.optimizer.updates[0].param_groups
    named = {id(p): name for name, p in backend.optimizer.masters.items()}
    for group in groups:
        names = {named[id(p)] for p in group["params"]}
        assert len({"lora_B" in name for name in names}) == 1
        fast = "lora_B" in next(iter(names))
        assert group[RATIO] == (16.0 if fast else 1.0)
        assert group["lr"] == pytest.approx(1.6e-2 if fast else 1e-3, rel=1e-12)
    assert {group["lr"] for group in plain.optimizer.updates[0].param_groups} == {1e-3}
    for name, change in moved.items():
        if "lora_B" in name:
            torch.testing.assert_close(change, 16 * usual[name], rtol=1e-3, atol=1e-6)
            assert float(change.abs().max()) > 1e-2
        else:
            assert torch.equal(change, usual[name])
    assert len(groups) == (3 if kind == "dora" else 2)
