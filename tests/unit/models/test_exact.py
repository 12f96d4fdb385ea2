"""`model.exact`: the bits of a token's forward do not depend on what runs beside it; so engine and
trainer agree to the bit.

Each part is compared with itself on other numbers of rows, and with plain torch; then whole models
and whole runs.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.tiny_runs import LORA, launch, lines
from helpers.toys import make_module, make_samples, tokens_of, train_config
from reinforge.backends.local import LocalBackend
from reinforge.config.adapter import AdapterConfig
from reinforge.config.schema import Config
from reinforge.core.batch import Batch, pack
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.engines.native import NativeEngine
from reinforge.models import (
    exact,
    exact_attention,
    exact_functions,
    exact_norm,
    exact_proof,
    exact_tiles,
)
from reinforge.models.adapters import add_adapter
from reinforge.models.attention import Segments, starts_of
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.causal import CausalModel
from reinforge.models.exact import RowWiseMode
from reinforge.models.head import LogitRule, exact_statistics, statistics, token_logprobs
from reinforge.models.load import load_model
from reinforge.plan.preflight import preflight

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Three threads cut work where no row or vector ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows_alone(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """f of a slice = the slice of f, whatever the slice."""
    whole = f(x)
    for a, n in (
        (0, 1),
        (7, 1),
        (len(x) - 1, 1),
        (3, 2),
        (5, 31),
        (32, 32),
        (1, 33),
        (11, len(x) - 20),
    ):
        assert torch.equal(f(x[a : a + n]), whole[a : a + n]), (a, n)


# the parts


# 2000 columns in bfloat16 take half a minute on a CPU that computes it in a plain loop
SHAPES = [
    (dtype, inner, outer)
    for dtype in DTYPES
    for inner, outer in (
        (32, 64),
        (33, 77),
        (896, 128),
        (128, 2000 if dtype.itemsize == 4 else 500),
    )
]


@pytest.mark.parametrize(("dtype", "inner", "outer"), SHAPES)
def test_linear(threads: int, dtype: torch.dtype, inner: int, outer: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(150, inner).to(dtype)
    w = torch.randn(outer, inner).to(dtype)
    b = torch.randn(outer).to(dtype)
    for bias in (b, None):
        rows_alone(lambda x, bias=bias: exact.linear(x, w, bias), x)
        want = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        torch.testing.assert_close(
            exact.linear(x, w, bias).double(),
            want,
            atol=1e-3 if dtype == torch.float32 else 0.5,
            rtol=1e-2,
        )


def test_linear_of_a_blas_that_knows_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the place in a tile mattered, rows would go one by one."""
    calls = []
    plain = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **k: (calls.append(len(a)), plain(a, b, **k))[1])
    x = torch.randn(5, 8)
    w = torch.randn(3, 8)
    monkeypatch.setattr(exact, "_place_is_free", lambda weight: False)
    torch.testing.assert_close(exact.linear(x, w), F.linear(x, w))
    assert calls == [1] * 5


