# mypy: disable-error-code="no-untyped-def"
"""silu(gate)·up of a gated MLP with LoRA adapters in training and scoring, and its gradients: one
kernel each, which read what the frozen layers gave, compute in registers what the adapters add to
it, and multiply what they have in their hands with the narrow matrices that ask for it. Twin: the
sums in memory of `models.lora_linear`, which asks for all of this.

An adapter's product is a few numbers deep: a library reads or writes a tensor as wide as the MLP
for it, one for each product.

Tiles come and go by single instructions (TMA), with nothing beyond the ends of a tensor: rows and
columns are any number. Sums over parts of the work are added up in a fixed order afterwards, so
that bits repeat.

Legend: M tokens, I numbers of gate, of up and of what lies between, R ranks of an adapter (R1 of
gate, R2 of up, R3 of down).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from reinforge.models.kernels import common
from reinforge.models.kernels.common import MULTIPROCESSORS, ceil_div, next_power

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
RANKS = 64  # that a tile has room for
ALIGNED = 16  # bytes: where rows of a tensor begin that tiles are fetched from
ENOUGH = 8 * MULTIPROCESSORS  # programs, of which the last ones leave few of those idle


class Tile(NamedTuple):
    """Rows and columns of a tile, and how a program goes through them. With 168 registers of a
    thread, three programs of four warps have room on a multiprocessor.
    """

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2
    registers: int = 168


def forward_tile(dtype: torch.dtype, rank: int) -> Tile:
    """Of `gated`, for ranks up to this one."""
    return Tile(64, 64, stages=3) if dtype.itemsize == 2 else Tile(32, 32)


def backward_tile(dtype: torch.dtype, rank: int) -> Tile:
    """Of `gated_backward`, for ranks up to this one."""
    if dtype.itemsize > 2:
        return Tile(32, 32)
    return Tile(64, 64, registers=168 if rank <= 16 else 255)


def takes(both: Tensor, ranks: Sequence[int]) -> bool:
    """Whether these kernels compute with gate and up [M, 2I] and adapters of such ranks."""
    _, width = both.shape
    return (
        common.HAS_TMA
        and max(ranks) <= RANKS
        and both.dtype in TYPES
        and width // 2 * both.dtype.itemsize % ALIGNED == 0
        and both.numel() > 0
    )


@triton.jit
def _narrow(X, m, r, M, apart, RANK: tl.constexpr):
    """[BM, BR] of the rows m of X [M, RANK], which lie so far `apart`."""
    at = X + m[:, None] * apart + r[None, :]
    return tl.load(at, mask=(m < M)[:, None] & (r < RANK)[None, :], other=0.0)


@triton.jit
def _upward(B, r, i, I, RANK: tl.constexpr):
    """[BR, BI] of B [I, RANK] transposed."""
    there = (r < RANK)[:, None] & (i < I)[None, :]
    return tl.load(B + i[None, :] * RANK + r[:, None], mask=there, other=0.0)


@triton.jit
def _adapted(base, narrow, up, scale, PRECISION: tl.constexpr):
    """base + scale·narrow·up in float32."""
    return base.to(tl.float32) + scale * tl.dot(narrow, up, input_precision=PRECISION)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """x to this precision and back. Two numbers of bfloat16 are rounded by one instruction: what
    rounds one alone has to wait for the unit of exponentials.
    """
    if tl.bfloat16 == DTYPE:
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 two; cvt.rn.bf16x2.f32 two, $3, $2;"
            "  shl.b32 $0, two, 16; and.b32 $1, two, 0xffff0000; }",
            "=r,=r,f,f",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(DTYPE).to(tl.float32)


@triton.jit
def _logistic(x, DTYPE: tl.constexpr):
    """1 / (1 + exp(-x)). What is below all normal numbers may be 0 here: exp and the division have
    many instructions for such numbers.
    """
    if tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000;"
            "  rcp.approx.ftz.f32 $0, e; }",
            "=f,f",
            [x * -1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp(-x))


# ---- forward ----


@triton.jit(do_not_specialize=["M", "parts"])
def _gated(
    GATE,
    UP,
    INNER,
    NARROW,
    B1,
    B2,
    A3,
    SUMS,
    scale1,
    scale2,
    M,
    I,
    parts,
    R1: tl.constexpr,
    R2: tl.constexpr,
    R3: tl.constexpr,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
    BI: tl.constexpr,
    BR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (part of the tiles of columns, tile of rows): INNER, and a part of INNER
    through A of the last adapter. Programs that run together read columns side by side.
    """
    precision: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"
    part = tl.program_id(0)
    row = tl.program_id(1) * BM
    m = row + tl.arange(0, BM)
    r = tl.arange(0, BR)
    narrow1 = _narrow(NARROW, m, r, M, R1 + R2, R1)
    narrow2 = _narrow(NARROW + R1, m, r, M, R1 + R2, R2)
    acc = tl.zeros([BM, BR], tl.float32)
    for begin in tl.range(part * BI, I, parts * BI, num_stages=STAGES):
        i = begin + tl.arange(0, BI)
        gate = GATE.load([row, begin])
        up = UP.load([row, begin])
        gate = _adapted(gate, narrow1, _upward(B1, r, i, I, R1), scale1, precision)
        up = _adapted(up, narrow2, _upward(B2, r, i, I, R2), scale2, precision)
        gate, up = _rounded(gate, DTYPE), _rounded(up, DTYPE)
        silu = _rounded(gate * _logistic(gate, DTYPE), DTYPE)
        inner = (silu * up).to(DTYPE)
        INNER.store([row, begin], inner)
        there = (i < I)[:, None] & (r < R3)[None, :]
        down = tl.load(A3 + r[None, :] * I + i[:, None], mask=there, other=0.0)
        acc = tl.dot(inner, down, acc, input_precision=precision)
    at = SUMS + (part * M + m).to(tl.int64)[:, None] * R3 + r[None, :]
    tl.store(at, acc, mask=(m < M)[:, None] & (r < R3)[None, :])


