"""Products in FP8 on a GPU: the library's against the twin, and an engine whose graphs read the
copies. Skips without one that multiplies in FP8. The kernels are in test_kernels.py.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from reinforge.core.batch import Batch
from reinforge.core.engine import Completion, Sampling
from reinforge.core.sample import Sample
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.engines.native import engine as native
from reinforge.models import fp8
from reinforge.models.causal import CausalModel
from reinforge.models.fp8 import Fp8Rows
from reinforge.models.fp8_layers import Fp8Layers, Source

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < fp8.CAPABILITY,
    reason="needs a GPU that multiplies in FP8",
)
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
PROMPTS = [list(range(4, 4 + n)) for n in (1, 15, 16, 17, 60, 130)]


def make_model(kind: str) -> CausalModel:
    torch.manual_seed(0)
    module = (
        LlamaForCausalLM(LlamaConfig(**SHAPE))
        if kind == "llama"
        else Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    ).eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.mul_(2)
    return CausalModel(module.to("cuda", torch.bfloat16))


def generate(engine: NativeEngine, n: int = 4) -> list[Completion]:
    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(
            *(
                engine.generate(prompt, Sampling(48, ignore_eos=True), key=i, n=n)
                for i, prompt in enumerate(PROMPTS)
            )
        )

    return [one for group in asyncio.run(all_of_them()) for one in group]


def gap(model: CausalModel, completions: list[Completion], source: Source) -> float:
    """Mean |log-prob of the engine - that of the trainer|, whose products are made so."""
    gaps = []
    each = len(completions) // len(PROMPTS)
    for i, completion in enumerate(completions):
        prompt = PROMPTS[i // each]
        trained = [False] * len(prompt) + [True] * len(completion.tokens)
        sample = Sample.from_tokens("x", [*prompt, *completion.tokens], trained)
        with torch.no_grad(), Fp8Layers.of(model, "train.precision").using(source):
            batch = Batch.pack([sample]).to(model.device)
            theirs = model.logprobs(batch, temperature=1.0)[0].cpu()
        gaps.append((torch.tensor(completion.logprobs) - theirs).abs().mean())
    return float(torch.stack(gaps).mean())


@pytest.mark.parametrize(
    ("tokens", "inner", "outer"), [(1, 64, 96), (70, 3584, 4608), (300, 96, 32)]
)
def test_the_librarys_product_is_the_twin(tokens: int, inner: int, outer: int) -> None:
    torch.manual_seed(1)
    x = Fp8Rows.of(torch.randn(tokens, inner))
    weight = Fp8Rows.of(torch.randn(outer, inner) * inner**-0.5)
    bias = torch.randn(outer).bfloat16()
    want = fp8.product(x, weight, bias, torch.float32)
    there = [Fp8Rows(one.values.cuda(), one.scale.cuda()) for one in (x, weight)]
    got = fp8.product(*there, bias.cuda(), torch.bfloat16)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu().float(), want, atol=0.01, rtol=0.01)
    error = (got.cpu().float() - want).norm() / want.norm()
    assert error < 2.5e-3  # rounding of bfloat16 is 1.7e-3


def test_gradients_are_the_twins() -> None:
    torch.manual_seed(2)
    found = []
    x0 = torch.randn(40, 128).bfloat16()
    weight0 = torch.randn(96, 128).bfloat16()
    grad = torch.randn(40, 96).bfloat16()
    for device in ("cpu", "cuda"):
        x, weight = (one.to(device).detach().requires_grad_() for one in (x0, weight0))
        fp8.linear(x, weight, None).backward(grad.to(device))
        assert x.grad is not None and weight.grad is not None
        found.append((x.grad.cpu().float(), weight.grad.cpu().float()))
    for ours, want in zip(*found, strict=True):
        # some numbers between two of e4m3 are rounded otherwise
        assert (ours - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("n", [1, 4, 20])  # rows of our own products, and of the library's
def test_an_engine_samples_from_what_fp8_training_computes(kind: str, n: int) -> None:
    model = make_model(kind)
    engine = NativeEngine(model, kv_gib=0.2, precision="fp8")
    assert engine.decoder.fused is not None
    completions = generate(engine, n)
    of_fp8 = gap(model, completions, "fresh")
    of_model = gap(model, completions, "plain")
    print(f"mismatch: {of_fp8:.5f} with products in FP8, {of_model:.5f} without")
    assert of_fp8 < 0.6 * of_model


def test_graphs_go_on_with_new_weights() -> None:
    model = make_model("qwen2")
    engine = NativeEngine(model, kv_gib=0.2, precision="fp8")
    first = generate(engine)
    captures = engine.decoder.captures
    with torch.no_grad():
        for weight in model.layers.parameters():
            weight.mul_(1.2)
    asyncio.run(engine.update(Weights("shared", module=model.module), 1))
    second = generate(engine)
    assert engine.decoder.captures == captures > 0
    assert [one.tokens for one in first] != [one.tokens for one in second]
    assert gap(model, second, "fresh") < 0.6 * gap(model, second, "plain")
    assert gap(model, second, "fresh") < 0.2 * gap(model, first, "fresh")


def test_sleep_gives_the_copies_back_with_a_large_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    engine = NativeEngine(model, kv_gib=0.2, precision="fp8")
    generate(engine)
    assert engine.fp8 is not None
    monkeypatch.setattr(native, "stays", lambda *sizes: False)
    asyncio.run(engine.sleep())
    assert not engine.fp8.copied and engine.cache is None
    again = generate(engine)
    assert gap(model, again, "fresh") < 0.6 * gap(model, again, "plain")