@pytest.mark.parametrize("size", [16, 33, 896, 40_000])
def test_row_sums_and_norms(threads: int, size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(70, size)
    w = torch.randn(size)
    b = torch.randn(size)
    for f in (
        lambda x: exact.row_sum(x, -1),
        lambda x: exact.row_mean(x, dim=-1, keepdim=True),
        lambda x: exact.layer_norm(x, (size,), w, b),
        lambda x: exact.rms_norm(x, (size,), w, 1e-6),
    ):
        rows_alone(f, x)
    torch.testing.assert_close(
        exact.layer_norm(x, (size,), w, b), F.layer_norm(x, (size,), w, b), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        exact.rms_norm(x, (size,), w, 1e-6), F.rms_norm(x, (size,), w, 1e-6), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        exact.row_sum(x, -1).double(), x.double().sum(-1), atol=1e-2, rtol=1e-4
    )


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": lambda x: x.abs().log(),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log2": lambda x: torch.log2(x.abs()),
    "log10": lambda x: torch.log10(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "pow": lambda x: x.abs() ** -0.3,
    "pow_whole": lambda x: torch.pow(x, 5),
    "rpow": lambda x: 8.0**x,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "mish": F.mish,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "cos": torch.cos,
    "sin": torch.sin,
}


def test_every_exact_function_is_tried_here() -> None:
    assert {name.partition("_")[0] for name in ELEMENTWISE} == set(exact_functions.FUNCTIONS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(threads: int, dtype: torch.dtype, name: str) -> None:
    f = ELEMENTWISE[name]
    x = (torch.randn(331, 151, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    with RowWiseMode():
        rows_alone(f, x)
        got = f(x)
    # torch's own gelu is off by a few units of rounding of x (up to 13 here), by how many differs
    # between CPUs
    torch.testing.assert_close(got, f(x), atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_number_has_the_same_bits_wherever_it_stands(threads: int, name: str) -> None:
    """In every lane of a vector, in what is left over behind the last vector, at any address, and
    beside huge numbers.
    """
    f = ELEMENTWISE[name]
    x = torch.randn(67, generator=torch.Generator().manual_seed(1)) * 3
    huge = torch.tensor([1e4, -1e4, 3e38, -3e38]).repeat(67)[:67]
    with RowWiseMode():
        alone = torch.cat([f(x[i : i + 1].clone()) for i in range(67)])
        for shift in range(17):
            assert torch.equal(f(x.roll(shift)).roll(-shift), alone)
            assert torch.equal(f(torch.cat([huge[:shift], x]))[shift:], alone)
            assert torch.equal(f(torch.stack([x.roll(shift), huge], 1))[:, 0].roll(-shift), alone)
            # another address
            assert torch.equal(f(torch.cat([x, x])[shift : shift + 67]).roll(shift), alone)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_exact_functions_are_accurate(name: str) -> None:
    """Within 2.5 units in the last place of float32, near 0 and far from it; what is not finite is
    where torch has it.
    """
    f = ELEMENTWISE[name]
    torch_seed = torch.Generator().manual_seed(2)
    wide = torch.exp(torch.randn(20_000, generator=torch_seed) * 6)
    x = torch.cat(
        [
            torch.randn(20_000, generator=torch_seed) * 3,
            wide,
            -wide,
            torch.tensor([0.0, math.inf, math.nan]),
        ]
    )
    if name in ("cos", "sin"):
        x = x[x.abs() < 1e6]
    # torch's own loses its digits below -5, where 1 + erf and 1 + tanh are almost 0
    if "gelu" in name:
        x = x[x > -5]
    with RowWiseMode():
        got = f(x)
    want = f(x.double())
    rounded = want.float()
    finite = rounded.isfinite() & (rounded.abs() > 1e-37)
    unit = torch.nextafter(rounded.abs(), torch.tensor(math.inf)) - rounded.abs()
    assert ((got.double() - want).abs() / unit.double())[finite].max() < 2.5
    far = ~rounded.isfinite()
    torch.testing.assert_close(got[far], rounded[far], equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_exact_functions_have_torchs_gradient(name: str) -> None:
    f = ELEMENTWISE[name]
    x = torch.randn(40, generator=torch.Generator().manual_seed(3)).requires_grad_()
    with RowWiseMode():
        (got,) = torch.autograd.grad(f(x).sum(-1), x)
    (want,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.5, softcap=4.0)])
def test_statistics(threads: int, rule: LogitRule) -> None:
    torch.manual_seed(0)
    x = torch.randn(70, 9001) * 4
    targets = torch.randint(0, 9001, (70,))
    heat = torch.rand(70) + 0.5
    packed = torch.cat([x, targets[:, None].float(), heat[:, None]], 1)
    rows_alone(
        lambda p: torch.stack(
            exact_statistics(p[:, :-2], p[:, -2].long(), p[:, -1], rule, True), 1
        ),
        packed,
    )  # type: ignore[arg-type]
    without = exact_statistics(x, targets, heat, rule)
    assert (
        torch.equal(without[0], exact_statistics(x, targets, heat, rule, True)[0])
        and without[2] is None
    )
    want = statistics(x.double(), targets, heat.double(), rule, True)
    torch.testing.assert_close(without[0].double(), want[0].double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 64), (14, 2, 16), (6, 2, 96), (20, 1, 8)]
)
@pytest.mark.parametrize(
    "rule",
    [AttentionRule(0.2), AttentionRule(0.2, window=20), AttentionRule(0.2, window=70, softcap=3.0)],
    ids=str,
)
def test_attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    rule: AttentionRule,
) -> None:
    """In a pack, alone, continuing a cached prefix, and decoded from blocks."""
    torch.manual_seed(0)
    lengths = [1, 70, 3, 64, 130]
    starts = starts_of(lengths, CPU)
    q, k, v = (torch.randn(sum(lengths), n, size).to(dtype) for n in (heads, kv_heads, kv_heads))

    def packed(queries: list[int], keys: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        segments = exact_attention.ExactSegments(
            queries, starts_of(queries, CPU), keys, starts_of(keys, CPU)
        )
        return segments.attend(q, k, v, rule)

    got = packed(lengths, lengths, q, k, v)
    want = Segments(lengths, starts, lengths, starts).attend(
        q.double(), k.double(), v.double(), rule
    )
    torch.testing.assert_close(
        got.double(),
        want,
        atol=1e-5 if dtype == torch.float32 else 0.02,
        rtol=1e-5 if dtype == torch.float32 else 0.02,
    )
    own = slice(1, 71)
    tail = slice(1 + 41, 71)
    assert torch.equal(packed([70], [70], q[own], k[own], v[own]), got[own])
    assert torch.equal(packed([29], [70], q[tail], k[own], v[own]), got[tail])

    block = 16
    width = 9
    tables = torch.randperm(len(lengths) * width).view(len(lengths), width)
    keys, values = (
        torch.zeros(tables.numel() * block, kv_heads, size, dtype=dtype) for _ in range(2)
    )
    for s, n in enumerate(lengths):
        at = torch.arange(n)
        slots = tables[s, at // block] * block + at % block
        keys[slots], values[slots] = k[starts[s] : starts[s + 1]], v[starts[s] : starts[s + 1]]
    for back in (1, 3):
        cached = torch.tensor([max(0, n - back) for n in lengths])
        rows = starts[:-1].long() + cached
        decoded = exact_attention.attend(
            q[rows],
            keys,
            values,
            exact_tiles.plan_paged(cached),
            tables,
            block,
            rule,
        )
        assert torch.equal(decoded, got[rows])


def test_tiles_never_straddle_a_tile_of_keys() -> None:
    for groups in range(1, 65):
        for on_gpu in (False, True):
            rows, positions = exact_tiles.tile_shape(groups, on_gpu)
            assert exact_tiles.KEYS % positions == 0 and groups * positions <= rows
            # at most half of a tile is empty
            assert on_gpu or rows < max(2 * groups * positions, 8) + 1


# norms that have a kernel on a GPU


class LateRounding(nn.Module):
    """An RMS norm that rounds after its weight, as OLMo 2 does."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * wide).to(x.dtype)


def test_norms_are_known_by_their_arithmetic() -> None:
    module = make_module("qwen3")
    assert exact_norm.replace_norms(module) == 2 * 4 + 1  # two of a layer, of queries and of keys
    assert exact_norm.replace_norms(module) == 0
    assert exact_norm.replace_norms(make_module("gemma2")) == 0  # 1 + weight
    assert exact_norm.replace_norms(LateRounding(32)) == 0


def test_a_copied_norm_has_its_own_weight() -> None:
    module = make_module("llama")
    exact_norm.replace_norms(module)
    copied = copy.deepcopy(module)
    x = torch.randn(3, 32)
    before = module.model.norm(x)
    with torch.no_grad():
        copied.model.norm.weight.mul_(2)
        assert torch.equal(copied.model.norm(x), 2 * before)
    assert torch.equal(module.model.norm(x), before)


def test_a_mode_knows_that_it_is_active() -> None:
    assert not RowWiseMode.active()
    with RowWiseMode(), torch.device("cpu"):
        assert RowWiseMode.active()
    assert not RowWiseMode.active()


# what cannot be exact


def test_what_mixes_rows_is_refused() -> None:
    x = torch.randn(3, 4, 5)
    for f in (
        lambda: torch.bmm(x, x.transpose(1, 2)),
        lambda: x @ x.transpose(1, 2),
        lambda: x.mean(0),
        lambda: x.cumsum(-1),
        lambda: x.sum(),
        lambda: torch.einsum("abc,abd->acd", x, x),
        lambda: F.scaled_dot_product_attention(x, x, x),
        lambda: x.var(-1),
        lambda: torch.lerp(x, x, 0.3),
        lambda: x.clone().exp_(),
        lambda: x.abs() ** x,
    ):
        with RowWiseMode(), pytest.raises(InputError, match="model.exact"):
            f()
    with RowWiseMode():
        assert int(torch.arange(5).sum()) == 10 and torch.equal(
            torch.ones(2, 1) @ torch.ones(1, 3), torch.ones(2, 3)
        )


def test_names_are_spelt_right() -> None:
    places = (torch, F, Tensor, torch.linalg, torch._C._nn)
    assert [
        n
        for n in (*exact._REPLACED, *exact._REFUSED, *exact._REFUSED_ON_CPU)
        if not any(hasattr(p, n) for p in places)
    ] == []


class Mixing(nn.Module):
    """A layer that looks at its neighbours in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.amax(1, keepdim=True)


def test_the_proof_sees_a_layer_that_looks_around() -> None:
    model = CausalModel(make_module("llama"), exact=True)
    exact_proof.prove(model)
    model.trunk.layers[1].mlp.act_fn = Mixing()
    with pytest.raises(InputError, match="alone"):
        exact_proof.prove(model)
    with pytest.raises(InputError, match="depend on the rest of the batch"):
        exact_proof.prove(CausalModel(make_module("llama")))  # not exact: rounding


# whole models


def rollouts(
    model: CausalModel,
    n: int,
    lengths: tuple[int, ...],
    temperature: float = 0.8,
    new: int = 24,
    **kw: Any,
) -> list[Sample]:
    engine = NativeEngine(model, kv_gib=0.02, **kw)

    async def go() -> list[list[Any]]:
        sampling = Sampling(new, temperature, ignore_eos=True)
        return list(
            await asyncio.gather(
                *(
                    engine.generate(tokens_of(m, i), sampling, key=i, n=n)
                    for i, m in enumerate(lengths)
                )
            )
        )

    samples = []
    for i, group in enumerate(asyncio.run(go())):
        prompt = tokens_of(lengths[i], i)
        for j, c in enumerate(group):
            size = len(prompt) + len(c.tokens)
            logprobs = torch.cat([torch.zeros(len(prompt)), torch.tensor(c.logprobs)])
            samples.append(
                Sample(
                    f"{i}/{j}",
                    str(i),
                    f"{i}/{j}",
                    torch.tensor(prompt + c.tokens),
                    torch.arange(size) >= len(prompt),
                    logprobs,
                    torch.zeros(size, dtype=torch.int32),
                    reward=float(j % 2),
                )
            )
    return samples


ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "cohere"]


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        *((arch, torch.float32) for arch in ARCHITECTURES if arch not in ("gpt2", "cohere")),
        pytest.param("gpt2", torch.float32, marks=pytest.mark.long),
        pytest.param("cohere", torch.float32, marks=pytest.mark.long),
        ("llama", torch.bfloat16),
        # low precision is the same code whatever the architecture
        *(
            pytest.param(arch, torch.bfloat16, marks=pytest.mark.long)
            for arch in ARCHITECTURES
            if arch != "llama"
        ),
    ],
)
def test_engine_and_trainer_agree_to_the_bit(arch: str, dtype: torch.dtype) -> None:
    """Several batch compositions and group sizes, long prompts in pieces, every packing, with and
    without gradients.
    """
    model = CausalModel(make_module(arch).to(dtype), exact=True)
    for n, lengths, kw in (
        (3, (3, 15, 16, 17, 70), {}),
        (1, (33,), {}),
        (5, (2, 64), {"max_batch": 3, "prefix_cache": True}),
    ):
        # 18 tokens: past a block of 16
        samples = rollouts(model, n, lengths, new=18, **kw)
        for budget, share in ((1, False), (200, True), (100_000, False), (100_000, True)):
            for batch in pack(samples, budget, share=share):
                with torch.set_grad_enabled(share):
                    trained, _ = model.logprobs(batch, temperature=0.8, entropy=share)
                assert torch.equal(trained, batch.streams["behaviour"])
                assert float(trained.detach().std()) > 0.05


