# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the head on a GPU. Each has a plain-torch twin in `models.head` that defines
its result.

Legend: V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import capped, ceil_div

LANES = 1024
KEPT = 8  # tokens of a lane at a time
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.0e38)  # times 0 it is 0, as -inf is not


@triton.jit
def _logits(X, at, V, scale, softcap, CAP: tl.constexpr, MASKED: tl.constexpr):
    """Logits before the last factor; -inf past the end."""
    if MASKED:
        x = tl.load(X + at, mask=at < V, other=0.0).to(tl.float32)
    else:
        x = tl.load(X + at).to(tl.float32)
    if CAP:
        x = capped(x * scale, softcap, CAP)
    return tl.where(at < V, x, -float("inf")) if MASKED else x


@triton.jit
def _with(x, tops, totals, weighted, binary, WITH: tl.constexpr):
    """The maxima and sums of lanes that have met the tokens x [K, L] too."""
    higher = tl.maximum(tops, tl.max(x, 0))
    base = tl.where(higher == -float("inf"), 0.0, higher)  # a lane that has met no token
    keep = tl.exp2((tops - base) * binary)
    e = tl.exp2((x - base[None, :]) * binary)
    totals = totals * keep + tl.sum(e, 0)
    if WITH:
        weighted = weighted * keep + tl.sum(e * tl.maximum(x, LOWEST), 0)
    return higher, totals, weighted


@triton.jit
def _statistics(
    X,
    TARGETS,
    LOGP,
    LSE,
    ENTROPY,
    INVERSE,
    V,
    scale,
    softcap,
    CAP: tl.constexpr,
    WITH: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
):
    """One program per row, one pass. Each of L lanes keeps its own maximum, Σ exp and Σ exp·x of
    the tokens it meets, K at a time, so that threads wait for each other only at the end. With
    z = slope·x the sums are of x, which saves a product for each token.
    """
    row = tl.program_id(0).to(tl.int64)
    slope = tl.load(INVERSE + row)
    if not CAP:
        slope *= scale
    binary = slope * LOG2E  # exp(z) = exp2(binary·x)
    X += row * V
    at = tl.arange(0, K)[:, None] * L + tl.arange(0, L)[None, :]
    tops = tl.full((L,), -float("inf"), tl.float32)
    totals = tl.zeros((L,), tl.float32)
    weighted = tl.zeros((L,), tl.float32)
    whole = V // (K * L) * (K * L)
    for start in range(0, whole, K * L):
        x = _logits(X, start + at, V, scale, softcap, CAP, MASKED=False)
        tops, totals, weighted = _with(x, tops, totals, weighted, binary, WITH)
    if whole < V:
        x = _logits(X, whole + at, V, scale, softcap, CAP, MASKED=True)
        tops, totals, weighted = _with(x, tops, totals, weighted, binary, WITH)
    top = tl.max(tops, 0)
    share = tl.exp2((tops - top) * binary)
    total = tl.sum(totals * share, 0)
    lse = top * slope + tl.log(total)
    chosen = tl.load(X + tl.load(TARGETS + row)).to(tl.float32)
    if CAP:
        chosen = capped(chosen * scale, softcap, CAP)
    tl.store(LOGP + row, chosen * slope - lse)
    tl.store(LSE + row, lse)
    if WITH:
        tl.store(ENTROPY + row, lse - slope * tl.sum(weighted * share, 0) / total)


def softmax_statistics(
    x: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    scale: float,
    softcap: float | None,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Twin of `head.statistics`.

    No fused multiply-adds: the log-prob must not depend on whether the entropy is computed too.
    """
    rows, vocabulary = x.shape
    inverse = (
        1.0 / temperature
        if isinstance(temperature, Tensor)
        else torch.full((rows,), 1.0 / temperature, device=x.device)
    )
    logp, lse, ent = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(3))
    _statistics[(rows,)](
        x,
        targets,
        logp,
        lse,
        ent,
        inverse,
        vocabulary,
        scale,
        softcap or 0.0,
        CAP=softcap is not None,
        WITH=entropy,
        K=KEPT,
        L=LANES,
        num_warps=LANES // 256,  # a thread reads 8 tokens at once, and keeps its lanes for itself
        enable_fp_fusion=False,
    )
    return logp, lse, ent if entropy else None


@triton.jit
def _gradient(
    X,
    TARGETS,
    LSE,
    G,
    ENTROPY,
    E,
    V,
    scale,
    inverse,
    softcap,
    CAP: tl.constexpr,
    WITH: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (row, block of the vocabulary); replaces the logits by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BV + tl.arange(0, BV)
    z = capped(
        tl.load(X + row * V + at, mask=at < V, other=0.0).to(tl.float32) * scale, softcap, CAP
    )
    g = tl.load(G + row)
    logp = z * inverse - tl.load(LSE + row)
    p = tl.exp(logp)
    grad = tl.where(at == tl.load(TARGETS + row), g, 0.0) - g * p
    if WITH:
        grad -= tl.load(E + row) * tl.where(p > 0, p * (logp + tl.load(ENTROPY + row)), 0.0)
    if CAP:
        grad *= 1.0 - (z / softcap) * (z / softcap)
    tl.store(X + row * V + at, (grad * scale * inverse).to(X.dtype.element_ty), mask=at < V)


def softmax_gradient(
    x: Tensor,
    targets: Tensor,
    lse: Tensor,
    g: Tensor,
    temperature: float,
    scale: float,
    softcap: float | None,
    entropy: Tensor | None,
    e: Tensor | None,
) -> Tensor:
    """Twin of `head.gradient`, in place."""
    rows, vocabulary = x.shape
    block = 4096
    _gradient[(rows, ceil_div(vocabulary, block))](
        x,
        targets,
        lse,
        g.contiguous(),
        lse if entropy is None else entropy,
        g if e is None else e.contiguous(),
        vocabulary,
        scale,
        1.0 / temperature,
        softcap or 0.0,
        CAP=softcap is not None,
        WITH=e is not None,
        BV=block,
        num_warps=8,
    )
    return x
