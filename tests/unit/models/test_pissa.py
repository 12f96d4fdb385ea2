"""PiSSA (2404.02948): the adapter begins as the principal part of the weights, and is exported as
an adapter of the weights as they were.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.offline_runs import PAIRS, config, launch, small_model
from helpers.tiny_runs import digest, lines
from helpers.toys import make_module, make_samples, parameters, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.local import LocalBackend
from reinforge.build.saved_model import open_model
from reinforge.config.adapter import AdapterConfig
from reinforge.core.batch import Batch, Totals, pack
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.named_weights import base_weights, low_rank, named_weights
from reinforge.offline.export import export

TOKENS = torch.tensor([[1, 5, 9, 12, 7, 3]])


@pytest.mark.parametrize("kind", ["lora", "rslora"])
def test_it_begins_as_the_principal_part(kind: str) -> None:
    """Base and adapter together are the weight, and the adapter alone is its best approximation of
    that rank: the base keeps singular values 5 and later.
    """
    base = parameters(make_module())
    adapter = AdapterConfig(kind=kind, rank=4, init="pissa")  # type: ignore[arg-type]
    module = add_adapter(make_module(), adapter, seed=0)
    whole = dict(named_weights(module))
    left = dict(base_weights(module))
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(whole[name], base[name], atol=1e-6, rtol=1e-5)
    values = torch.linalg.svdvals(base[name])
    kept = torch.linalg.svdvals(left[name])
    torch.testing.assert_close(kept[: len(values) - 4], values[4:], atol=1e-6, rtol=1e-4)
    # what a server is sent, once the base and then the product, is the whole as well
    updates = low_rank(module)
    assert updates is not None
    sent = left[name] + updates[name].b @ updates[name].a
    torch.testing.assert_close(sent, base[name], atol=1e-6, rtol=1e-5)
    batch = Batch.pack(make_samples())
    with torch.no_grad():
        torch.testing.assert_close(
            CausalModel(module).logprobs(batch, temperature=1.0)[0],
            CausalModel(make_module()).logprobs(batch, temperature=1.0)[0],
            atol=1e-5,
            rtol=1e-5,
        )


def test_the_reference_is_the_model_and_not_what_is_left_of_it() -> None:
    model = CausalModel(add_adapter(make_module(), AdapterConfig(rank=4, init="pissa"), seed=0))
    batches = pack(make_samples(), 64)
    backend = LocalBackend(model, train_config(learning_rate=1e-2), total_steps=3, reference=True)
    with torch.no_grad():
        base = CausalModel(make_module()).logprobs(batches[0], temperature=1.0)[0]
    for _ in range(3):
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        backend.step()
    backend.annotate(batches, frozenset({"reference", "old"}))
    torch.testing.assert_close(batches[0].streams["reference"], base, atol=1e-5, rtol=1e-5)
    assert float((batches[0].streams["old"] - base).abs().max()) > 0.01


@pytest.mark.parametrize("kind", ["lora", "rslora"])
def test_what_is_exported_is_an_adapter_of_the_original_model(tmp_path: Path, kind: str) -> None:
    """DPO begins at ln 2; peft puts the exported adapter onto the untouched base and says what the
    trained model says, as the merged one does; a run that was interrupted says the same.
    """
    from peft import PeftModel

    path = small_model(tmp_path)
    adapter = {"kind": kind, "rank": 4, "init": "pissa"}
    whole, cut = (
        config(path, tmp_path / run, "dpo", steps=4, adapter=adapter) for run in ("whole", "cut")
    )
    launch(whole, PAIRS)
    launch(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 2})}), PAIRS)
    launch(cut, PAIRS)
    assert digest(whole) == digest(cut)
    assert lines(whole)[0]["preference/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines(whole)[-1]["rewards/margin"] > 0.01

    trained = open_model(str(tmp_path / "whole"))[0]
    out = export(tmp_path / "whole", tmp_path / "adapter")
    merged = export(tmp_path / "whole", tmp_path / "merged", merge=True)
    described = json.loads((out / "adapter_config.json").read_text())
    assert described["r"] == 8 and described["init_lora_weights"] is True
    base = AutoModelForCausalLM.from_pretrained(path).eval()
    trained.causal.set_attn_implementation("sdpa")
    with torch.no_grad():
        before = base(TOKENS).logits
        want = trained.causal(TOKENS).logits
        loaded = PeftModel.from_pretrained(base, out).eval()(TOKENS).logits
        alone = AutoModelForCausalLM.from_pretrained(merged).eval()(TOKENS).logits
    torch.testing.assert_close(loaded, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(alone, want, atol=1e-4, rtol=1e-4)
    assert float((want - before).abs().max()) > 0.01


def test_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="cannot with qlora"):
        AdapterConfig(kind="qlora", init="pissa")
    with pytest.raises(ValueError, match="has begun already"):
        AdapterConfig(init="pissa", path="saved")
