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
from reinforge.models import exact_tiles, fused_decode
from reinforge.models.attention import KVCache, KVShape, Segments, rotate, starts_of
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.causal import CausalModel
from reinforge.models.exact_proof import prove
from reinforge.models.fused_decode import FusedDecode
from reinforge.models.norms import rms_norm

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
    from reinforge.models.kernels import exact_product

    torch.manual_seed(0)
    x, w, b = (
        torch.randn(*shape, device=DEVICE).to(dtype)
        for shape in ((rows, inner), (outer, inner), (outer,))
    )
    for bias in (b, None):
        want = torch.nn.functional.linear(
            x.double(), w.double(), None if bias is None else bias.double()
        )
        got = exact_product.matmul(x, w, bias)
        torch.testing.assert_close(
            got.double(),
            want,
            atol=1e-4 if dtype == torch.float32 else 0.05,
            rtol=1e-5 if dtype == torch.float32 else 0.01,
        )
        # however the weight lies in memory
        torch.testing.assert_close(exact_product.matmul(x, w.t().contiguous().t(), bias), got)


@pytest.mark.parametrize("size", [1, 7, 64, 896, 5000])
def test_row_sum(size: int) -> None:
    from reinforge.models.kernels import exact as exact_kernels

    x = torch.randn(9, size, device=DEVICE)
    torch.testing.assert_close(
        exact_kernels.row_sum(x).double(), x.double().sum(-1), atol=1e-3, rtol=1e-5
    )


def test_tiles_by_the_size_of_a_product() -> None:
    """Large ones where there are enough of them, small ones so that there are."""
    from reinforge.models.kernels.exact_product import LARGE, fitting_tile

    assert fitting_tile(20_000, 896) == LARGE and fitting_tile(512, 9728) == LARGE
    assert fitting_tile(512, 896)[:2] == (64, 64) and fitting_tile(100, 896)[:2] == (64, 32)
    assert fitting_tile(20, 9728)[:2] == (32, 64) and fitting_tile(17, 896)[:2] == (32, 32)
    assert fitting_tile(16, 9728)[:2] == (16, 64) and fitting_tile(1, 896)[:2] == (16, 32)


def test_an_example_shows_the_order_of_additions() -> None:
    """The same product, added up in two halves: other bits in many places, even after rounding."""
    from reinforge.models.kernels.exact_product import example

    x, weight = example(64, 64, 256, torch.bfloat16, torch.device("cpu"))
    wide = x.float() @ weight.float().t()
    halves = x[:, ::2].float() @ weight[:, ::2].float().t()
    halves += x[:, 1::2].float() @ weight[:, 1::2].float().t()
    assert (wide.bfloat16() != halves.bfloat16()).float().mean() > 0.001
    assert wide.abs().mean() < 0.1 * (x.float().abs() @ weight.float().abs().t()).mean()