def gated(
    both: Tensor, narrow: Tensor, ups: Sequence[Tensor], scales: Sequence[float], down: Tensor
) -> tuple[Tensor, Tensor]:
    """What the last layer of an MLP reads [M, I], and that through A of its adapter [M, R3].

    both [M, 2I]: what the frozen gate and up give; narrow [M, R1 + R2]: the input through A of
    their adapters; ups: B of these [I, R]; down: A of the last one [R3, I].
    """
    rows, width = len(both), both.shape[1] // 2
    ranks = _ranks(ups, down)
    tile = forward_tile(both.dtype, max(ranks))
    row_tiles, column_tiles = ceil_div(rows, tile.rows), ceil_div(width, tile.columns)
    parts = min(column_tiles, ceil_div(ENOUGH, row_tiles))
    inner = both.new_empty(rows, width)
    sums = both.new_empty(parts, rows, len(down), dtype=torch.float32)
    _gated[(parts, row_tiles)](
        *(_tiles(part, tile) for part in (*both.chunk(2, 1), inner)),
        narrow,
        *(up.contiguous() for up in ups),
        down.contiguous(),
        sums,
        *scales,
        rows,
        width,
        parts,
        **_constants(both.dtype, tile, ranks),
    )
    return inner, sums.sum(0).to(both.dtype)


# ---- backward ----


