"""Loading: what comes from disk is what transformers would load, and what cannot be loaded says why."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from reinforge.config.schema import AdapterConfig, ModelConfig
from reinforge.core.errors import InputError
from reinforge.models.load import context_length, load_model, load_tokenizer, pick_device, pick_dtype, stop_tokens
from toys import EOS, make_model, make_module


def test_loads_what_transformers_loads(tiny_dir: str) -> None:
    from transformers import AutoModelForCausalLM

    model = load_model(ModelConfig(path=tiny_dir))
    theirs = AutoModelForCausalLM.from_pretrained(tiny_dir).state_dict()
    ours = model.module.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert model.dtype is torch.float32 and not model.module.training and context_length(ModelConfig(path=tiny_dir)) == 128
    assert model.tokenizer.decode(model.tokenizer("7+5=é\n").input_ids) == "7+5=é\n"


def test_dtype_and_device() -> None:
    cpu = torch.device("cpu")
    assert (pick_dtype("auto", cpu), pick_dtype("auto", torch.device("cuda"))) == (torch.float32, torch.bfloat16)
    assert pick_dtype("bfloat16", cpu) is torch.bfloat16 and pick_device("cpu") == cpu
    if not torch.cuda.is_available():
        assert pick_device("auto") == cpu
        with pytest.raises(InputError, match=r"model\.device.*no GPU"):
            pick_device("cuda")


def test_bfloat16_is_asked_for_by_name(tiny_dir: str) -> None:
    assert load_model(ModelConfig(path=tiny_dir, dtype="bfloat16")).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("path", "says"), [("/no/such/directory", "no such directory"), ("./nowhere", "no such directory"), ("none.gguf", "no such file")]
)
def test_missing_paths_are_named(path: str, says: str) -> None:
    with pytest.raises(InputError, match=rf"model\.path: {says}"):
        load_model(ModelConfig(path=path))


def test_a_directory_without_a_model_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot load the tokenizer"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_damaged_model_is_an_input_error(tmp_path: Path, tiny_dir: str) -> None:
    """Cut short and with a missing tensor: neither may give a half-random model."""
    shutil.copytree(tiny_dir, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError):
        load_model(ModelConfig(path=str(tmp_path / "cut")))


def test_a_missing_weight_is_refused(tmp_path: Path, tiny_dir: str) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_dir, tmp_path / "holes")
    path = tmp_path / "holes" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"up_proj"):
        load_model(ModelConfig(path=str(tmp_path / "holes")))


def test_pad_is_eos_where_there_is_none(tmp_path: Path, tiny_dir: str) -> None:
    shutil.copytree(tiny_dir, tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    text = json.loads(settings.read_text())
    text.pop("pad_token", None)
    settings.write_text(json.dumps(text))
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path / "model")))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS


def test_a_chat_template_file_replaces_the_template(tmp_path: Path, tiny_dir: str) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer(ModelConfig(path=tiny_dir, chat_template=str(tmp_path / "t.jinja")))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[user]hi"


def test_stop_tokens_come_from_everywhere() -> None:
    model = make_model()
    model.causal.generation_config.eos_token_id = [7, 9, 10**6]  # an id past the vocabulary cannot be sampled
    assert stop_tokens(model) == (EOS, 7, 9)


def test_gradient_checkpointing_with_an_adapter(tiny_dir: str) -> None:
    """Frozen embeddings would cut the graph: the adapter must still get its gradient."""
    from reinforge.algorithms.loss import NLLLoss
    from reinforge.backends.local import LocalBackend
    from reinforge.core.batch import Totals, pack
    from toys import gradients, make_samples, relative, train_config

    batches = pack(make_samples(), 64)
    found = []
    for checkpointing in (False, True):
        model = load_model(ModelConfig(path=tiny_dir, gradient_checkpointing=checkpointing), AdapterConfig(rank=2), seed=1)
        backend = LocalBackend(model, train_config(), total_steps=1)
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        found.append(gradients(backend))
    assert found[0] and relative(found[1], found[0]) < 1e-6


@pytest.mark.skipif("REINFORGE_TEST_GGUF" not in os.environ, reason="REINFORGE_TEST_GGUF names no file")
def test_gguf(tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=os.environ["REINFORGE_TEST_GGUF"]))
    assert model.verify() < 1e-3 and getattr(model.causal.config, "quantization_config", None) is None
    model.causal.set_attn_implementation("sdpa")
    model.module.save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(again[k], v) for k, v in model.module.state_dict().items())


def test_mamba_is_refused_by_name(tmp_path: Path, tiny_dir: str) -> None:
    make_module("mamba").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"model\.path: MambaForCausalLM .*standard attention"):
        load_model(ModelConfig(path=str(tmp_path), tokenizer=tiny_dir))
