# mypy: disable-error-code="no-untyped-def"
"""RMS norms as one kernel, and their gradients as another. Twins: `models.norms`.

Legend: N rows, E numbers that are normed together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import MULTIPROCESSORS, ceil_div, early, next_power

SUM_COLUMNS = 8  # of a program that sums parts of a weight's gradient
SUM_TILE = 4096  # numbers that it fetches at once


class BackwardTile(NamedTuple):
    """How the rows of a gradient are shared out. A function of their size alone, for sums over rows
    depend on it.
    """

    rows: int  # that a program has at once
    warps: int  # of a program
    ahead: int  # tiles that are on their way or computed with
    programs: int  # at most: as many as are at work at the same time, or the last ones work alone

    @classmethod
    def of(cls, size: int) -> BackwardTile:
        """For rows of so many numbers: eight to a thread, so that many threads wait for memory."""
        block = next_power(size)
        rows = max(1, 1024 // block)
        warps = min(max(4, block // 256), 32)
        return cls(rows, warps, 3, 32 // warps * MULTIPROCESSORS)


@triton.jit
def _rms_norm(
    X,
    DELTA,
    GATE,
    WEIGHT,
    SUM,
    Y,
    E,
    H,
    x_n,
    x_h,
    g_n,
    g_h,
    eps,
    ADDS: tl.constexpr,
    CENTRED: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    BE: tl.constexpr,
):
    """One program per row; rounded where transformers rounds. ADDS: of X + DELTA, which is SUM."""
    row = tl.program_id(0)
    n, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    e = tl.arange(0, BE)
    there = e < E
    weight = tl.load(WEIGHT + e, mask=there, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(X + n * x_n + h * x_h + e, mask=there, other=0.0)
    dtype = x.dtype
    wide = x.to(tl.float32)
    flat = row.to(tl.int64) * E + e
    if ADDS:
        delta = tl.load(DELTA + flat, mask=there, other=0.0).to(tl.float32)
        x = (wide + delta).to(dtype)
        tl.store(SUM + flat, x, mask=there)
        wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
    if CENTRED:
        y = normed * (1.0 + weight)
    else:
        y = (weight * normed.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    if GATED:
        gate = tl.load(GATE + n * g_n + h * g_h + e, mask=there, other=0.0)
        gate = gate.to(tl.float32)
        y = y * (gate / (1.0 + tl.exp(-gate)))
    tl.store(Y + flat, y.to(dtype), mask=there)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, centred: bool = False, gate: Tensor | None = None
) -> Tensor:
    """Of x [..., E]; `centred`: the weight is what is added to 1. `gate`, of the shape of x: the
    norm is multiplied by its silu.
    """
    return _norm(x, None, weight, eps, centred, gate)[1]


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, centred: bool = False
) -> tuple[Tensor, Tensor]:
    """x + delta [..., E], and `rms_norm` of it."""
    return _norm(x, delta.contiguous(), weight, eps, centred, None)


def _norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    centred: bool,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What is normed, and its norm."""
    size = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(y)
    if not y.numel():
        return total, y
    rows, gates = _rows_of_both(x, gate)
    _rms_norm[(y.numel() // size,)](
        rows,
        rows if delta is None else delta,
        gates,
        weight,
        total,
        y,
        size,
        rows.shape[1],
        rows.stride(0),
        rows.stride(1),
        gates.stride(0),
        gates.stride(1),
        eps,
        ADDS=delta is not None,
        CENTRED=centred,
        GATED=gate is not None,
        BE=next_power(size),
        num_warps=8 if size > 2048 else 4 if size > 512 else 1,
        **early(),
    )
    return total, y


@triton.jit(do_not_specialize=["N", "each"])
def _rms_norm_backward(
    X,
    GATE,
    WEIGHT,
    DY,
    BESIDE,
    DX,
    DGATE,
    PARTS,
    N,
    E,
    H,
    each,
    x_n,
    x_h,
    g_n,
    g_h,
    eps,
    CENTRED: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHS: tl.constexpr,
    FORKS: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One program for `each` rows, BN at a time, of which AHEAD - 1 tiles are fetched while one is
    computed. With n = x·r, r = 1 / sqrt(mean(x²) + eps) and h = w·∂y: ∂x = r·(h - n·mean(h·n));
    PARTS [programs, E] are sums of ∂y·n, if it WEIGHS. FORKS: x goes on beside its norm, and
    BESIDE is the gradient from there.
    """
    first = tl.program_id(0) * each
    last = tl.minimum(first + each, N)
    e = tl.arange(0, BE)
    weight = tl.load(WEIGHT + e, mask=e < E, other=0.0).to(tl.float32)
    scale = 1.0 + weight if CENTRED else weight
    total = tl.zeros([BN, BE], tl.float32)
    for begin in tl.range(first, last, BN, num_stages=AHEAD):
        row = begin + tl.arange(0, BN)
        there = (row < last)[:, None] & (e < E)[None, :]
        flat = row.to(tl.int64)[:, None] * E + e[None, :]
        n, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
        x = tl.load(X + (n * x_n + h * x_h)[:, None] + e[None, :], mask=there, other=0.0)
        dy = tl.load(DY + flat, mask=there, other=0.0).to(tl.float32)
        dtype = x.dtype
        x = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / E + eps)[:, None]
        normed = x * inverse
        if GATED:
            g_at = (n * g_n + h * g_h)[:, None] + e[None, :]
            gate = tl.load(GATE + g_at, mask=there, other=0.0).to(tl.float32)
            chance = 1.0 / (1.0 + tl.exp(-gate))
            slope = chance * (1.0 + gate * (1.0 - chance))
            dgate = dy * normed * scale[None, :] * slope
            tl.store(DGATE + flat, dgate.to(DGATE.dtype.element_ty), mask=there)
            dy = dy * gate * chance
        if WEIGHS:
            total += dy * normed
        dn = dy * scale[None, :]
        dx = inverse * (dn - normed * (tl.sum(dn * normed, 1) / E)[:, None])
        if FORKS:
            dx += tl.load(BESIDE + flat, mask=there, other=0.0).to(tl.float32)
        tl.store(DX + flat, dx.to(dtype), mask=there)
    if WEIGHS:
        at = PARTS + tl.program_id(0).to(tl.int64) * E
        tl.store(at + e, tl.sum(total, 0), mask=e < E)


@triton.jit(do_not_specialize=["P"])
def _sum_parts(PARTS, SUM, P, E, BP: tl.constexpr, BE: tl.constexpr):
    """One program for BE columns of PARTS [P, E]: every BP-th part first, then these sums."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    total = tl.zeros([BP, BE], tl.float32)
    for begin in range(0, P, BP):
        part = begin + tl.arange(0, BP)
        there = (part < P)[:, None] & (e < E)[None, :]
        total += tl.load(PARTS + part[:, None] * E + e[None, :], mask=there, other=0.0)
    tl.store(SUM + e, tl.sum(total, 0).to(SUM.dtype.element_ty), mask=e < E)


def rms_norm_backward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dy: Tensor,
    *,
    centred: bool = False,
    gate: Tensor | None = None,
    weighs: bool = True,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, of the weight (if it `weighs`) and of the gate. Sums over rows are those of
    parts that depend on nothing but their number. `beside`: the gradient of x from where else it
    went, which is added.
    """
    size = x.shape[-1]
    count = x.numel() // size
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = None if gate is None else torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    tile = BackwardTile.of(size)
    each = ceil_div(ceil_div(max(count, 1), tile.programs), tile.rows) * tile.rows
    programs = ceil_div(count, each)
    parts = torch.empty(programs if weighs else 0, size, dtype=torch.float32, device=x.device)
    if count:
        rows, gates = _rows_of_both(x, gate)
        _rms_norm_backward[(programs,)](
            rows,
            gates,
            weight,
            dy.contiguous(),
            dx if beside is None else beside.contiguous(),
            dx,
            dx if dgate is None else dgate,
            parts,
            count,
            size,
            rows.shape[1],
            each,
            rows.stride(0),
            rows.stride(1),
            gates.stride(0),
            gates.stride(1),
            eps,
            CENTRED=centred,
            GATED=gate is not None,
            WEIGHS=weighs,
            FORKS=beside is not None,
            BN=tile.rows,
            BE=next_power(size),
            AHEAD=tile.ahead,
            num_warps=tile.warps,
        )
    return dx, _summed(parts, weight.dtype) if weighs else None, dgate


def _summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[E], rounded, of parts [P, E] in float32, added up in an order that P alone decides."""
    count, size = parts.shape
    total = torch.empty(size, dtype=dtype, device=parts.device)
    block = min(next_power(size), SUM_COLUMNS)
    _sum_parts[(ceil_div(size, block),)](
        parts, total, count, size, BP=SUM_TILE // block, BE=block, num_warps=8
    )
    return total


def _rows_of_both(x: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """x and gate as [N, H, E] with the same H; without a gate x twice. H is 1, and kernels divide
    no places by it, where all rows of each are equally far apart.
    """
    rows = _rows(x)
    gates = rows if gate is None else _rows(gate.expand(x.shape))
    if gates.shape[1] != rows.shape[1]:
        rows, gates = (part.reshape(-1, 1, x.shape[-1]) for part in (rows, gates))
    if all(part.stride(0) == part.shape[1] * part.stride(1) for part in (rows, gates)):
        rows, gates = (part.view(-1, 1, x.shape[-1]) for part in (rows, gates))
    return rows, gates


def _rows(x: Tensor) -> Tensor:
    """x as [N, H, E] without a copy, where it lies so."""
    while x.ndim > 2 and x.shape[0] == 1:
        x = x[0]
    if x.ndim == 2 and x.stride(1) == 1:
        return x[:, None]
    if x.ndim == 3 and x.stride(2) == 1:
        return x
    return x.reshape(-1, 1, x.shape[-1]).contiguous()