def test_with_three_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        model = CausalModel(
            make_module("gemma2", hidden_size=96, intermediate_size=200), exact=True
        )
        samples = rollouts(model, 3, (3, 17, 70), new=20)
        for budget in (100, 100_000):
            for batch in pack(samples, budget):
                assert torch.equal(
                    model.logprobs(batch, temperature=0.8)[0], batch.streams["behaviour"]
                )
    finally:
        torch.set_num_threads(before)


def test_tokens_do_not_depend_on_the_batch() -> None:
    """With equal logits and a draw that is a function of the sample, completions are the same in
    any company.
    """
    model = CausalModel(make_module("llama"), exact=True)
    together = {s.uid: s for s in rollouts(model, 2, (3, 15, 40))}
    alone = rollouts(model, 2, (3,))
    assert all(
        torch.equal(s.tokens, together[s.uid].tokens)
        and torch.equal(s.logprobs, together[s.uid].logprobs)
        for s in alone
    )


@pytest.mark.parametrize("greedy", [True, False])
def test_the_backend_finds_what_the_engine_said(greedy: bool) -> None:
    model = CausalModel(make_module("qwen2"), exact=True)
    samples = rollouts(model, 2, (3, 15, 40), temperature=0.0 if greedy else 0.7)
    backend = LocalBackend(
        model, train_config(), total_steps=1, temperature=1.0 if greedy else 0.7, reference=True
    )
    batches = pack(samples, 100)
    backend.annotate(batches, frozenset({"old", "reference"}))
    for batch in batches:
        assert torch.equal(batch.streams["old"], batch.streams["behaviour"])
        torch.testing.assert_close(
            batch.streams["reference"], batch.streams["old"], atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2"])
def test_gradients_are_the_ordinary_ones(arch: str) -> None:
    module = make_module(arch)
    batch = Batch.pack(make_samples((20, 5, 12, 3, 33)))
    found = []
    for on in (False, True):
        model = CausalModel(copy.deepcopy(module), exact=on)
        logprobs, entropy = model.logprobs(
            batch, temperature=0.7, entropy=True, entropy_gradient=True
        )
        assert entropy is not None
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        found.append(
            torch.cat([p.grad.flatten() for p in model.module.parameters() if p.grad is not None])
        )
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5


def test_head_gradient() -> None:
    torch.manual_seed(0)
    targets = torch.randint(0, 50, (40,))
    grads = []
    for on in (False, True):
        h, w, b = (
            torch.randn(*s, generator=torch.Generator().manual_seed(1)).requires_grad_()
            for s in ((40, 16), (50, 16), (50,))
        )
        token_logprobs(h, w, b, targets, temperature=0.7, exact=on)[0].sum().backward()
        grads.append((h.grad, w.grad, b.grad))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# configuration and whole runs


def test_loading_checks_and_checkpoints(make: Callable[..., Config]) -> None:
    """`load_model` proves exactness; gradient checkpointing runs layers again the same way and
    finds the same gradient.
    """
    grads = []
    for recompute in (False, True):
        model = load_model(
            make(
                "run",
                "grpo",
                "model.exact=true",
                f"model.gradient_checkpointing={str(recompute).lower()}",
            ).model
        )
        assert model.exact
        model.recompute(True)
        model.logprobs(Batch.pack(make_samples((20, 5, 33))), temperature=1.0)[0].sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.module.parameters()]))
    assert torch.equal(*grads)


