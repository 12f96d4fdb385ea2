# mypy: disable-error-code="no-untyped-def"
"""Matrix products of `model.exact`: every output is one chain of additions over K, from front to
back in a float32 accumulator, and so it does not matter which tile it is computed in.

That tensor cores keep to this is seen, not promised: before a tile is used beside the first one,
both compute a product whose outputs lose most of their digits, and all bits must be equal. The
library's kernels are such chains too, unless they split K; in a decode step, which has few sizes,
they are used where they were seen to be (`step_product`).

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import MULTIPROCESSORS, ceil_div, early, next_power

GROUP = 8  # row tiles that share a column tile's weights in the cache
Tile = tuple[int, int, int, int, int]  # BM, BN, BK, warps, tiles on their way
# two warp groups, each a chain of m64n128k16 products over K
LARGE: Tile = (128, 128, 64, 8, 4)
WIDE: Tile = (64, 64, 32, 4, 2)  # of float32
# of 16-bit numbers, as measured on an H200: where there is more to do, and where less
SMALLER: dict[int, tuple[Tile, Tile]] = {
    16: ((16, 64, 128, 4, 4), (16, 32, 128, 4, 4)),
    32: ((32, 64, 64, 4, 4), (32, 32, 128, 4, 4)),
    64: ((64, 64, 64, 4, 4), (64, 32, 128, 4, 4)),
}
EXAMPLES = 512  # rows and outputs of a product on which tiles are compared
LARGEST = 1 << 24  # numbers of a weight of which a copy is made for a trial
ENOUGH = 1 << 22  # outputs of a product with a real weight, where few of them show a difference
ALIGNED = 256  # bytes: a library may choose its kernel by where numbers lie


@triton.jit(do_not_specialize=["M"])
def _matmul(
    X,
    W,
    B,
    Y,
    M,
    N,
    K,
    x_m,
    w_n,
    w_k,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Y [M, N] = X [M, K]·Wᵀ + B.

    One program per output tile, K from front to back in one float32 accumulator, never split.
    """
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    m = (first + pid % (GROUP * tiles_n) % height) * BM + tl.arange(0, BM)
    n = pid % (GROUP * tiles_n) // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = X + m.to(tl.int64)[:, None] * x_m + k[None, :]
    w_at = W + n.to(tl.int64)[None, :] * w_n + k[:, None] * w_k
    acc = tl.zeros([BM, BN], tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, BK):
        if EVEN:
            x = tl.load(x_at, mask=(m < M)[:, None], other=0.0)
            w = tl.load(w_at, mask=(n < N)[None, :], other=0.0)
        else:
            x = tl.load(x_at, mask=(m < M)[:, None] & (k < K - start)[None, :], other=0.0)
            w = tl.load(w_at, mask=(n < N)[None, :] & (k < K - start)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_at += BK
        w_at += BK * w_k
    if BIAS:
        acc += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    there = (m < M)[:, None] & (n < N)[None, :]
    at = Y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, acc.to(Y.dtype.element_ty), mask=there)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] times weight [N, K] (any strides) transposed, plus bias [N]."""
    x = x.contiguous()
    return _in_tiles(x, weight, bias, _tile_of(x, weight.shape[0]))


def _in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    rows, inner = x.shape
    outer = weight.shape[0]
    y = torch.empty(rows, outer, dtype=x.dtype, device=x.device)
    if not rows:
        return y
    bm, bn, bk, warps, stages = tile
    _matmul[(ceil_div(rows, bm) * ceil_div(outer, bn),)](
        x,
        weight,
        y if bias is None else bias,
        y,
        rows,
        outer,
        inner,
        inner,
        weight.stride(0),
        weight.stride(1),
        BIAS=bias is not None,
        EVEN=inner % bk == 0,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP=GROUP,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
        **early(),
    )
    return y


def _tile_of(x: Tensor, outer: int) -> Tile:
    if x.dtype == torch.float32:
        return WIDE
    tile = fitting_tile(len(x), outer)
    return tile if tile == LARGE or tiles_agree(x.shape[1], x.dtype, x.device) else LARGE


def fitting_tile(rows: int, outer: int) -> Tile:
    """The largest tile that keeps the multiprocessors busy."""

    def programs(tile: Tile) -> int:
        return ceil_div(rows, tile[0]) * ceil_div(outer, tile[1])

    if programs(LARGE) >= 2 * MULTIPROCESSORS:
        return LARGE
    height = min(64, max(16, next_power(rows)))
    more, less = SMALLER[height]
    return more if programs(more) >= 0.75 * MULTIPROCESSORS else less


# ---- what was seen on this machine ----

_seen: dict[tuple[object, ...], bool] = {}


def tiles_agree(inner: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all tiles give products of so many inputs the same bits; tried once."""
    key = (inner, dtype, device)
    if key not in _seen and _may_try(device):
        x, weight = example(EXAMPLES, EXAMPLES, inner, dtype, device)
        want = _in_tiles(x, weight, None, LARGE)
        _seen[key] = all(
            torch.equal(_in_tiles(x, weight, None, tile), want)
            for tiles in SMALLER.values()
            for tile in tiles
        )
    return _seen.get(key, False)


def step_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`matmul` of a decode step, by the library where that gives the same bits. Not for training:
    packs have any number of rows, and each would be tried.
    """
    if not library_agrees(x, weight, bias):
        return matmul(x, weight, bias)
    with torch._C.DisableTorchFunction():
        return F.linear(x, weight, bias)


def library_agrees(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the library gives a product of this size the bits of `matmul`; tried once."""
    outer, inner = weight.shape
    parts = [part for part in (x, weight, bias) if part is not None]
    if x.dtype == torch.float32:
        return False
    if any(not part.is_contiguous() or part.data_ptr() % ALIGNED for part in parts):
        return False
    key = (len(x), outer, inner, bias is None, x.dtype, x.device)
    if key not in _seen and _may_try(x.device):
        with torch._C.DisableTorchFunction():
            trial = _agrees_on_examples if outer * inner <= LARGEST else _agrees_on_weight
            _seen[key] = trial(len(x), weight, bias)
    return _seen.get(key, False)


def _agrees_on_examples(rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    outer, inner = weight.shape
    for seed in range(1 + EXAMPLES**2 // (rows * outer)):
        x, other = example(rows, outer, inner, weight.dtype, weight.device, seed)
        some = None if bias is None else other[:, 0] / 64
        if not torch.equal(F.linear(x, other, some), matmul(x, other, some)):
            return False
    return True


def _agrees_on_weight(rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    """For weights of which there may be no room for a second one."""
    generator = torch.Generator(weight.device).manual_seed(0)
    for _ in range(1 + ENOUGH // (rows * len(weight))):
        shape = (rows, weight.shape[1])
        x = torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)
        want = matmul(x, weight, bias)
        empty = 2 * int(want.count_nonzero()) < want.numel()  # shows nothing
        if empty or not torch.equal(F.linear(x, weight, bias), want):
            return False
    return True


def _may_try(device: torch.device) -> bool:
    """Not while a graph is captured: the host would have to wait."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def example(
    rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """x [M, K] and a weight [N, K] whose second halves take away nearly all that the first halves
    add up to: what is left shows how every addition was rounded.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    half = inner // 2
    x = normal(rows, inner)
    weight = normal(outer, inner)
    x[:, half : 2 * half] = x[:, :half] * (1 + normal(rows, half) / 64)
    weight[:, half : 2 * half] = -weight[:, :half]
    return x, weight
