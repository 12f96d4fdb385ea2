"""Sinks, chunks, and values of another size than keys, through the kernels of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.toy_architectures import make_architecture
from helpers.toys import run, tokens_of, true_logprobs
from reinforge.core.engine import Sampling
from reinforge.engines.native import NativeEngine
from reinforge.models import attention
from reinforge.models.attention import PackedLayout, starts_of
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.causal import CausalModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SINKS = torch.linspace(-2.0, 4.0, 8)
RULES = [
    AttentionRule(0.125, sinks=SINKS),
    AttentionRule(0.125, sinks=SINKS, window=40),
    AttentionRule(0.125, chunk=64),
    AttentionRule(0.125, chunk=48, sinks=SINKS),
    AttentionRule(0.125),
]


@pytest.mark.parametrize("value_size", [64, 48])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_packs_and_their_gradients(
    rule: AttentionRule, value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 through the kernel, against float64 on the CPU."""
    calls = []
    kernel = attention.varlen_attention
    monkeypatch.setattr(
        attention, "varlen_attention", lambda *a, **k: calls.append(1) or kernel(*a, **k)
    )
    torch.manual_seed(0)
    lengths = [130, 17, 64, 1, 33]
    prefix = [-1, 0, 0, -1, -1]
    shapes = ((8, 64), (2, 64), (2, value_size))
    inputs = [torch.randn(sum(lengths), *shape).bfloat16() for shape in shapes]
    if rule.sinks is not None:
        inputs.append(rule.sinks.bfloat16())
    weight = torch.randn(sum(lengths), 8, value_size)
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        given = [x.to(device, dtype).requires_grad_() for x in inputs]
        asked = replace(rule, sinks=given[3] if rule.sinks is not None else None)
        layout = PackedLayout(lengths, starts_of(lengths, torch.device(device)), prefix)
        out = layout.attend(0, *given[:3], asked)
        grads = torch.autograd.grad((out * weight.to(out)).sum(), given)
        found.append([x.double().cpu() for x in (out, *grads)])
    assert calls
    for ours, want in zip(*found, strict=True):
        assert float((ours - want).norm()) < 0.02 * float(want.norm())


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "llama4", "mimo_v2", "nemotron"])
@pytest.mark.parametrize("cache", ["model", "fp8"])
def test_the_engine_says_what_transformers_says(name: str, cache: str) -> None:
    """Graphs and the decode kernel: log-probs of what was sampled, against float32 on the CPU."""
    model = CausalModel(make_architecture(name, dtype=torch.bfloat16, spread=2.0).cuda())
    assert model.verify() < 1e-5
    theirs = make_architecture(name, dtype=torch.bfloat16, spread=2.0).float()
    engine = NativeEngine(model, kv_gib=0.05, cache_precision=cache)
    prompt = tokens_of(9, 1, 259)
    asked = Sampling(max_new_tokens=40, temperature=1.0)
    for done in run(engine.generate(prompt, asked, key=1, n=3)):
        want = true_logprobs(theirs, [*prompt, *done.tokens])[len(prompt) - 1 :]
        gap = (torch.tensor(done.logprobs).double() - want).abs().mean()
        assert float(gap) < 0.06
