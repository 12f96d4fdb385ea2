"""Products in FP8: the numbers, the product, and a module that multiplies so. The kernels are in
tests/gpu.
"""

from __future__ import annotations

import copy

import pytest
import torch

from helpers.toys import make_model, make_module
from reinforge.config.adapter import AdapterConfig
from reinforge.core.errors import InputError
from reinforge.models import fp8, fp8_layers, fused_decode
from reinforge.models.adapters import add_adapter
from reinforge.models.attention import KVCache, KVShape, PagedLayout, PrefillLayout
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.causal import CausalModel
from reinforge.models.fp8 import Fp8Rows
from reinforge.models.fp8_layers import Fp8Layers
from reinforge.models.fused_decode import FusedDecode
from reinforge.models.fused_linear import join


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- numbers ----


def test_the_largest_number_of_a_row_is_kept_and_the_others_lose_a_sixteenth_at_most() -> None:
    x = normal(20, 300) * torch.logspace(-6, 6, 20)[:, None]
    rows = Fp8Rows.of(x)
    assert rows.values.dtype == torch.float8_e4m3fn and rows.scale.shape == (20,)
    largest = x.abs().amax(1)
    torch.testing.assert_close(rows.scale, largest / 448)
    torch.testing.assert_close(rows.plain().abs().amax(1), largest, rtol=1e-6, atol=0)
    # three bits behind the first one: half of an eighth; below 2^-6 scales the steps are equal
    bound = torch.maximum(x.abs() / 16, rows.scale[:, None] * 2.0**-10)
    assert ((rows.plain() - x).abs() <= bound * 1.001).all()
    # and not better than that: there are four bits
    assert ((rows.plain() - x).abs() / x.abs()).max() > 0.05


def test_zeros_are_zeros_and_bfloat16_rows_are_quantised_alike() -> None:
    assert (Fp8Rows.of(torch.zeros(2, 16)).plain() == 0).all()
    x = normal(4, 64).bfloat16()
    assert torch.equal(Fp8Rows.of(x).values.float(), Fp8Rows.of(x.float()).values.float())


def test_new_numbers_go_into_the_same_memory() -> None:
    rows = Fp8Rows.empty(6, 32, torch.device("cpu"))
    places = rows.values.data_ptr(), rows.scale.data_ptr()
    for seed in range(2):
        x = normal(6, 32, seed=seed)
        rows.set(x)
        assert torch.equal(rows.plain(), Fp8Rows.of(x).plain())
    assert places == (rows.values.data_ptr(), rows.scale.data_ptr())
    half = rows.part(2, 4)
    half.set(normal(2, 32, seed=9))
    assert torch.equal(rows.plain()[2:4], half.plain())


# ---- the product ----


@pytest.mark.parametrize(("tokens", "inner", "outer"), [(1, 32, 48), (7, 200, 33)])
def test_the_product_is_that_of_the_quantised_numbers(tokens: int, inner: int, outer: int) -> None:
    x = Fp8Rows.of(normal(tokens, inner))
    weight = Fp8Rows.of(normal(outer, inner, seed=1))
    bias = normal(outer, seed=2)
    want = x.plain(torch.float64) @ weight.plain(torch.float64).t() + bias.double()
    got = fp8.product(x, weight, bias, torch.float32)
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-5)
    assert fp8.product(x, weight, None, torch.bfloat16).dtype == torch.bfloat16


def test_errors_of_many_products_add_up_as_noise() -> None:
    """Each factor is off by 2.6% on average (root of the mean square), so a sum is off by 3.7%."""
    x = normal(64, 1024)
    weight = normal(256, 1024, seed=1)
    want = x @ weight.t()
    got = fp8.product(Fp8Rows.of(x), Fp8Rows.of(weight), None, torch.float32)
    error = float((got - want).norm() / want.norm())
    assert 0.03 < error < 0.045


def test_weights_of_a_family_are_quantised_by_their_rows_and_by_their_columns() -> None:
    weights = [normal(6, 32) * 5, normal(3, 32, seed=1)]
    every = torch.cat(weights)
    for got, want in (
        (Fp8Rows.of_rows(weights), Fp8Rows.of(every)),
        (Fp8Rows.of_rows(weights[:1]), Fp8Rows.of(weights[0])),
        (Fp8Rows.of_columns(weights), Fp8Rows.of(every.t())),
    ):
        assert torch.equal(got.values.float(), want.values.float())
        assert torch.equal(got.scale, want.scale)
    # one scale for a column, whichever weight has its largest number
    largest = every.abs().amax(0)
    torch.testing.assert_close(Fp8Rows.of_columns(weights).scale, largest / 448)