@triton.jit(do_not_specialize=["M", "PER"])
def _gated_backward(
    GATE,
    UP,
    DINNER,
    DGATE,
    DUP,
    NARROW,
    DNARROW,
    B1,
    B2,
    A3,
    SUMS,
    scale1,
    scale2,
    M,
    I,
    PER,
    R1: tl.constexpr,
    R2: tl.constexpr,
    R3: tl.constexpr,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
    BI: tl.constexpr,
    BR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (tile of columns, part of the rows): DGATE and DUP, and a part of the sums
    over rows that are the gradients of the adapters' matrices as wide as these columns.
    """
    precision: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"
    column = tl.program_id(0) * BI
    part = tl.program_id(1)
    i = column + tl.arange(0, BI)
    r = tl.arange(0, BR)
    up1 = _upward(B1, r, i, I, R1)
    up2 = _upward(B2, r, i, I, R2)
    down = tl.load(
        A3 + r[:, None] * I + i[None, :], mask=(r < R3)[:, None] & (i < I)[None, :], other=0.0
    )
    acc1 = tl.zeros([BI, BR], tl.float32)
    acc2 = tl.zeros([BI, BR], tl.float32)
    acc3 = tl.zeros([BI, BR], tl.float32)
    end = tl.minimum(M, (part + 1) * PER)
    for row in tl.range(part * PER, end, BM, num_stages=STAGES):
        m = row + tl.arange(0, BM)
        gate = GATE.load([row, column])
        up = UP.load([row, column])
        dinner = DINNER.load([row, column])
        narrow1 = _narrow(NARROW, m, r, M, R1 + R2, R1)
        narrow2 = _narrow(NARROW + R1, m, r, M, R1 + R2, R2)
        dnarrow = _narrow(DNARROW, m, r, M, R3, R3)
        gate = _adapted(gate, narrow1, up1, scale1, precision)
        up = _adapted(up, narrow2, up2, scale2, precision)
        dinner = _adapted(dinner, dnarrow, down, 1.0, precision)
        gate, up = _rounded(gate, DTYPE), _rounded(up, DTYPE)
        chance = _logistic(gate, DTYPE)
        silu = gate * chance
        dgate = (dinner * up * (chance + silu * (1.0 - chance))).to(DTYPE)
        DGATE.store([row, column], dgate)
        acc1 = tl.dot(tl.trans(dgate), narrow1, acc1, input_precision=precision)
        inner = (_rounded(silu, DTYPE) * up).to(DTYPE)
        acc3 = tl.dot(tl.trans(inner), dnarrow, acc3, input_precision=precision)
        dup = (dinner * silu).to(DTYPE)
        DUP.store([row, column], dup)
        acc2 = tl.dot(tl.trans(dup), narrow2, acc2, input_precision=precision)
    there = (i < I)[:, None]
    at = SUMS + part.to(tl.int64) * I * (R1 + R2 + R3)
    of_b = i[:, None] * R1 + r[None, :]
    tl.store(at + of_b, scale1 * acc1, mask=there & (r < R1)[None, :])
    at += I * R1
    of_b = i[:, None] * R2 + r[None, :]
    tl.store(at + of_b, scale2 * acc2, mask=there & (r < R2)[None, :])
    at += I * R2
    tl.store(at + r[None, :] * I + i[:, None], acc3, mask=there & (r < R3)[None, :])


def gated_backward(
    both: Tensor,
    narrow: Tensor,
    ups: Sequence[Tensor],
    scales: Sequence[float],
    down: Tensor,
    dinner: Tensor,
    dnarrow: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of gate and up [M, 2I], adapters and all, and in float32 those of `ups` and `down`.

    dinner [M, I]: the gradient of the output through the frozen last layer; dnarrow [M, R3]: that
    through B of its adapter, scale and all.
    """
    rows, width = len(both), both.shape[1] // 2
    ranks = _ranks(ups, down)
    tile = backward_tile(both.dtype, max(ranks))
    column_tiles = ceil_div(width, tile.columns)
    per = ceil_div(ceil_div(rows, tile.rows), ceil_div(ENOUGH, column_tiles)) * tile.rows
    parts = ceil_div(rows, per)
    dboth = torch.empty_like(both)
    wanted = (*ups, down)
    sizes = [part.numel() for part in wanted]
    sums = both.new_empty(parts, sum(sizes), dtype=torch.float32)
    _gated_backward[(column_tiles, parts)](
        *(_tiles(part, tile) for part in (*both.chunk(2, 1), dinner, *dboth.chunk(2, 1))),
        narrow,
        dnarrow,
        *(up.contiguous() for up in ups),
        down.contiguous(),
        sums,
        *scales,
        rows,
        width,
        per,
        **_constants(both.dtype, tile, ranks),
    )
    pairs = zip(sums.split(sizes, 1), wanted, strict=True)
    return dboth, [some.sum(0).view(part.shape) for some, part in pairs]


# ---- launches ----


def _tiles(x: Tensor, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [tile.rows, tile.columns])


def _ranks(ups: Sequence[Tensor], down: Tensor) -> list[int]:
    return [*(up.shape[1] for up in ups), len(down)]


def _constants(dtype: torch.dtype, tile: Tile, ranks: Sequence[int]) -> dict[str, Any]:
    """What a kernel is compiled for."""
    return {
        **{f"R{1 + i}": rank for i, rank in enumerate(ranks)},
        "DTYPE": TYPES[dtype],
        "BM": tile.rows,
        "BI": tile.columns,
        "BR": max(16, next_power(max(ranks))),
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        "maxnreg": tile.registers,
    }
