"""What must hold on a GPU.

Skips without one. bfloat16 is the default there: float32 masters, log-softmax in float32.
"""

from __future__ import annotations

import asyncio
import copy
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from reinforge.algorithms.build import build
from reinforge.backends.local import LocalBackend
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Totals, pack
from reinforge.core.constraint import Constraint
from reinforge.core.engine import Completion, Sampling
from reinforge.core.sample import Sample
from reinforge.engines.native import NativeEngine
from reinforge.engines.native.drafts import Speculation
from reinforge.models import head
from reinforge.models.answer_form import AnswerForm
from reinforge.models.causal import CausalModel
from reinforge.models.head import LogitRule, token_logprobs
from reinforge.models.tiny import tiny_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


def model(kind: str, dtype: torch.dtype) -> CausalModel:
    torch.manual_seed(0)
    module = (
        LlamaForCausalLM(LlamaConfig(**SHAPE))
        if kind == "llama"
        else Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    ).eval()
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                p.mul_(2)
    return CausalModel(module.to("cuda", dtype))


def prompts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(4, 1000, (n,)).tolist() for n in (1, 15, 16, 17, 60, 130)]


def rollouts(engine: NativeEngine, temperature: float, n: int = 4) -> list[Sample]:
    async def go() -> list[Sample]:
        results = await asyncio.gather(
            *(
                engine.generate(p, Sampling(48, temperature), key=i, n=n)
                for i, p in enumerate(prompts())
            )
        )
        samples = []
        for i, (prompt, completions) in enumerate(zip(prompts(), results, strict=True)):
            for j, c in enumerate(completions):
                length = len(prompt) + len(c.tokens)
                logprobs = torch.zeros(length)
                logprobs[len(prompt) :] = torch.tensor(c.logprobs)
                samples.append(
                    Sample(
                        f"{i}/{j}",
                        str(i),
                        f"{i}/{j}",
                        torch.tensor(prompt + c.tokens),
                        torch.arange(length) >= len(prompt),
                        logprobs,
                        torch.zeros(length, dtype=torch.int32),
                        reward=float(j % 2),
                    )
                )
        return samples

    return asyncio.run(go())


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_greedy_equals_transformers_in_float32(kind: str) -> None:
    ours = model(kind, torch.float32)
    reference = copy.deepcopy(ours.causal)
    reference.set_attn_implementation("sdpa")
    engine = NativeEngine(ours, stop_tokens=[3], kv_gib=0.1)

    async def go() -> list[list[int]]:
        return [(await engine.generate(p, Sampling(40, 0.0), key=0))[0].tokens for p in prompts()]

    for prompt, tokens in zip(prompts(), asyncio.run(go()), strict=True):
        ids = torch.tensor([prompt], device="cuda")
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=3,
            pad_token_id=0,
        )
        assert out[0, len(prompt) :].tolist() == tokens


def test_graphs_and_windows_in_flight_change_no_token() -> None:
    """Graphs, filters in them and looks one window late, in a cache that runs out, against single
    steps in one that does not.
    """
    settings = [
        Sampling(1),
        Sampling(200, 0.9),
        Sampling(60, 1.2, top_k=20),
        Sampling(90, 0.0),
        Sampling(150, 1.1, top_p=0.8, min_p=0.01),
        Sampling(7),
    ]

    async def go(engine: NativeEngine) -> list[list[int]]:
        jobs = [
            engine.generate(p, params, key=i, n=3)
            for i, (p, params) in enumerate(zip(prompts(), settings, strict=True))
        ]
        return [c.tokens for group in await asyncio.gather(*jobs) for c in group]

    ours = model("llama", torch.float32)
    plain = NativeEngine(ours, kv_gib=0.1)
    plain.decoder.graphs = False
    plain.decoder.ahead = 0
    want = asyncio.run(go(plain))
    engine = NativeEngine(ours, kv_gib=0.1)
    assert engine.decoder.graphs and engine.decoder.ahead == 1
    assert asyncio.run(go(engine)) == want
    filtered = {key[3] for key, _ in engine.decoder._captured}
    assert filtered == {False, True}
    engine.load({"blocks": 60})
    assert asyncio.run(go(engine)) == want
    assert engine.stats.preemptions > 0 and engine.decoder.captures > 0