def test_the_gradient_of_the_input_is_a_product_in_fp8_and_that_of_the_weight_is_not() -> None:
    x = normal(2, 5, 32).requires_grad_()
    weight = normal(24, 32, seed=1).requires_grad_()
    bias = normal(24, seed=2).requires_grad_()
    grad = normal(2, 5, 24, seed=3) * torch.logspace(-4, 4, 5)[:, None]
    fp8.linear(x, weight, bias).backward(grad)
    rows = grad.view(-1, 24)
    rounded = Fp8Rows.of(rows).plain(torch.float64), Fp8Rows.of(weight.detach().t()).plain()
    want = (rounded[0] @ rounded[1].double().t()).view(2, 5, 32)
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    largest = want.abs().amax(-1, keepdim=True)  # tokens are of very different sizes
    torch.testing.assert_close(x.grad.double() / largest, want / largest, atol=1e-5, rtol=0)
    torch.testing.assert_close(weight.grad, rows.t() @ x.detach().view(-1, 32))
    torch.testing.assert_close(bias.grad, rows.sum(0))
    # a gradient as small as 1e-4 of the largest is as exact as any, for every token has a scale
    plain = grad @ weight.detach()
    error = (x.grad - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert error.min() > 0.005 and error.max() < 0.1


def test_what_is_not_trained_has_no_gradient() -> None:
    x = normal(3, 32).requires_grad_()
    weight = normal(8, 32, seed=1)
    fp8.linear(x, weight, None).sum().backward()
    want = Fp8Rows.of_columns([weight]).plain().sum(1).expand(3, 32)
    torch.testing.assert_close(x.grad, want)
    assert weight.grad is None


def test_a_compiler_takes_it_as_it_is() -> None:
    """One graph, forward and backward, for any number of tokens."""

    def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fp8.linear(fp8.linear(x, weight, None).relu(), weight, None)

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (3, 5):
        found = []
        for function in (twice, compiled):
            x = normal(tokens, 32).requires_grad_()
            weight = normal(32, 32, seed=1).requires_grad_()
            function(x, weight).square().sum().backward()
            found.append((x.grad, weight.grad))
        for mine, plain in zip(*found, strict=True):
            torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-5)


# ---- the layers of a model ----