@gpu
def test_tiles_and_the_library_have_the_bits_of_the_largest_tile() -> None:
    """What was seen once holds for other numbers, and for weights that lie elsewhere."""
    from reinforge.models.kernels import exact_product

    torch.manual_seed(0)
    half = torch.bfloat16
    asked = 0
    for rows, inner, outer in ((512, 896, 9728), (512, 4864, 896), (64, 896, 1152), (3, 896, 896)):
        assert exact_product.tiles_agree(inner, half, torch.device("cuda", 0))
        x = torch.randn(rows, inner, device="cuda", dtype=half)
        weight = torch.randn(outer + 128, inner, device="cuda", dtype=half)[128:]
        bias = torch.randn(outer, device="cuda", dtype=half)
        for some in (None, bias):
            want = exact_product._in_tiles(x, weight, some, exact_product.LARGE)
            assert torch.equal(exact_product.matmul(x, weight, some), want)
            assert torch.equal(exact_product.step_product(x, weight, some), want)
            asked += exact_product.library_agrees(x, weight, some)
    print("the library's products that are chains:", asked, "of 8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 33, 64, 896, 3000])
def test_norm(dtype: torch.dtype, size: int) -> None:
    """Right, and the same bits for a row wherever it lies: alone, at another address, between
    others.
    """
    from reinforge.models.kernels import exact_layer

    torch.manual_seed(0)
    heads = torch.randn(5, 7, size, device=DEVICE).to(dtype)
    weight = torch.randn(size, device=DEVICE).to(dtype)
    got = exact_layer.add_norm(heads, None, weight, 1e-6)
    want = rms_norm(heads.double().cpu(), weight.double().cpu(), 1e-6)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(got.double().cpu(), want, **close)
    for part in (slice(2, 5), slice(0, 1), slice(3, 7)):
        some = exact_layer.add_norm(heads[:, part], None, weight, 1e-6)
        assert torch.equal(some, got[:, part])
        one = exact_layer.add_norm(heads[1, part], None, weight, 1e-6)
        assert torch.equal(one, got[1, part])
    moved = torch.cat([heads.flatten()[:1], heads.flatten()])[1:].view(heads.shape)
    assert torch.equal(exact_layer.add_norm(moved, None, weight, 1e-6), got)
    assert exact_layer.add_norm(heads[:0], None, weight, 1e-6).shape == (0, 7, size)
    # what is added first
    x = heads[0].clone()
    delta = torch.randn(7, size, device=DEVICE).to(dtype)
    total = x + delta
    normed = exact_layer.add_norm(x, delta, weight, 1e-6)
    assert torch.equal(x, total)
    assert torch.equal(normed, exact_layer.add_norm(total, None, weight, 1e-6))


def test_gradients_of_a_norm() -> None:
    from reinforge.models.exact_norm import _ScaledNorm

    torch.manual_seed(0)
    found = []
    x = torch.randn(2, 5, 40, device=DEVICE)
    weight = torch.randn(40, device=DEVICE)
    g = torch.randn(2, 5, 40, device=DEVICE)
    for f in (_ScaledNorm.apply, rms_norm):
        inputs = [part.clone().requires_grad_() for part in (x, weight)]
        out = f(*inputs, 1e-5)
        found.append([out.detach(), *torch.autograd.grad(out, inputs, g)])
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_has_the_bits_of_the_gate(dtype: torch.dtype) -> None:
    from reinforge.models.kernels import layer

    torch.manual_seed(0)
    x = (torch.randn(9, 2 * 1100, device=DEVICE) * 3).to(dtype)
    gate, up = x.chunk(2, 1)
    assert torch.equal(layer.silu_mul(x), layer.silu(gate) * up)
    want = torch.nn.functional.silu(gate.double().cpu())
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.01}
    torch.testing.assert_close(layer.silu(gate).double().cpu(), want, **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 8), (14, 2, 64), (6, 2, 96)])
