"""`model.exact` on a GPU: the Triton kernels against plain torch (also in Triton's interpreter, see
conftest.py), the bits of a row whatever runs beside it, and the whole: log-probs of the engine,
through CUDA graphs, equal those of the training forward bit for bit.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os

import pytest
import torch
from torch import Tensor

from helpers import needs
from reinforge.algorithms.build import build
from reinforge.backends.local import LocalBackend
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Totals, pack
from reinforge.core.engine import Sampling
from reinforge.core.sample import Sample
from reinforge.engines.native import NativeEngine
from reinforge.engines.native.drafts import Speculation
from reinforge.models import exact_tiles
from reinforge.models.attention import Segments, starts_of
from reinforge.models.causal import CausalModel
from reinforge.models.exact_proof import prove

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = needs.unless(
    importlib.util.find_spec("triton") is not None,
    "triton",
    "not installed: pip install 'reinforge[kernels]'",
)
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inner", "outer"), [(1, 64, 64), (5, 96, 200), (129, 200, 33), (300, 128, 257)]
)
def test_matmul(dtype: torch.dtype, rows: int, inner: int, outer: int) -> None:
    from reinforge.models.kernels import exact as exact_kernels

    torch.manual_seed(0)
    x, w, b = (
        torch.randn(*shape, device=DEVICE).to(dtype)
        for shape in ((rows, inner), (outer, inner), (outer,))
    )
    for bias in (b, None):
        want = torch.nn.functional.linear(
            x.double(), w.double(), None if bias is None else bias.double()
        )
        got = exact_kernels.matmul(x, w, bias)
        torch.testing.assert_close(
            got.double(),
            want,
            atol=1e-4 if dtype == torch.float32 else 0.05,
            rtol=1e-5 if dtype == torch.float32 else 0.01,
        )
        # however the weight lies in memory
        torch.testing.assert_close(exact_kernels.matmul(x, w.t().contiguous().t(), bias), got)


@pytest.mark.parametrize("size", [1, 7, 64, 896, 5000])
def test_row_sum(size: int) -> None:
    from reinforge.models.kernels import exact as exact_kernels

    x = torch.randn(9, size, device=DEVICE)
    torch.testing.assert_close(
        exact_kernels.row_sum(x).double(), x.double().sum(-1), atol=1e-3, rtol=1e-5
    )


def cache_of(rows: Tensor, lengths: list[int], block: int) -> tuple[Tensor, Tensor]:
    """Keys of several sequences scattered over cache blocks, [blocks * block, K, D], and their
    tables.
    """
    width = max(-(-n // block) for n in lengths)
    order = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(0)).view(
        len(lengths), width
    )
    out = torch.zeros(len(lengths) * width * block, *rows.shape[1:], dtype=rows.dtype)
    begin = 0
    for s, n in enumerate(lengths):
        at = torch.arange(n)
        out[order[s, at // block] * block + at % block] = rows[begin : begin + n].cpu()
        begin += n
    return out.to(rows.device), order.to(rows.device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 64), (14, 2, 64), (6, 2, 96), (8, 1, 128)]
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 3.0)])
def test_attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """A pack, a pack whose segments continue others, and decoding from cache blocks: right, and the
    same bits.
    """
    from reinforge.models.kernels import exact as exact_kernels

    torch.manual_seed(0)
    lengths = [1, 70, 3, 64, 130] if DEVICE == "cuda" else [1, 70, 3]
    total = sum(lengths)
    q, k, v = (
        torch.randn(total, n, size, device=DEVICE).to(dtype) for n in (heads, kv_heads, kv_heads)
    )
    starts = starts_of(lengths, torch.device(DEVICE))
    positions = exact_tiles.tile_shape(heads // kv_heads, True)[1]
    options = (0.2, window or 0, softcap or 0.0)

    def packed(
        lengths: list[int], key_lengths: list[int], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        device = torch.device(DEVICE)
        segments = Segments(
            lengths, starts_of(lengths, device), key_lengths, starts_of(key_lengths, device)
        )
        return exact_kernels.attend(
            q, k, v, exact_tiles.plan_segments(segments, positions), None, 1, *options
        )

    got = packed(lengths, lengths, q, k, v)
    want = Segments(lengths, starts.cpu(), lengths, starts.cpu()).attend(
        q.cpu().double(), k.cpu().double(), v.cpu().double(), 0.2, window, softcap
    )
    torch.testing.assert_close(
        got.cpu().double(),
        want,
        atol=1e-4 if dtype == torch.float32 else 0.03,
        rtol=1e-4 if dtype == torch.float32 else 0.02,
    )

    long = slice(1, 71)  # the second segment
    alone = packed([70], [70], q[long], k[long], v[long])
    assert torch.equal(alone, got[long])
    end = slice(1 + 41, 71)
    # its first 41 tokens came earlier
    assert torch.equal(packed([29], [70], q[end], k[long], v[long]), got[end])

    # the last and an earlier query of every segment
    for take in (lambda n: n, lambda n: max(1, n - 2)):
        rows = torch.tensor(
            [int(starts[s]) + take(n) - 1 for s, n in enumerate(lengths)], device=DEVICE
        )
        cached = torch.tensor([take(n) - 1 for n in lengths], device=DEVICE)
        (keys, tables), (values, _) = cache_of(k, lengths, 16), cache_of(v, lengths, 16)
        decoded = exact_kernels.attend(
            q[rows], keys, values, exact_tiles.plan_paged(cached), tables, 16, *options
        )
        assert torch.equal(decoded, got[rows])


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), [(896, 128), (896, 4864), (4864, 896), (1000, 33)])
def test_a_row_of_a_product_is_alone(dtype: torch.dtype, inner: int, outer: int) -> None:
    from reinforge.models.kernels import exact as exact_kernels

    torch.manual_seed(0)
    x, w, b = (
        torch.randn(*shape, device="cuda").to(dtype)
        for shape in ((2000, inner), (outer, inner), (outer,))
    )
    whole = exact_kernels.matmul(x, w, b)
    for a, n in ((0, 1), (5, 1), (1999, 1), (3, 16), (100, 129), (777, 512)):
        assert torch.equal(exact_kernels.matmul(x[a : a + n], w, b), whole[a : a + n])
    # layers that are computed jointly
    wider = exact_kernels.matmul(x, torch.cat([w[:7], w, w]), torch.cat([b[:7], b, b]))
    assert torch.equal(wider[:, 7 : 7 + outer], whole) and torch.equal(wider[:, 7 + outer :], whole)
    sums = exact_kernels.row_sum(x)
    assert all(
        torch.equal(exact_kernels.row_sum(x[a : a + n]), sums[a : a + n])
        for a, n in ((0, 1), (5, 1), (100, 129))
    )


def make(kind: str, dtype: torch.dtype, exact: bool = True) -> CausalModel:
    import transformers as t

    torch.manual_seed(0)
    few = {"num_attention_heads": 4, "num_key_value_heads": 2}
    make = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SHAPE, **few)),
        "qwen2": lambda: t.Qwen2ForCausalLM(
            t.Qwen2Config(**SHAPE, num_attention_heads=14, num_key_value_heads=2, head_dim=64)
        ),
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(
                **SHAPE,
                **few,
                head_dim=96,
                sliding_window=40,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=8.0,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            )
        ),
    }
    module = make[kind]().eval()
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                p.mul_(2)
    return CausalModel(module.to("cuda", dtype), exact=exact)


def rollouts(
    engine: NativeEngine, temperature: float, n: int, lengths: tuple[int, ...]
) -> list[Sample]:
    torch.manual_seed(1)
    prompts = [torch.randint(4, 1000, (length,)).tolist() for length in lengths]

    async def go() -> list[Sample]:
        results = await asyncio.gather(
            *(
                engine.generate(p, Sampling(48, temperature), key=i, n=n)
                for i, p in enumerate(prompts)
            )
        )
        samples = []
        for i, (prompt, completions) in enumerate(zip(prompts, results, strict=True)):
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


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_engine_and_trainer_agree_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    model = make(kind, dtype)
    prove(model)
    engine = NativeEngine(model, stop_tokens=[3], kv_gib=0.1)
    assert model.exact and engine.decoder.graphs
    for n, lengths in ((4, (1, 15, 16, 17, 60, 130)), (1, (130,)), (9, (70, 5))):
        samples = rollouts(engine, 0.8, n, lengths)
        for budget in (1, 300, 100_000):
            for share in (False, True):
                for batch in pack(samples, budget, share=share):
                    for grad in (False, True):  # joint layers or each its own
                        with torch.set_grad_enabled(grad):
                            trained, _ = model.logprobs(
                                batch.to(model.device), temperature=0.8, entropy=grad
                            )
                        assert torch.equal(trained.cpu(), batch.streams["behaviour"])
    assert engine.decoder.captures > 0


@gpu
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_drafts_change_no_bit(kind: str) -> None:
    model = make(kind, torch.bfloat16)
    lengths = (1, 15, 16, 17, 60, 130)
    engines = [
        NativeEngine(model, stop_tokens=[3], kv_gib=0.1, speculation=speculation)
        for speculation in (None, Speculation(rows=None))
    ]
    want = rollouts(engines[0], 0.8, 4, lengths)
    for _ in range(2):
        found = rollouts(engines[1], 0.8, 4, lengths)
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a.tokens, b.tokens)
            assert torch.equal(a.logprobs, b.logprobs)
    assert engines[1].stats.draft_tokens > engines[1].stats.draft_steps


@gpu
def test_a_training_step_reports_no_mismatch() -> None:
    algorithm = build("grpo", max_new_tokens=48)
    found = {}
    for exact in (False, True):
        model = make("qwen2", torch.bfloat16, exact)
        backend = LocalBackend(
            model,
            TrainConfig(steps=1, learning_rate=0.0, max_grad_norm=0.0, tokens_per_microbatch=1024),
            total_steps=1,
        )
        samples = rollouts(
            NativeEngine(model, stop_tokens=[3], kv_gib=0.1), 1.0, 4, (1, 17, 60, 130)
        )
        batches = pack(samples, 1024, share=backend.share)
        algorithm.advantages(batches)
        found[exact] = (
            backend.forward_backward(batches, algorithm.loss, Totals.of(batches, 48))
            | backend.step().metrics()
        )
    assert found[True]["mismatch/max"] == 0.0 and found[False]["mismatch/max"] > 0.0


@gpu
def test_gradients_are_the_ordinary_ones() -> None:
    grads = []
    for exact in (False, True):
        model = make("gemma2", torch.float32, exact)
        torch.manual_seed(2)
        samples = [
            Sample.from_tokens(
                f"{i}", torch.randint(4, 1000, (n,)).tolist(), [False] + [True] * (n - 1)
            )
            for i, n in enumerate((90, 64, 7))
        ]
        for batch in pack(samples, 100_000):
            model.logprobs(batch.to(model.device), temperature=0.9)[0].sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.module.parameters()]))
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 1e-4