def test_drafts_in_graphs_change_no_token() -> None:
    """Two epochs of the same greedy answers, through the fused forward; the second one is drafted
    by the first, as soon as few of them are left.
    """

    async def go(engine: NativeEngine) -> list[list[int]]:
        jobs = [
            engine.generate(p, Sampling(12 if i > 3 else 90, 0.0), key=i)
            for i, p in enumerate(prompts())
        ]
        return [c.tokens for group in await asyncio.gather(*jobs) for c in group]

    ours = model("llama", torch.float32)
    want = asyncio.run(go(NativeEngine(ours, kv_gib=0.1)))
    engine = NativeEngine(ours, kv_gib=0.1, speculation=Speculation(rows=4))
    assert engine.decoder.graphs and engine.decoder.fused is not None
    for _ in range(2):
        assert asyncio.run(go(engine)) == want
    assert {key[5] for key, _ in engine.decoder._captured} == {0, 3}
    assert engine.stats.draft_tokens > 2 * engine.stats.draft_steps


@pytest.mark.parametrize(
    ("dtype", "mean", "largest"), [(torch.float32, 1e-5, 2e-4), (torch.bfloat16, 0.02, 0.5)]
)
def test_engine_and_trainer_agree(dtype: torch.dtype, mean: float, largest: float) -> None:
    ours = model("qwen2", dtype)
    samples = rollouts(NativeEngine(ours, stop_tokens=[3], kv_gib=0.1), 0.8)
    gaps = []
    with torch.no_grad():
        for batch in pack(samples, 2048):
            trained, _ = ours.logprobs(batch.to(ours.device), temperature=0.8)
            gaps.append((trained.cpu() - batch.streams["behaviour"]).abs())
    gap = torch.cat(gaps)
    print(f"{dtype}: mean {gap.mean():.2e} max {gap.max():.2e}")
    assert gap.mean() < mean and gap.max() < largest