def test_rotation_has_the_bits_of_torch(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> None:
    from reinforge.models.kernels.paged_attention import rotate_and_store

    torch.manual_seed(0)
    cached = torch.tensor([0, 17, 31, 5], device=DEVICE)
    tables = torch.randperm(8, device=DEVICE).view(4, 2)
    joint = torch.randn(4, heads + 2 * kv_heads, size, device=DEVICE).to(dtype)
    q, k, v = joint.split([heads, kv_heads, kv_heads], 1)
    angles = torch.randn(32, size, device=DEVICE)
    rope = (angles.cos().to(dtype), angles.sin().to(dtype))
    caches = [
        KVCache.allocate([KVShape(kv_heads, size, size)], 8, 16, dtype, torch.device(DEVICE))
        for _ in range(2)
    ]
    got, got_k = rotate_and_store(
        q, k, v, caches[0].keys[0], caches[0].values[0], tables, cached, rope
    )
    cos, sin = (table[cached] for table in rope)
    assert torch.equal(got, rotate(q, cos, sin)) and torch.equal(got_k, rotate(k, cos, sin))
    block = tables.gather(1, (cached // 16)[:, None])[:, 0]
    caches[1].write(0, block * 16 + cached % 16, rotate(k, cos, sin), v)
    assert torch.equal(caches[0].keys[0], caches[1].keys[0])
    assert torch.equal(caches[0].values[0], caches[1].values[0])
    # told where each token goes, as those of prompts are
    flat = [torch.zeros_like(part) for part in (caches[0].keys[0], caches[0].values[0])]
    again, again_k = rotate_and_store(q, k, v, *flat, block * 16 + cached % 16, cached, rope)
    assert torch.equal(again, got) and torch.equal(again_k, got_k)
    assert torch.equal(flat[0], caches[1].keys[0]) and torch.equal(flat[1], caches[1].values[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (14, 2, 64)])
def test_new_keys_are_turned_stored_and_seen(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one kernel, with the bits of two: the first and the last place of a block among others."""
    from reinforge.models.kernels import exact as exact_kernels
    from reinforge.models.kernels.paged_attention import rotate_and_store

    monkeypatch.setattr(exact_tiles, "CHUNK", 64)
    torch.manual_seed(0)
    cached = torch.tensor([0, 79, 64, 5, 48], device=DEVICE)
    tables = torch.randperm(25, device=DEVICE).view(5, 5)
    joint = torch.randn(5, heads + 2 * kv_heads, size, device=DEVICE).to(dtype)
    q, k, v = joint.split([heads, kv_heads, kv_heads], 1)
    angles = torch.randn(80, size, device=DEVICE)
    rope = (angles.cos().to(dtype), angles.sin().to(dtype))
    before = [torch.randn(25, 16, kv_heads, size, device=DEVICE).to(dtype) for _ in range(2)]
    plan = exact_tiles.plan_paged(cached)
    found = []
    for together, parts in ((False, 1), (True, 1), (True, 2)):
        keys, values = (part.clone() for part in before)
        turned = q
        new = exact_kernels.NewKeys(k, v, *rope)
        if not together:
            turned, _ = rotate_and_store(q, k, v, keys, values, tables, cached, rope)
            new = None
        flat = (part.view(-1, kv_heads, size) for part in (keys, values))
        out = exact_kernels.attend(turned, *flat, plan, tables, 16, AttentionRule(0.2), new, parts)
        found.append((out, keys, values))
    for two, one, split in zip(*found, strict=True):
        assert torch.equal(two, one) and torch.equal(two, split)


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
@pytest.mark.parametrize(
    "rule",
    [AttentionRule(0.2), AttentionRule(0.2, window=20), AttentionRule(0.2, softcap=3.0)],
    ids=str,
)
def test_attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    rule: AttentionRule,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pack, a pack whose segments continue others, and decoding from cache blocks, by one program
    or by one for each chunk of keys: right, and the same bits.
    """
    from reinforge.models.kernels import exact as exact_kernels

    monkeypatch.setattr(exact_tiles, "CHUNK", 64)
    torch.manual_seed(0)
    lengths = [1, 70, 3, 64, 130] if DEVICE == "cuda" else [1, 70, 3]
    total = sum(lengths)
    q, k, v = (
        torch.randn(total, n, size, device=DEVICE).to(dtype) for n in (heads, kv_heads, kv_heads)
    )
    starts = starts_of(lengths, torch.device(DEVICE))
    positions = exact_tiles.tile_shape(heads // kv_heads, True)[1]

    def packed(
        lengths: list[int], key_lengths: list[int], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        device = torch.device(DEVICE)
        segments = Segments(
            lengths, starts_of(lengths, device), key_lengths, starts_of(key_lengths, device)
        )
        return exact_kernels.attend(
            q, k, v, exact_tiles.plan_segments(segments, positions), None, 1, rule
        )

    got = packed(lengths, lengths, q, k, v)
    want = Segments(lengths, starts.cpu(), lengths, starts.cpu()).attend(
        q.cpu().double(), k.cpu().double(), v.cpu().double(), rule
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
        for parts in (1, 4):
            decoded = exact_kernels.attend(
                q[rows],
                keys,
                values,
                exact_tiles.plan_paged(cached),
                tables,
                16,
                rule,
                parts=parts,
            )
            assert torch.equal(decoded, got[rows])


def test_so_many_programs_share_the_keys_of_a_sequence() -> None:
    programs = exact_tiles.chunk_programs
    assert [programs(4, 2, n) for n in (1024, 1025, 4000, 8000)] == [1, 2, 4, 8]
    assert [programs(512, 2, n) for n in (1024, 8000, 30_000)] == [1, 1, 32]


@gpu
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (28, 4, 128)])
def test_long_contexts_are_shared_among_programs(heads: int, kv_heads: int, size: int) -> None:
    """The bits of a pack, whether a program has all chunks of a sequence or one."""
    from reinforge.models.kernels import exact as exact_kernels

    torch.manual_seed(0)
    lengths = [1024, 1025, 3000, 70]
    device = torch.device("cuda")
    q, k, v = (
        torch.randn(sum(lengths), n, size, device=device, dtype=torch.bfloat16)
        for n in (heads, kv_heads, kv_heads)
    )
    starts = starts_of(lengths, device)
    segments = Segments(lengths, starts, lengths, starts)
    positions = exact_tiles.tile_shape(heads // kv_heads, True)[1]
    plan = exact_tiles.plan_segments(segments, positions)
    packed = exact_kernels.attend(q, k, v, plan, None, 1, AttentionRule(0.1))
    (keys, tables), (values, _) = cache_of(k, lengths, 16), cache_of(v, lengths, 16)
    rows = starts[1:].long() - 1
    cached = torch.tensor(lengths, device=device) - 1
    plan = exact_tiles.plan_paged(cached)
    for parts in (1, 4, 8):
        got = exact_kernels.attend(
            q[rows], keys, values, plan, tables, 16, AttentionRule(0.1), parts=parts
        )
        assert torch.equal(got, packed[rows])


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), [(896, 128), (896, 4864), (4864, 896), (1000, 33)])
def test_a_row_of_a_product_is_alone(dtype: torch.dtype, inner: int, outer: int) -> None:
    from reinforge.models.kernels import exact as exact_kernels
    from reinforge.models.kernels import exact_product

    torch.manual_seed(0)
    x, w, b = (
        torch.randn(*shape, device="cuda").to(dtype)
        for shape in ((2000, inner), (outer, inner), (outer,))
    )
    whole = exact_product.matmul(x, w, b)
    for a, n in ((0, 1), (5, 1), (1999, 1), (3, 16), (100, 129), (777, 512)):
        assert torch.equal(exact_product.matmul(x[a : a + n], w, b), whole[a : a + n])
    # layers that are computed jointly
    wider = exact_product.matmul(x, torch.cat([w[:7], w, w]), torch.cat([b[:7], b, b]))
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
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**SHAPE, **few, head_dim=64)),
        "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(
                **SHAPE,
                **few,
                head_dim=64,
                num_experts=8,
                num_experts_per_tok=3,
                moe_intermediate_size=96,
                norm_topk_prob=True,
            )
        ),
        "qwen3_5": lambda: t.Qwen3_5ForCausalLM(
            t.Qwen3_5TextConfig(
                **SHAPE,
                **few,
                head_dim=64,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=32,
                linear_value_head_dim=64,
                layer_types=["linear_attention", "full_attention", "linear_attention"],
            )
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
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "qwen3_moe", "qwen3_5"])
def test_engine_and_trainer_agree_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    model = make(kind, dtype)
    prove(model)
    engine = NativeEngine(model, stop_tokens=[3], kv_gib=0.1)
    assert model.exact and engine.decoder.graphs
    assert (engine.decoder.fused is None) == (kind in ("gemma2", "qwen3_5"))
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_the_fused_forward_has_the_bits_of_the_modules_own(kind: str, dtype: torch.dtype) -> None:
    """For few sequences and many; `FusedDecode.of` tries two numbers of them only."""
    model = make(kind, dtype)
    fused = FusedDecode.of(model)
    assert fused is not None
    for rows in (1, 2, 16, 17, 64, 65, 129, 300):
        layouts = [fused_decode.trial(fused.shapes, dtype, model.device, rows) for _ in range(2)]
        tokens = torch.arange(rows, device="cuda") + 5
        with torch.no_grad():
            got = fused.hidden(tokens, layouts[0])
            want = model.hidden(tokens, layouts[1].cached, layouts[1])
        assert torch.equal(got, want), rows
        for a, b in zip(layouts[0].cache.keys, layouts[1].cache.keys, strict=True):
            assert torch.equal(a, b)


@gpu
def test_what_a_sequence_says_does_not_depend_on_the_others() -> None:
    model = make("qwen2", torch.bfloat16)
    engine = NativeEngine(model, stop_tokens=[3], kv_gib=0.2)
    lengths = (17, 1, 60, 130)
    want = rollouts(engine, 0.9, 1, lengths)
    for n in (2, 9, 40):
        found = rollouts(engine, 0.9, n, lengths)
        for i, sample in enumerate(want):
            assert torch.equal(found[i * n].tokens, sample.tokens)
            assert torch.equal(found[i * n].logprobs, sample.logprobs)


@gpu
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_drafts_change_no_bit(kind: str) -> None:
    model = make(kind, torch.bfloat16)
    lengths = (1, 15, 16, 17, 60, 130)
    engines = [
        NativeEngine(model, stop_tokens=[3], kv_gib=0.1, speculation=speculation)
        for speculation in (None, Speculation(rows=None))
    ]
    # few enough that drafts are not given up before the second round
    want = rollouts(engines[0], 0.8, 2, lengths)
    for _ in range(2):
        found = rollouts(engines[1], 0.8, 2, lengths)
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
