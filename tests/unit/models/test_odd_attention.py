"""Architectures whose attention has sinks, chunks or values of another size than keys: generated
with, trained, adapted and saved as transformers does it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.toy_architectures import RIGHT, make_architecture, make_config, save_architecture
from helpers.toys import run, tokens_of, true_logprobs
from reinforge.backends import memory_model
from reinforge.config.adapter import AdapterConfig
from reinforge.config.model import ModelConfig
from reinforge.core.batch import Batch
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.model_facts import ModelFacts
from reinforge.core.sample import Sample
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.models import exact_attention
from reinforge.models.adapters import add_adapter
from reinforge.models.attention import PackedLayout
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.causal import CausalModel
from reinforge.models.exact_proof import prove
from reinforge.models.load import load_model
from reinforge.models.tiny import tiny_tokenizer

NAMES = [
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "granite_swa",
    "llama4",
    "mimo_v2",
    "nemotron",
    "stablelm",
]
PROMPT = tokens_of(9, 1, 259)


def samples_of(prompt: list[int]) -> list[Sample]:
    """Two answers to one prompt, and a row of its own."""
    rows = [(prompt + tokens_of(n, n, 259), "pair") for n in (8, 3)]
    rows.append((tokens_of(14, 4, 259), "alone"))
    return [
        Sample.from_tokens(str(i), row, [at >= 7 for at in range(len(row))], group=group)
        for i, (row, group) in enumerate(rows)
    ]


def loaded(name: str, **changes: Any) -> CausalModel:
    """As a model is after loading: the proof also reads chunks from its masks."""
    model = CausalModel(make_architecture(name, **changes))
    assert model.verify() < 1e-5
    return model


def write_tokenizer(folder: Path) -> None:
    tiny_tokenizer(None, 300).save_pretrained(folder)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_is_that_of_generate(name: str) -> None:
    theirs = make_architecture(name)
    want = theirs.generate(
        torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )[0, len(PROMPT) :].tolist()
    engine = NativeEngine(loaded(name), kv_gib=0.001)
    asked = Sampling(max_new_tokens=24, temperature=0.0)
    for done in run(engine.generate(PROMPT, asked, key=1, n=2)):
        assert done.tokens == want


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_and_a_cache_in_fp8_are_near(name: str) -> None:
    """Log-probs of what the engine said, against float32 of the same weights."""
    model = loaded(name, dtype=torch.bfloat16, spread=2.0)
    theirs = make_architecture(name, dtype=torch.bfloat16, spread=2.0).float()
    asked = Sampling(max_new_tokens=12, temperature=1.0)
    for precision in ("model", "fp8"):
        engine = NativeEngine(model, kv_gib=0.001, cache_precision=precision)
        [done] = run(engine.generate(PROMPT, asked, key=1, n=1))
        want = true_logprobs(theirs, [*PROMPT, *done.tokens])[len(PROMPT) - 1 :]
        gap = (torch.tensor(done.logprobs).double() - want).abs().mean()
        assert float(gap) < 0.06, (precision, float(gap))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_pack_are_those_of_each_sample_alone(name: str, share: bool) -> None:
    model = loaded(name)
    samples = samples_of(PROMPT[:7])
    model.logprobs(Batch.pack(samples, share=share), temperature=1.0)[0].sum().backward()
    theirs = make_architecture(name)
    for sample in samples:
        tokens = sample.tokens.tolist()
        logits = theirs(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
        found = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        found[torch.as_tensor(sample.trained[1:])].sum().backward()
    wanted = dict(theirs.named_parameters())
    seen = 0
    for part, p in model.plain.named_parameters():
        want = wanted[part].grad
        if want is None:
            assert p.grad is None or not bool(p.grad.any()), part
            continue
        size = max(1e-2, float(want.abs().max()))
        assert p.grad is not None and float((p.grad - want).abs().max()) < 1e-3 * size, part
        seen += bool(part.endswith("sinks") and float(want.abs().max()) > 1e-3)
    assert bool(seen) == (name in ("gpt_oss", "granite_swa", "mimo_v2"))


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "llama4"])
def test_an_adapter_trains_and_is_what_the_engine_runs(name: str) -> None:
    module = add_adapter(
        loaded(name).plain, AdapterConfig(kind="lora", rank=4, targets=["o_proj"]), seed=0
    )
    model = CausalModel(module)
    engine = NativeEngine(model, kv_gib=0.001)
    asked = Sampling(max_new_tokens=6, temperature=0.0)
    [before] = run(engine.generate(PROMPT, asked, key=1, n=1))
    batch = Batch.pack(samples_of(PROMPT[:7]), share=True)
    model.logprobs(batch, temperature=1.0)[0].sum().backward()
    moved = [p for p in module.parameters() if p.requires_grad and p.grad is not None]
    with torch.no_grad():
        for p in moved:
            p.add_(0.5 * torch.sign(p.grad))
    assert moved and all(p.ndim == 2 for p in moved)
    with torch.no_grad():
        packed = model.logprobs(batch, temperature=1.0)[0]
        alone = torch.cat(
            [model.logprobs(Batch.pack([s]), temperature=1.0)[0] for s in batch.samples]
        )
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=0)
    run(engine.update(Weights("shared", module=module), 1))
    [after] = run(engine.generate(PROMPT, asked, key=1, n=1))
    assert after.tokens != before.tokens
    row = Sample.from_tokens("0", [*PROMPT, *after.tokens], [False] * 9 + [True] * 6)
    with torch.no_grad():
        want = model.logprobs(Batch.pack([row]), temperature=1.0)[0]
    torch.testing.assert_close(torch.tensor(after.logprobs), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "llama4"])
def test_saved_and_loaded_it_is_the_same(name: str, tmp_path: Path) -> None:
    save_architecture(name, tmp_path / "first", write_tokenizer)
    model = load_model(ModelConfig(path=str(tmp_path / "first"), device="cpu"))
    model.plain.save_pretrained(tmp_path / "second")
    write_tokenizer(tmp_path / "second")
    again = load_model(ModelConfig(path=str(tmp_path / "second"), device="cpu"))
    batch = Batch.pack(samples_of(PROMPT[:7]))
    with torch.no_grad():
        assert torch.equal(
            model.logprobs(batch, temperature=1.0)[0], again.logprobs(batch, temperature=1.0)[0]
        )


# ---- MXFP4 ----

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def numbers_of(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, in, out] of what a checkpoint holds: two numbers of four bits a byte, the lower half
    first, sign and magnitude, and 2^(scale - 127) for 32 of them.
    """
    table = torch.tensor(FP4 + [-x for x in FP4])
    halves = torch.stack([blocks & 15, blocks >> 4], -1).long()  # [E, out, groups, 16, 2]
    found = table[halves].flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
    return found.flatten(-2).transpose(1, 2)