def test_a_run_has_no_mismatch(make: Callable[..., Config]) -> None:
    """mismatch/max is 0.0 in every step of an exact run, with an adapter too; an ordinary one has
    rounding noise.
    """
    largest = {}
    for name, on, sections in (("exact", True, {}), ("plain", False, {}), ("lora", True, LORA)):
        cfg = make(
            name,
            "grpo",
            f"model.exact={str(on).lower()}",
            "rollout.temperature=0.9",
            "train.tokens_per_microbatch=64",
            **sections,
        )
        launch(cfg)
        steps = [m for m in lines(cfg) if "mismatch/max" in m]
        assert len(steps) == 3 and steps[-1]["train/grad_norm"] > 0
        largest[name] = max(m["mismatch/max"] for m in steps)
        assert on is False or all(
            m["mismatch/mean"] == 0.0 and m["mismatch/ratio/min"] == m["mismatch/ratio/max"] == 1.0
            for m in steps
        )
    assert largest["exact"] == largest["lora"] == 0.0 and 0 < largest["plain"] < 1e-4


def test_configuration(make: Callable[..., Config]) -> None:
    assert make("run").model.exact is False
    with pytest.raises(InputError, match=r"model.*exact.*compile"):
        make("run", "grpo", "model.exact=true", "model.compile=true")
    said = "\n".join(
        preflight(
            make(
                "run",
                "grpo",
                "model.exact=true",
                "algorithm.correction.name=tis",
                "algorithm.old=recompute",
            )
        ).warnings
    )
    assert (
        "algorithm.correction.name: model.exact leaves no mismatch" in said
        and "algorithm.old: model.exact" in said
    )
    assert "model.exact" not in "\n".join(
        preflight(make("run", "grpo", "algorithm.correction.name=tis")).warnings
    )


# ---- experts ----


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral"])
def test_experts_do_not_know_which_other_tokens_they_get(arch: str, lora: bool) -> None:
    """And what they compute is what they compute otherwise, gradients too; with an adapter on them
    as well.
    """
    module = make_module(arch)
    if lora:
        module = add_adapter(module, AdapterConfig(rank=4), seed=0)
        with torch.no_grad():
            for name, p in module.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.3, generator=torch.Generator().manual_seed(p.numel()))
    model = CausalModel(copy.deepcopy(module), exact=True)
    exact_proof.prove(model)
    samples = make_samples([12, 40, 5])
    found = []
    for one in (model, CausalModel(module)):
        logprobs, _ = one.logprobs(Batch.pack(samples), temperature=1.0)
        logprobs.sum().backward()
        grads = {n: p.grad for n, p in one.module.named_parameters() if p.grad is not None}
        found.append((logprobs.detach(), grads))
    (got, grads), (want, others) = found
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert grads.keys() == others.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, others[name], atol=1e-5, rtol=1e-3)
