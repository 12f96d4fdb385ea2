"""The kernels of LoRA in decoding against sums in float64.

Runs on a GPU, or on a CPU in Triton's interpreter (conftest.py).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import needs
from helpers.toys import make_module
from reinforge.config.adapter import AdapterConfig
from reinforge.models import decode_ops, fused_decode
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.fused_decode import FusedDecode
from reinforge.models.projections import Adapter, Projection

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = needs.unless(
    importlib.util.find_spec("triton") is not None,
    "triton",
    "not installed: pip install 'reinforge[kernels]'",
)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
# the interpreter has no bfloat16 products
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
PRECISIONS = [torch.float32, HALF]
# rows, inputs, outputs and rank of each layer of a family; a rank of 0: it has no adapter
FAMILIES = [
    (1, 96, [(70, 16), (24, 16), (24, 16)]),
    (3, 900, [(200, 4), (40, 0), (40, 8)]),
    (3, 128, [(40, 0), (64, 64), (16, 4)]),
    (70, 260, [(70, 16), (33, 64), (33, 8)]),
    (20, 300, [(70, 80)]),
    (2, 2300, [(40, 16), (16, 4)]),  # more parts than are added up at once
    (40, 600, [(40, 80), (16, 16)]),
]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def family(inner: int, layers: Sequence[tuple[int, int]]) -> list[Adapter]:
    """Of layers side by side, in float32, with a scale of its own each."""
    found = []
    first = 0
    for size, rank in layers:
        if rank:
            down, up = random(rank, inner) * inner**-0.5, random(size, rank)
            found.append(Adapter(down, up, 0.5 + len(found), first))
        first += size
    return found


def wide(x: Tensor) -> Tensor:
    return x.double().cpu()


def added(x: Tensor, adapters: Sequence[Adapter], width: int) -> Tensor:
    """What adapters add, in float64, rounded where training rounds the matrices and the product
    between them.
    """
    more = torch.zeros(len(x), width, dtype=torch.float64)
    for down, up, scale, first in adapters:
        narrow = (wide(x) @ wide(down.to(x.dtype)).t()).to(x.dtype)
        more[:, first : first + len(up)] = scale * wide(narrow) @ wide(up.to(x.dtype)).t()
    return more


def bounds(dtype: torch.dtype) -> dict[str, float]:
    """One rounding of the sum; a narrow number that lies between two may go to either."""
    step = torch.finfo(dtype).eps
    return {"atol": max(4 * step, 3e-5), "rtol": max(step, 1e-5)}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize(("rows", "inner", "layers"), FAMILIES)
def test_a_family_is_shrunk_and_expanded(
    rows: int, inner: int, layers: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Rows of inputs and outputs lie apart, and what lies between them stays."""
    from reinforge.models.kernels import low_rank

    torch.manual_seed(0)
    adapters = family(inner, layers)
    width = sum(size for size, _ in layers)
    x = random(rows, inner + 8, dtype=dtype)[:, :inner]
    narrow = low_rank.shrink(x, adapters)
    downs = torch.cat([adapter.down for adapter in adapters]).to(dtype)
    assert narrow.dtype == torch.float32 and (inner < 256 or len(narrow) > 1)
    close = {"atol": 3e-5, "rtol": 1e-5}
    torch.testing.assert_close(wide(narrow).sum(0), wide(x) @ wide(downs).t(), **close)

    around = random(rows, width + 24, dtype=dtype)
    want = wide(around)
    want[:, 8 : 8 + width] += added(x, adapters, width)
    low_rank.expand(around[:, 8 : 8 + width], narrow, adapters, dtype)
    torch.testing.assert_close(wide(around), wide(want.to(dtype)), **bounds(dtype))
    left = torch.ones(width + 24, dtype=torch.bool)
    for adapter in adapters:
        left[8 + adapter.first : 8 + adapter.first + len(adapter.up)] = False
    torch.manual_seed(0)
    family(inner, layers), random(rows, inner + 8, dtype=dtype)
    assert torch.equal(around[:, left], random(rows, width + 24, dtype=dtype)[:, left])


