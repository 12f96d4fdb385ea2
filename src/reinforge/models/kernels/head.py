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

LANES = 2048
KEPT = 4  # tokens of a lane at a time
STAGES = 2  # of them on their way from memory


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
    STAGES: tl.constexpr,
):
    """One program per row, one pass. Each of L lanes keeps its own maximum, Σ exp and Σ exp·z of
    the tokens it meets, K at a time, so that threads wait for each other only at the end.
    """
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(INVERSE + row)
    tops = tl.full((L,), -float("inf"), tl.float32)
    totals = tl.zeros((L,), tl.float32)
    weighted = tl.zeros((L,), tl.float32)
    for start in tl.range(0, V, K * L, num_stages=STAGES):
        at = start + tl.arange(0, K)[:, None] * L + tl.arange(0, L)[None, :]
        x = tl.load(X + row * V + at, mask=at < V, other=0.0).to(tl.float32) * scale
        z = tl.where(at < V, capped(x, softcap, CAP) * inverse, -float("inf"))
        higher = tl.maximum(tops, tl.max(z, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a lane that has met no token
        keep = tl.exp(tops - base)
        e = tl.exp(z - base[None, :])
        totals = totals * keep + tl.sum(e, 0)
        if WITH:
            weighted = weighted * keep + tl.sum(tl.where(e > 0, e * z, 0.0), 0)
        tops = higher
    top = tl.max(tops, 0)
    share = tl.exp(tops - top)
    total = tl.sum(totals * share, 0)
    lse = top + tl.log(total)
    chosen = (
        capped(tl.load(X + row * V + tl.load(TARGETS + row)).to(tl.float32) * scale, softcap, CAP)
        * inverse
    )
    tl.store(LOGP + row, chosen - lse)
    tl.store(LSE + row, lse)
    if WITH:
        tl.store(ENTROPY + row, lse - tl.sum(weighted * share, 0) / total)


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
        STAGES=STAGES,
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