def states(model: CausalModel) -> torch.Tensor:
    """Last hidden states of three tokens of a trial."""
    layout = fused_decode.trial([KVShape(2, 8, 8)] * 2, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        return model.hidden(torch.tensor([7, 3, 11]), layout.cached, layout)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_a_model_multiplies_as_it_is_told() -> None:
    model = make_model("llama")
    join(model.module)
    want = states(model)
    layers = Fp8Layers.of(model, "rollout.precision")
    assert Fp8Layers.of(model, "rollout.precision") is layers is Fp8Layers.found(model)
    assert [len(family) for family in layers.families] == [3, 1, 2, 1] * 2
    torch.testing.assert_close(states(model), want, atol=1e-6, rtol=1e-5)
    with layers.using("fresh"):
        fresh = states(model)
    layers.quantise()
    with layers.using("copies"):
        assert torch.equal(states(model), fresh)
    assert 0.01 < apart(fresh, want) < 0.2
    torch.testing.assert_close(states(model), want, atol=1e-6, rtol=1e-5)


def test_copies_keep_their_place_and_follow_the_weights_when_told() -> None:
    model = make_model("qwen2")  # biases
    layers = Fp8Layers.of(model, "rollout.precision")
    layers.quantise()
    joint = layers.joint(0, 3)
    places = joint.rows.values.data_ptr(), joint.rows.scale.data_ptr()
    with layers.using("copies"):
        before = states(model)
    with torch.no_grad():
        for weight in model.layers.parameters():
            weight.add_(0.05)
    with layers.using("copies"):
        stale = states(model)
    layers.quantise()
    with layers.using("copies"):
        after = states(model)
    with layers.using("fresh"):
        assert torch.equal(after, states(model))
    assert layers.joint(0, 3) is joint
    assert places == (joint.rows.values.data_ptr(), joint.rows.scale.data_ptr())
    # norms are not copied, so old copies are not what they were either
    assert apart(after, stale) > 0.05 and apart(after, before) > 0.05
    assert layers.size == sum(
        weight.numel() + 4 * len(weight)
        for name, weight in model.layers.named_parameters()
        if weight.ndim > 1
    )
    layers.drop()
    assert not layers.copied


@pytest.mark.parametrize("arch", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("adapted", [False, True])
def test_the_fused_forward_multiplies_alike(arch: str, adapted: bool) -> None:
    model = make_model(arch)
    if adapted:
        module = add_adapter(make_module(arch), AdapterConfig(rank=2), seed=0)
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
        model = CausalModel(module)
    layers = Fp8Layers.of(model, "rollout.precision")
    with layers.using("plain"):
        fused = FusedDecode.of(model)
    assert fused is not None
    layers.quantise()
    found = []
    for own in (False, True):
        layout = fused_decode.trial(fused.shapes, torch.float32, torch.device("cpu"))
        tokens = torch.tensor([7, 3, 11])
        with torch.no_grad(), layers.using("copies"):
            if own:
                found.append(model.hidden(tokens, layout.cached, layout))
            else:
                found.append(fused.hidden(tokens, layout))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    layout = fused_decode.trial(fused.shapes, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        assert apart(fused.hidden(tokens, layout), found[0]) > 0.01


def test_a_copied_module_has_products_of_its_own() -> None:
    model = make_model("llama")
    layers = Fp8Layers.of(model, "train.precision")
    layers.quantise()
    layers.source = "fresh"
    twin = CausalModel(copy.deepcopy(model.module))
    assert torch.equal(states(twin), states(model))
    others = Fp8Layers.found(twin)
    assert others is not None and others is not layers and not others.copied
    fp8_layers.plain(twin.module)
    assert Fp8Layers.found(twin) is None
    assert apart(states(twin), states(model)) > 0.01


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt2"])
def test_matrices_that_are_not_linear_layers_are_refused(arch: str) -> None:
    with pytest.raises(InputError, match="not plain linear layers") as error:
        Fp8Layers.of(make_model(arch), "rollout.precision")
    assert "rollout.precision" in str(error.value)


def test_exact_models_are_refused() -> None:
    with pytest.raises(InputError, match="exclude each other"):
        Fp8Layers.of(CausalModel(make_module(), exact=True), "rollout.precision")


# ---- the cache ----


def test_a_cache_keeps_a_scale_for_every_head_of_a_token() -> None:
    cache = KVCache.allocate([KVShape(2, 16, 16)], 5, 4, fp8.E4M3, torch.device("cpu"))
    assert cache.scales is not None and cache.scales[0][0].shape == (5, 2, 4)
    slots = torch.tensor([13, 2, 7])
    k, v = (normal(3, 2, 16, seed=i) * torch.tensor([1.0, 100.0])[:, None] for i in (0, 1))
    kept = cache.write(0, slots, k, v)
    for x, mine, read in zip((k, v), kept, cache.read(0, slots, torch.float32), strict=True):
        want = Fp8Rows.of(x.view(6, 16)).plain().view(3, 2, 16)
        assert torch.equal(mine, want) and torch.equal(read, want)
    blocks = torch.tensor([3, 1])
    by_block = cache.read_blocks(0, blocks, torch.float32)
    for mine, read in zip(kept, by_block, strict=True):
        assert torch.equal(read[0, 1], mine[0]) and torch.equal(read[1, 3], mine[2])
        assert (read[0, 2:] == 0).all()
    assert KVCache.token_bytes([KVShape(2, 16, 16)] * 3, fp8.E4M3) == 3 * 2 * 2 * (16 + 4)
    assert KVCache.token_bytes([KVShape(2, 16, 16)] * 3, torch.bfloat16) == 3 * 2 * 2 * 32


def test_attention_sees_what_the_cache_holds() -> None:
    """A prompt in one piece, in two pieces, and with its last token decoded: the same answer."""
    n = 21
    q, k, v = (normal(n, heads, 16, seed=i) * 2 for i, heads in enumerate((4, 2, 2)))
    asked = AttentionRule(0.25)
    slots = torch.arange(n)

    def fresh() -> KVCache:
        return KVCache.allocate([KVShape(2, 16, 16)], 2, 16, fp8.E4M3, torch.device("cpu"))

    def piece(cache: KVCache, first: int, last: int) -> torch.Tensor:
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        before = (slots[:last], [last]) if first else (None, None)
        layout = PrefillLayout([last - first], starts, cache, slots[first:last], *before)
        part = slice(first, last)
        return layout.attend(0, q[part], k[part], v[part], asked)

    whole = piece(fresh(), 0, n)
    cache = fresh()
    piece(cache, 0, 16)
    torch.testing.assert_close(piece(cache, 16, n), whole[16:], atol=1e-5, rtol=1e-5)
    cache = fresh()
    piece(cache, 0, n - 1)
    layout = PagedLayout(cache, torch.tensor([[0, 1]]), torch.tensor([n - 1]))
    last = layout.attend(0, q[-1:], k[-1:], v[-1:], asked)
    torch.testing.assert_close(last, whole[-1:], atol=1e-5, rtol=1e-5)