def test_what_is_added_to_a_part_of_a_product_is_not_rounded() -> None:
    """The parts of a product are float32, whatever the inputs are."""
    from reinforge.models.kernels import low_rank

    torch.manual_seed(1)
    adapters = family(300, [(50, 8)])
    x = random(5, 300, dtype=HALF)
    parts = random(2, 5, 50)
    narrow = low_rank.shrink(x, adapters)
    rounded = wide(narrow.sum(0).to(HALF))
    more = adapters[0].scale * rounded @ wide(adapters[0].up.to(HALF)).t()
    want = wide(parts[0]) + more
    low_rank.expand(parts[0], narrow, adapters, HALF)
    torch.testing.assert_close(wide(parts[0]), want, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize(
    ("rows", "inner", "outer", "ranks"),
    [(1, 128, 96, (16, 16)), (70, 96, 70, (4, 64)), (3, 200, 70, (8, 0)), (3, 64, 40, (0, 8))],
)
def test_a_gate_with_adapters(
    rows: int, inner: int, outer: int, ranks: tuple[int, int], dtype: torch.dtype
) -> None:
    from reinforge.models.kernels import low_rank

    torch.manual_seed(2)
    adapters = family(inner, [(outer, rank) for rank in ranks])
    x = random(rows, inner, dtype=dtype)
    y = random(rows, 2 * outer + 8, dtype=dtype)[:, : 2 * outer]
    before = y.clone()
    want = decode_ops.silu_mul(wide(y) + added(x, adapters, 2 * outer))
    got = low_rank.gated(y, x, adapters)
    close = bounds(dtype)
    torch.testing.assert_close(wide(got), want, atol=close["atol"], rtol=4 * close["rtol"])
    assert torch.equal(y, before)
    # in two steps: the same roundings
    low_rank.add(y, x, adapters)
    gate, up = (wide(half) for half in y.chunk(2, -1))
    silu = wide((gate / (1 + torch.exp(-gate))).to(dtype))
    torch.testing.assert_close(wide(got), wide((silu * up).to(dtype)), **bounds(dtype))


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [(HALF, (16, 80)), *((dtype, ranks) for dtype in PRECISIONS for ranks in ((0, 4), (20, 0)))],
    ids=str,
)
def test_a_program_of_a_gate_with_several_tiles(
    dtype: torch.dtype, ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten tiles for four programs, and the last tile is not full: the bits of one program each."""
    from reinforge.models.kernels import low_rank

    torch.manual_seed(4)
    outer = 600
    adapters = family(600, [(outer, rank) for rank in ranks])
    x, y = random(5, 600, dtype=dtype), random(5, 2 * outer, dtype=dtype)
    narrow = low_rank.shrink(x, adapters)
    one_each = low_rank.gated_expand(y, narrow, adapters)
    monkeypatch.setattr(low_rank, "MULTIPROCESSORS", 1)
    several = low_rank.gated_expand(y, narrow, adapters)
    assert torch.equal(one_each, several)
    want = decode_ops.silu_mul(wide(y) + added(x, adapters, 2 * outer))
    close = bounds(dtype)
    torch.testing.assert_close(wide(several), want, atol=close["atol"], rtol=4 * close["rtol"])


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_kernels_and_twin_add_what_training_adds(dtype: torch.dtype) -> None:
    """The twin in float32 to the bit; in 16 bits training rounds more often."""
    from reinforge.models.kernels import low_rank

    torch.manual_seed(3)
    sizes = (130, 33, 40)
    adapters = family(260, list(zip(sizes, (16, 0, 4), strict=True)))
    x, y = random(5, 260, dtype=dtype), random(5, sum(sizes), dtype=dtype)
    parts = [Projection(nn.Linear(1, size)) for size in sizes]
    trained = y.cpu().clone()
    for part, (down, up, scale, first) in zip(parts[::2], adapters, strict=True):
        part.down, part.up = linear_of(down), linear_of(up)
        part.scale = scale
        narrow = F.linear(x.cpu(), part.down.weight.to(dtype))
        more = F.linear(narrow, part.up.weight.to(dtype)) * scale
        trained[:, first : first + len(up)] += more
    twin = decode_ops.add_low_rank(y.cpu().clone(), x.cpu(), parts)
    close = bounds(dtype)
    if dtype == torch.float32:
        assert torch.equal(twin, trained)
    torch.testing.assert_close(twin, trained, atol=2 * close["atol"], rtol=2 * close["rtol"])
    low_rank.add(y, x, adapters)
    torch.testing.assert_close(y.cpu(), twin, **close)


def linear_of(weight: Tensor) -> nn.Linear:
    made = nn.Linear(*reversed(weight.shape), bias=False)
    made.weight = nn.Parameter(weight.cpu(), requires_grad=False)
    return made


def test_programs_for_the_multiprocessors() -> None:
    """Of a 7B model: parts of K for tiles of rows and ranks, which are no more than are of use."""
    from reinforge.models.kernels.low_rank import part_of

    def parts(tiles: int, bm: int, inner: int) -> int:
        return -(-inner // part_of(tiles, bm, inner, 128))

    # one sequence: q, k and v; o; down
    assert [parts(3, 16, 3584), parts(1, 16, 3584), parts(1, 16, 18944)] == [28, 28, 50]
    # 256: eight tiles of rows
    assert [parts(24, 32, 3584), parts(8, 32, 3584), parts(8, 32, 18944)] == [4, 14, 15]
    # prompts of 16,384 tokens fill them alone
    assert parts(256, 64, 3584) == 1


# ---- a whole trunk ----


def adapted(spread: float) -> CausalModel:
    module = add_adapter(make_module("qwen3", num_hidden_layers=1), AdapterConfig(rank=4), seed=0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=spread)
    return CausalModel(module.to(DEVICE))


def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are computed by kernels, on a CPU too."""
    from reinforge.models.kernels import layer

    monkeypatch.setattr(decode_ops, "_kernels", lambda x: layer)


@torch.no_grad()
def test_a_trunk_with_adapters_gives_the_hidden_states_of_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_kernels(monkeypatch)
    model = adapted(0.3)
    fused = FusedDecode.of(model)
    assert fused is not None
    tokens = torch.tensor([7, 3, 11], device=DEVICE)
    ours, own = (fused_decode.trial(fused.shapes, model.dtype, model.device) for _ in range(2))
    want = model.hidden(tokens, own.cached, own)
    torch.testing.assert_close(fused.hidden(tokens, ours), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("forgotten", ["add", "gated"])
def test_an_adapter_that_is_forgotten_is_noticed_while_it_adds_nothing(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reinforge.models.kernels import layer, low_rank

    by_kernels(monkeypatch)
    nothing = {"add": lambda y, x, adapters: None, "gated": lambda y, x, _: layer.silu_mul(y)}
    monkeypatch.setattr(low_rank, forgotten, nothing[forgotten])
    assert FusedDecode.of(adapted(0.0)) is None
