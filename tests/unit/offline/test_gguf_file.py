"""GGUF files: transformers, which reads them by a way of its own, finds the same model in them.
`benchmarks/gguf_llama_cpp.py` asks llama.cpp.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from reinforge.core.errors import InputError
from reinforge.models.tiny import tiny_tokenizer
from reinforge.offline.gguf_file import _rope_factors, interleaved, write_gguf

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEXTS = ["Count 1234 apples.", "  déjà vu\n\n\tit's 7%!", "日本語 <|eos|> x", "don't\r\nWON'T"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def saved(folder: Path, kind: Any = LlamaConfig, **settings: Any) -> Path:
    """A random model with a tokenizer; spread out, so that positions and heads matter."""
    tokenizer = tiny_tokenizer(["count the apples it's seven"], 280)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = kind(**{"vocab_size": len(tokenizer) + 8, **SIZES, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


MODELS = [
    (LlamaConfig, {}),
    (LlamaConfig, {"tie_word_embeddings": True, "head_dim": 16}),
    (Qwen2Config, {}),
    (Qwen3Config, {"head_dim": 128}),  # transformers takes that for granted
    (MistralConfig, {"sliding_window": None}),
]


@pytest.mark.parametrize(("kind", "settings"), MODELS)
def test_transformers_reads_the_same_model(
    kind: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model", kind, **settings)
    path = write_gguf(folder, "f32")
    assert path == folder / "model-F32.gguf"
    mine = AutoModelForCausalLM.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", gguf_file=path.name)
    ids = torch.randint(3, 270, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = mine(ids).logits, theirs(ids).logits
    assert want.std() > 0.3
    torch.testing.assert_close(got[..., : want.shape[-1]], want, atol=1e-4, rtol=1e-4)


def test_transformers_reads_the_same_tokenizer(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    path = write_gguf(folder, "f16")
    mine = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    for text in TEXTS:
        assert theirs.decode(theirs.encode(text, add_special_tokens=False)) == text
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens[: len(mine)] == mine.convert_ids_to_tokens(range(len(mine)))
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert kinds[:4] == [3, 3, 3, 1] and kinds[len(mine) :] == [5] * 8
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 2
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert fields["tokenizer.chat_template"].contents() == mine.chat_template


@pytest.mark.parametrize(("precision", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_weights_are_rounded_once(precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", Qwen2Config)
    found = {t.name: t for t in gguf.GGUFReader(write_gguf(folder, precision)).tensors}
    own = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    down = found["blk.1.ffn_down.weight"]
    assert down.tensor_type.name == precision.upper() and list(down.shape) == [48, 32]
    got = torch.from_numpy(np.array(down.data)).contiguous().view(dtype).reshape(32, 48)
    assert torch.equal(got, own["model.layers.1.mlp.down_proj.weight"].to(dtype))
    bias = found["blk.0.attn_q.bias"]
    assert bias.tensor_type.name == "F32"
    assert torch.equal(
        torch.from_numpy(np.array(bias.data)), own["model.layers.0.self_attn.q_proj.bias"]
    )


def test_pairs_are_neighbours_in_the_llama_family() -> None:
    rows = torch.arange(8)  # two heads of four: 0 goes with 2, 1 with 3
    assert interleaved(rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_llama3_scaling_divides_frequencies() -> None:
    config = LlamaConfig(**SIZES, rope_parameters=LLAMA3)
    plain = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = _rope_factors(config.to_dict())
    assert factors is not None
    torch.testing.assert_close(plain / factors, scaled, rtol=1e-6, atol=0)
    assert factors.min() == 1 and factors.max() == 8


def refused(folder: Path, precision: str = "f16") -> str:
    before = sorted(folder.iterdir())
    with pytest.raises(InputError) as error:
        write_gguf(folder, precision)
    assert sorted(folder.iterdir()) == before  # nothing half-written stays
    return f"{error.value.what} {error.value.fix}"


def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    assert "gpt2 are not written" in refused(
        saved(tmp_path / "gpt2", GPT2Config, n_embd=32, n_layer=1, n_head=2)
    )
    slides = saved(tmp_path / "slides", MistralConfig, sliding_window=16)
    assert "last 16 tokens" in refused(slides)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    assert "'yarn'" in refused(saved(tmp_path / "yarn", rope_parameters=yarn))


def test_a_tokenizer_that_llama_cpp_cannot_know_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    path = folder / "tokenizer.json"
    file = json.loads(path.read_text())
    file["pre_tokenizer"] = {"type": "Whitespace"}
    path.write_text(json.dumps(file))
    assert "['Whitespace']" in refused(folder)
    tiny_tokenizer().save_pretrained(folder)
    assert "joins no bytes" in refused(folder)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    assert "a token 279" in refused(saved(tmp_path / "model", vocab_size=270))


def test_numbers_too_large_for_f16_are_told(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = 1e5
    model.save_pretrained(folder)
    said = refused(folder)
    assert "model.layers.1.mlp.up_proj.weight has numbers up to 1e+05" in said and "bf16" in said
    write_gguf(folder, "bf16")
