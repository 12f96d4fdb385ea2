"""Modules that are trained whole beside an adapter: saved, published, exported and loaded with it,
and the reference has their originals.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from helpers.offline_runs import PAIRS, config, launch, small_model
from helpers.tiny_runs import digest, lines
from helpers.toys import make_module, make_samples, parameters, run, tokens_of, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.local import LocalBackend
from reinforge.build.saved_model import open_model
from reinforge.config.adapter import AdapterConfig
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.engines.native import NativeEngine
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.named_weights import low_rank, named_weights
from reinforge.offline.export import export

WHOLE = ["lm_head", "embed_tokens", "model.norm"]
TOKENS = torch.tensor([[1, 5, 9, 12, 7, 3]])


def trained() -> LocalBackend:
    adapter = AdapterConfig(rank=4, modules_to_save=WHOLE)
    model = CausalModel(add_adapter(make_module(), adapter, seed=0))
    backend = LocalBackend(model, train_config(learning_rate=1e-2), total_steps=3, reference=True)
    batches = pack(make_samples(), 64)
    for _ in range(3):
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        backend.step()
    return backend


def test_they_are_trained_and_the_reference_has_their_originals() -> None:
    backend = trained()
    model = backend.model
    base = CausalModel(make_module())
    names = set(backend.optimizer.parameters)
    whole = {name for name in names if "modules_to_save" in name}
    assert len(whole) == 3 and all("lora_" in name for name in names - whole)
    batches = pack(make_samples(), 64)
    backend.annotate(batches, frozenset({"reference", "old"}))
    with torch.no_grad():
        want = base.logprobs(batches[0], temperature=1.0)[0]
    assert torch.equal(batches[0].streams["reference"], want)
    assert float((batches[0].streams["old"] - want).abs().max()) > 0.01
    assert all(p.requires_grad for p in backend.optimizer.parameters.values())

    # the engine answers with the log-probs of the trained modules
    prompt = tokens_of(6)
    done = run(NativeEngine(model).generate(prompt, Sampling(8, ignore_eos=True), key=1))[0]
    row = Sample.from_tokens("s", prompt + done.tokens, [False] * 6 + [True] * 8)
    with torch.no_grad():
        found = model.logprobs(Batch.pack([row]), temperature=1.0)[0]
    torch.testing.assert_close(found, torch.tensor(done.logprobs), atol=1e-5, rtol=1e-5)


def test_what_a_server_is_sent_is_the_whole_model() -> None:
    """Under the names of a checkpoint; the adapter alone would not be enough."""
    module = trained().model.module
    sent = {name: tensor.clone() for name, tensor in named_weights(module)}
    assert sent.keys() == parameters(make_module()).keys() and low_rank(module) is None
    plain = make_module()
    plain.load_state_dict(sent)
    with torch.no_grad():
        torch.testing.assert_close(
            CausalModel(plain).logprobs(Batch.pack(make_samples()), temperature=1.0)[0],
            CausalModel(module).logprobs(Batch.pack(make_samples()), temperature=1.0)[0],
            atol=1e-5,
            rtol=1e-5,
        )


def untied(folder: Path) -> str:
    """The small model with a head of its own."""
    path = small_model(folder)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.tie_word_embeddings = False
    apart = LlamaForCausalLM(model.config)
    apart.load_state_dict({**model.state_dict(), "lm_head.weight": model.lm_head.weight.clone()})
    apart.save_pretrained(path)
    return path


def test_saved_exported_and_loaded_by_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    path = untied(tmp_path)
    adapter = {"rank": 4, "modules_to_save": ["lm_head", "embed_tokens"]}
    whole, cut = (
        config(path, tmp_path / name, "dpo", steps=4, adapter=adapter) for name in ("whole", "cut")
    )
    launch(whole, PAIRS)
    launch(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 2})}), PAIRS)
    launch(cut, PAIRS)
    assert digest(whole) == digest(cut)
    assert lines(whole)[0]["preference/loss"] == pytest.approx(math.log(2), abs=1e-6)

    model = open_model(str(tmp_path / "whole"))[0]
    out = export(tmp_path / "whole", tmp_path / "adapter")
    merged = export(tmp_path / "whole", tmp_path / "merged", merge=True)
    continued = open_model(str(out))[0]
    base = AutoModelForCausalLM.from_pretrained(path).eval()
    for ours in (model, continued):
        ours.causal.set_attn_implementation("sdpa")
    with torch.no_grad():
        before = base(TOKENS).logits
        want = model.module(TOKENS).logits
        found = [
            continued.module(TOKENS).logits,
            AutoModelForCausalLM.from_pretrained(merged).eval()(TOKENS).logits,
            PeftModel.from_pretrained(base, out).eval()(TOKENS).logits,
        ]
    assert float((want - before).abs().max()) > 0.01
    for logits in found:
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-4)


def test_where_it_cannot_be() -> None:
    with pytest.raises(InputError, match=r"modules_to_save.*no module"):
        add_adapter(make_module(), AdapterConfig(modules_to_save=["nothing"]), seed=0)
    tied = make_module("llama", tie_word_embeddings=True)
    with pytest.raises(InputError, match="in common with the other end"):
        add_adapter(tied, AdapterConfig(modules_to_save=["lm_head"]), seed=0)
    with pytest.raises(ValueError, match="has its own"):
        AdapterConfig(modules_to_save=["lm_head"], path="saved")