def test_gradient_does_not_depend_on_the_cut() -> None:
    ours = model("qwen2", torch.float32)
    samples = rollouts(NativeEngine(ours, stop_tokens=[3], kv_gib=0.1), 1.0)
    algorithm = build("grpo", max_new_tokens=48)
    norms = []
    for budget in (128, 100_000):
        backend = LocalBackend(
            ours, TrainConfig(steps=1, learning_rate=0.0, max_grad_norm=0.0), total_steps=1
        )
        batches = pack(samples, budget)
        algorithm.advantages(batches)
        backend.forward_backward(batches, algorithm.loss, Totals.of(batches, 48))
        norms.append(backend.step().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0


def test_bfloat16_masters_move_and_resume_exactly() -> None:
    ours = model("llama", torch.bfloat16)
    samples = rollouts(NativeEngine(ours, stop_tokens=[3], kv_gib=0.1), 1.0)
    algorithm = build("grpo", max_new_tokens=48)
    cfg = TrainConfig(steps=4, learning_rate=1e-6)

    def steps(backend: LocalBackend, count: int) -> None:
        for _ in range(count):
            batches = pack(samples, 1024)
            algorithm.advantages(batches)
            backend.forward_backward(batches, algorithm.loss, Totals.of(batches, 48))
            backend.step()

    backend = LocalBackend(ours, cfg, total_steps=4)
    before = {name: m.clone() for name, m in backend.optimizer.masters.items()}
    steps(backend, 2)
    assert all(
        not torch.equal(before[n], m)
        for n, m in backend.optimizer.masters.items()
        if m.ndim > 1 and "embed" not in n
    )
    saved = copy.deepcopy(backend.state())
    steps(backend, 2)
    again = LocalBackend(model("llama", torch.bfloat16), cfg, total_steps=4)
    again.load(saved)
    steps(again, 2)
    for name, tensor in backend.state().tensors.items():
        assert torch.equal(tensor.cpu(), again.state().tensors[name].cpu()), name


DATE = Constraint("regex", "(19|20)[0-9]{2}-(0[1-9]|1[0-2])")


def form_model(dtype: torch.dtype) -> CausalModel:
    """With a tokenizer: bytes, of which 2 ends an answer."""
    bare = model("qwen2", dtype)
    return CausalModel(bare.module, tiny_tokenizer(vocabulary=259))


@pytest.mark.parametrize(
    ("dtype", "mean", "largest"), [(torch.float32, 1e-5, 2e-4), (torch.bfloat16, 0.02, 0.5)]
)
def test_answers_of_a_given_form(dtype: torch.dtype, mean: float, largest: float) -> None:
    """In graphs, beside rows that are free: all of them match, the trainer finds the same log-probs
    under the same masks, and in float32 the others draw what they draw without company.
    """
    ours = form_model(dtype)

    async def go(constraint: Constraint | None) -> tuple[list[Completion], list[Completion]]:
        engine = NativeEngine(ours, stop_tokens=[2], kv_gib=0.1)
        free = engine.generate([70, 71], Sampling(40, ignore_eos=True), key=1, n=3)
        form = engine.generate([80, 81, 82], Sampling(40, 0.8, constraint=constraint), key=2, n=5)
        found = await asyncio.gather(free, form)
        assert engine.decoder.captures > 0
        return found[0], found[1]

    alone, _ = asyncio.run(go(None))
    beside, made = asyncio.run(go(DATE))
    if dtype == torch.float32:  # otherwise another number of rows may turn a draw
        assert [c.tokens for c in alone] == [c.tokens for c in beside]
    texts = [ours.tokenizer.decode(c.tokens, skip_special_tokens=True) for c in made]
    assert all(re.fullmatch(DATE.text, text) for text in texts), texts
    ours.form = AnswerForm(DATE, ours.tokenizer, 1000, [2])
    samples = []
    for i, c in enumerate(made):
        length = 3 + len(c.tokens)
        sampled = torch.arange(length) >= 3
        logprobs = torch.zeros(length)
        logprobs[3:] = torch.tensor(c.logprobs)
        tokens = torch.tensor([80, 81, 82, *c.tokens])
        versions = torch.where(sampled, 0, -1).int()
        samples.append(Sample(str(i), "g", str(i), tokens, sampled, logprobs, versions))
    [batch] = pack(samples, 2048)
    with torch.no_grad():
        trained, _ = ours.logprobs(batch.to(ours.device), temperature=0.8)
    gap = (trained.cpu() - batch.streams["behaviour"]).abs()
    print(f"{dtype}: mean {gap.mean():.2e} max {gap.max():.2e}")
    assert gap.mean() < mean and gap.max() < largest


def test_masks_of_whole_blocks_of_the_vocabulary() -> None:
    """The kernels walk over blocks of 8,192 and 4,096 words: those with nothing allowed, the first
    one above all, must count for nothing. Against the CPU: values, entropies, gradients.
    """
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(7, 32, generator=generator)
    weight = torch.randn(20000, 32, generator=generator) / 6
    targets = torch.randint(9000, 9040, (7,), generator=generator)
    masks = torch.zeros(7, 625, dtype=torch.int32)
    masks[:, 9000 // 32 : 9056 // 32] = -1
    masks[3] = -1
    found = []
    for device in ("cpu", "cuda"):
        parts = [part.to(device).requires_grad_() for part in (h.clone(), weight.clone())]
        logp, entropy = token_logprobs(
            *parts,
            None,
            targets.to(device),
            rule=LogitRule(softcap=5.0),
            entropy=True,
            entropy_gradient=True,
            allowed=masks.to(device),
        )
        assert entropy is not None
        (logp.sum() + entropy.sum()).backward()
        grads = [part.grad.cpu() for part in parts if part.grad is not None]
        found.append([logp.detach().cpu(), entropy.detach().cpu(), *grads])
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, atol=1e-5, rtol=1e-5)


def test_kept_logits_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks in bfloat16: kept as computed again, and the head's gradient near that of
    float64.
    """
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(5000, 64, generator=draw)
    weight = torch.randn(120_000, 64, generator=draw) / 8
    targets = torch.randint(0, 120_000, (5000,), generator=draw).cuda()
    told = torch.randn(5000, generator=draw).cuda()
    found = []
    for keep in (True, False):
        monkeypatch.setattr(head, "keeps_logits", lambda rows, weight, keep=keep: keep)
        parts = [part.cuda().bfloat16().requires_grad_() for part in (h, weight)]
        logp, _ = token_logprobs(*parts, None, targets)
        (logp * told).sum().backward()
        found.append([logp.detach(), *[part.grad for part in parts]])
    for kept, again in zip(*found, strict=True):
        assert kept is not None and again is not None and torch.equal(kept, again)
    real = [part.detach().double().requires_grad_() for part in parts]
    for rows in torch.arange(5000).split(500):
        z = real[0][rows] @ real[1].t()
        picked = z.log_softmax(-1).gather(1, targets[rows][:, None])[:, 0]
        (picked * told[rows]).sum().backward()
    for part, want in zip(found[0][1:], real, strict=True):
        assert part is not None and want.grad is not None
        gap = (part.double() - want.grad).norm() / want.grad.norm()
        assert float(gap) < 0.01