def save_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """A toy gpt-oss whose experts are in MXFP4, as published ones are; what they stand for."""
    save_architecture("gpt_oss", folder, write_tokenizer, dtype=torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    meant = {}
    for name in [n for n in weights if ".experts." in n and n.endswith("_proj")]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 123, shape, generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = numbers_of(blocks, scales)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return meant


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_becomes_plain_numbers_that_can_be_saved(dtype: str, tmp_path: Path) -> None:
    meant = save_mxfp4(tmp_path / "packed")
    model = load_model(ModelConfig(path=str(tmp_path / "packed"), device="cpu", dtype=dtype))
    found = dict(model.plain.named_parameters())
    assert len(meant) == 4 and {p.dtype for p in found.values()} == {getattr(torch, dtype)}
    for name, numbers in meant.items():
        assert torch.equal(found[name].float(), numbers), name
    model.plain.save_pretrained(tmp_path / "plain")
    settings = json.loads((tmp_path / "plain" / "config.json").read_text())
    saved = load_file(tmp_path / "plain" / "model.safetensors")
    assert "quantization_config" not in settings
    assert all(torch.equal(saved[name], found[name]) for name in meant)


def test_mxfp4_and_qlora_are_refused_together(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "packed")
    with pytest.raises(InputError, match="adapter.kind: an MXFP4 checkpoint is quantised"):
        load_model(
            ModelConfig(path=str(tmp_path / "packed"), device="cpu"),
            AdapterConfig(kind="qlora", rank=2),
        )


# ---- sizes, and what is refused ----


def test_the_cache_is_as_large_as_plan_says() -> None:
    """Latent attention: keys of 16 numbers and values of 8, for every query head."""
    model = CausalModel(make_architecture("deepseek_v3"))
    facts = ModelFacts.of(make_config("deepseek_v3"), itemsize=4)
    engine = NativeEngine(model, kv_gib=0.001)
    assert {tuple(shape) for shape in engine.shapes} == {(4, 16, 8)}
    assert memory_model.kv_token_bytes(facts) == 2 * 4 * (16 + 8) * 4
    assert engine._block_bytes() == engine.block * memory_model.kv_token_bytes(facts)
    narrow = NativeEngine(model, kv_gib=0.001, cache_precision="fp8")
    assert narrow._block_bytes() == narrow.block * memory_model.kv_token_bytes(facts, True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpt_oss", "attention sinks"),
        ("deepseek_v3", "heads of 16 numbers and its values of 8"),
    ],
)
def test_exact_mode_refuses_it_by_name(name: str, why: str) -> None:
    with pytest.raises(InputError, match=rf"model\.exact: .*{why}"):
        prove(CausalModel(make_architecture(name), exact=True))


def test_exact_attention_refuses_chunks() -> None:
    layout = exact_attention.layout(PackedLayout([3], torch.tensor([0, 3], dtype=torch.int32)))
    x = torch.zeros(3, 2, 8)
    with pytest.raises(InputError, match=r"model\.exact: this model attends in chunks"):
        layout.attend(0, x, x, x, AttentionRule(chunk=2))


def test_a_layer_is_told_what_it_does_not_hand_on() -> None:
    """Also where it is recomputed in the backward; and it keeps no layout, which holds a cache."""
    plain = loaded("nemotron")
    again = loaded("nemotron")
    again.plain.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    again.recompute(True)
    batch = Batch.pack(samples_of(PROMPT[:7]), share=True)
    for model in (plain, again):
        model.logprobs(batch, temperature=1.0)[0].sum().backward()
        assert [layer.self_attn.handed for layer in model.layers] == [{}, {}]
    for mine, other in zip(plain.plain.parameters(), again.plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert [name for name in RIGHT if _drops(name)] == ["stablelm", "nemotron"]


def _drops(name: str) -> bool:
    model = CausalModel(make_architecture(name))
    return any(hasattr(part, "handed") for part in model.trunk.modules())
