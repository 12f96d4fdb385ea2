"""The gated delta rule with a gradient, by the kernels of `models.kernels.delta`: `chunked` for
segments that lie end to end, as it is written in `token_by_token`. `recurrences.GatedDelta` calls
it where a GPU trains or scores in 16 bits.

Inputs are all that is kept for the backward pass; states are computed again there, for as many
heads at a time as `ROOM` allows.

Legend: N tokens, S segments, L their padded length, H heads, D size of a key, V size of a value.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from reinforge.models.segment_table import SegmentTable
from reinforge.models.trial import on_its_own

ROOM = 2 << 30  # bytes of states and their gradients at once
LARGEST_KEY = 128  # a wider state does not fit into a program's registers
NEAR = 0.03  # how far gradients may be from the truth, relative to their size, in 16 bits
LOG = logging.getLogger("reinforge")


def token_by_token(
    parts: Sequence[Tensor], state: Tensor | None, normed: bool
) -> tuple[Tensor, Tensor]:
    """The rule in plain torch and float32, with a fixed arithmetic: queries and keys [S, L, H, D],
    values [S, L, H, V], decays (logarithms, [S, L, H] or one for each number of a key) and betas
    [S, L, H] -> [S, L, H, V] and the last states [S, H, D, V].
    """
    dtype = parts[2].dtype
    query, key, value, decay, beta = (x.float() for x in parts)
    if normed:
        query, key = (x * torch.rsqrt((x * x).sum(-1, True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    decay = decay.exp()
    decay = decay[..., None, None] if decay.ndim == 3 else decay[..., None, :]
    # values first, so that sums go over the last dimension
    if state is None:
        now = value.new_zeros(*value.shape[:1], *value.shape[2:], key.shape[-1])
    else:
        now = state.float().transpose(-1, -2)
    outs = []
    for t in range(query.shape[1]):
        now = now * decay[:, t]
        known = (now * key[:, t, :, None]).sum(-1)
        change = (value[:, t] - known) * beta[:, t, :, None]
        now = now + change[..., None] * key[:, t, :, None]
        outs.append((now * query[:, t, :, None]).sum(-1))
    return torch.stack(outs, 1).to(dtype), now.transpose(-1, -2)


def chunked(
    parts: Sequence[Tensor], table: SegmentTable, state: Tensor | None, normed: bool
) -> tuple[Tensor, Tensor]:
    """Queries and keys [N, H, D], values [N, H, V], decays and betas [N, H] -> [N, H, V] and the
    last states [S, H, D, V], where they are asked for. `state` [S, H, D, V]: the first ones, where
    they are given.
    """
    out, ends = _ChunkDelta.apply(table, normed, state, *parts)
    return out, ends


class _ChunkDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, normed, state, *parts):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import delta as kernels

        parts = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in parts)
        state = None if state is None else state.float().contiguous()
        ctx.table = table
        ctx.normed = normed
        ctx.save_for_backward(state, *parts)
        query, _, value, *_ = parts
        count = len(table.segments) if table.given else table.forks
        ends = _states(count, query, value)
        if not table.given:
            ctx.mark_non_differentiable(ends)
        return kernels.forward(parts, table, state, ends if count else None, normed), ends

    @staticmethod
    def backward(ctx, grad, far):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import delta as kernels

        table = ctx.table
        state, *parts = ctx.saved_tensors
        query, _, value, *_ = parts
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in parts]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        begun = len(table.segments) if state is not None else table.continued
        near = _states(begun, query, value)
        far = far.contiguous() if table.given else None
        per_head = 2 * len(table.chunks) * query.shape[-1] * value.shape[-1]
        at_once = max(1, ROOM // (per_head * query.element_size()))
        for a in range(0, query.shape[1], at_once):
            some = slice(a, a + at_once)
            chosen = tuple(x[:, some] for x in parts)
            ends = _states(table.forks, chosen[0], value)
            kernels.backward(
                chosen,
                table,
                None if state is None else state[:, some],
                ends if table.forks else None,
                grad[:, some],
                None if far is None else far[:, some],
                near[:, some] if begun else None,
                tuple(x[:, some] for x in grads),
                ctx.normed,
            )
        return None, None, near if state is not None else None, *grads


def _states(count: int, query: Tensor, value: Tensor) -> Tensor:
    return query.new_empty(
        count, query.shape[1], query.shape[2], value.shape[2], dtype=torch.float32
    )


@cache
def proven(size: int, wide: int, dtype: torch.dtype, normed: bool, device: torch.device) -> bool:
    """Whether the kernels have the outputs and gradients of `token_by_token` on this device. A
    compiler may be wrong: Triton 3.4 to 3.7 were about other kernels of this rule on a Hopper.
    """
    try:
        error = distance(size, wide, dtype, normed, device)
    except Exception as problem:
        LOG.warning(
            f"gated delta nets: no kernel for {size} x {wide} ({problem!r}), plain torch instead"
        )
        return False
    if not error < NEAR:  # NaN too
        LOG.warning(
            f"gated delta nets: gradients of our kernels are {error:.2g} away from the truth on"
            f" {device}, plain torch instead"
        )
        return False
    LOG.info(f"gated delta nets: our kernels, {error:.2g} away from the truth")
    return True


@torch.inference_mode(False)
def distance(size: int, wide: int, dtype: torch.dtype, normed: bool, device: torch.device) -> float:
    """The largest difference, relative to its size, of outputs and gradients of a small pack with a
    prompt that is continued.
    """
    lengths = [70, 9]
    heads = 2
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(sum(lengths), heads, *shape, generator=draw)

    made = [normal(size), normal(size), normal(wide), -normal().exp() / 8, normal().sigmoid()]
    if not normed:
        made[1] = made[1] / size**0.5
    low = [x.to(device, torch.float32 if i == 3 else dtype) for i, x in enumerate(made)]
    weights = normal(wide).to(device)
    with on_its_own(device):
        parts = [x.requires_grad_() for x in low]
        out, _ = chunked(parts, SegmentTable.of_pack(lengths, [-1, 0], device), None, normed)
        found = [out, *torch.autograd.grad((out * weights).sum(), parts)]
        pieces = [x.float().split(lengths) for x in parts]
        first, state = token_by_token([x[0][None] for x in pieces], None, normed)
        second, _ = token_by_token([x[1][None] for x in pieces], state, normed)
        true = torch.cat([first[0], second[0]])
        want = [true, *torch.autograd.grad((true * weights).sum(), parts)]
        errors = [
            (one.float() - two.float()).norm() / two.float().norm()
            for one, two in zip(found, want, strict=True)
        ]
        worst = torch.stack(errors).max()  # NaN if one is
    return float(worst.detach())
