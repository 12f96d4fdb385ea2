"""Dropout of an adapter: in the update's forward and nowhere else, and a function of run, step and
row.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.offline_runs import PAIRS, config, launch, small_model
from helpers.tiny_runs import digest, lines
from helpers.toys import make_module, make_samples, run, tokens_of, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.local import LocalBackend
from reinforge.config.adapter import AdapterConfig
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.engines.native import NativeEngine
from reinforge.models.adapter_dropout import AdapterDropout, DroppedRows, dropouts
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel


def adapted(dropout: float) -> CausalModel:
    module = add_adapter(make_module(), AdapterConfig(rank=4, dropout=dropout), seed=0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return CausalModel(module)


def gradients(
    dropout: float, *, budget: int = 64, checkpointing: bool = False, steps: int = 0
) -> tuple[float, dict[str, Tensor]]:
    """The loss of one update, and its gradient."""
    model = adapted(dropout)
    if checkpointing:
        model.module.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        model.module.enable_input_require_grads()
    backend = LocalBackend(model, train_config(), total_steps=1, seed=5)
    backend.steps = steps
    batches = pack(make_samples(), budget, share=backend.share)
    found = backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    assert all(part.rows is None for part in dropouts(model.module))
    grads = {n: p.grad.clone() for n, p in backend.optimizer.parameters.items()}
    return float(found["sft/loss"]), grads


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.allclose(a[name], b[name], atol=1e-5, rtol=1e-4) for name in a)


def test_the_update_drops_by_step_and_row() -> None:
    """Other micro-batches and layers that are computed again give the same gradient; another step
    gives another.
    """
    loss, grads = gradients(0.3)
    plain, without = gradients(0.0)
    assert abs(loss - plain) > 1e-3 and not close(grads, without)
    for how in ({"budget": 24}, {"checkpointing": True}, {"budget": 24, "checkpointing": True}):
        again, same = gradients(0.3, **how)  # type: ignore[arg-type]
        assert again == pytest.approx(loss, abs=1e-5) and close(same, grads), how
    assert not close(gradients(0.3, steps=1)[1], grads)


def test_what_is_kept() -> None:
    """A share of 1 - rate, scaled so that the mean stays."""
    batch = Batch.pack(make_samples(), share=False)
    part = AdapterDropout("layer", 0.25)
    x = torch.ones(1, batch.n_tokens, 4096)
    assert torch.equal(part(x), x)
    part.rows = DroppedRows(batch, (1, 2))
    found = part(x)
    assert found.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(found.mean()) == pytest.approx(1.0, abs=0.01)
    assert torch.equal(part(x), found)
    with torch.no_grad():
        assert torch.equal(part(x), x)
    part.rows = DroppedRows(batch, (1, 2), slice(3, 7))
    assert torch.equal(part(x[:, 3:7]), found[:, 3:7])
    other = AdapterDropout("another layer", 0.25)
    other.rows = DroppedRows(batch, (1, 2))
    assert not torch.equal(other(x), found)
    with pytest.raises(InputError, match=r"adapter\.dropout.*does not read every token"):
        part(x[:, :2])


def test_generation_and_log_probs_have_none() -> None:
    """Also in the middle of an update, between forward and backward."""
    batches = pack(make_samples(), 64, share=False)
    prompt = tokens_of(6)
    answers = []
    streams = []
    for dropout in (0.0, 0.5):
        model = adapted(dropout)
        for part in dropouts(model.module):
            part.rows = DroppedRows(batches[0], (0, 0))
        backend = LocalBackend(model, train_config(), total_steps=1, reference=True)
        backend.annotate(batches, frozenset({"old", "reference"}))
        streams.append({name: batches[0].streams[name].clone() for name in ("old", "reference")})
        engine = NativeEngine(model)
        answers.append(run(engine.generate(prompt, Sampling(8, ignore_eos=True), key=1))[0])
        assert bool(list(dropouts(model.module))) == (dropout > 0)
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].logprobs == answers[1].logprobs
    assert all(torch.equal(streams[0][name], streams[1][name]) for name in streams[0])


@pytest.mark.parametrize("kind", ["lora", "rslora"])
def test_a_run_goes_on_exactly(tmp_path: Path, kind: str) -> None:
    """DPO begins at ln 2 (a new adapter adds nothing, whatever it drops), learns otherwise than
    without dropout, and an interrupted run is the whole one.
    """
    path = small_model(tmp_path)

    def begin(name: str, **adapter: Any) -> Any:
        section = {"kind": kind, "rank": 4, **adapter}
        return config(path, tmp_path / name, "dpo", steps=4, adapter=section)

    whole, cut, without = begin("whole", dropout=0.2), begin("cut", dropout=0.2), begin("without")
    launch(whole, PAIRS)
    launch(without, PAIRS)
    launch(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 2})}), PAIRS)
    launch(cut, PAIRS)
    assert digest(whole) == digest(cut) != digest(without)
    assert lines(whole)[0]["preference/loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="dora has none"):
        AdapterConfig(kind="dora", dropout=0.1)
    with pytest.raises(ValueError, match="leaves nothing"):
        AdapterConfig(dropout=1.0)
