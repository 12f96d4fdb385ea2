"""Attention with the same bits for a query wherever it is computed: in a training pack, in a
prefill, in a decode step.

Queries are cut into tiles (`models.exact_tiles`), and each tile visits its tiles of keys in order
from position 0 with an online softmax of fixed shape (on a GPU one for every chunk of keys, and
chunks are joined in order). `layout` turns the layouts of `models.attention` into exact ones.

Legend: N tokens, T tiles, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reinforge.core.errors import InputError
from reinforge.models import exact_functions
from reinforge.models.attention import (
    AttentionLayout,
    PackedLayout,
    PagedLayout,
    PrefillLayout,
    Segments,
    rotate,
)
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.exact_tiles import KEYS, TilePlan, plan_paged, plan_segments, tile_shape

REFUSED = "Set model.exact to false."
SCORES = 1 << 14  # numbers in the tiles that a CPU works on at once


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: TilePlan,
    tables: Tensor | None,
    block: int,
    rule: AttentionRule,
    parts: int = 1,
) -> Tensor:
    """q [N, H, D]; k, v [rows, K, D], or [blocks * block, K, D] with `tables` [T, W] ->
    [N, H, D]. `parts`: programs of a GPU that share the keys of a sequence in a decode step.
    """
    if rule.sinks is not None or rule.chunk is not None:
        what = "attends in chunks" if rule.sinks is None else "uses attention sinks"
        raise InputError(
            f"this model {what}, which exact attention does not know.",
            where="model.exact",
            fix=REFUSED,
        )
    if k.shape[2] != v.shape[2]:
        raise InputError(
            f"keys of this model have heads of {k.shape[2]} numbers and its values of {v.shape[2]};"
            " exact attention knows equal ones only.",
            where="model.exact",
            fix=REFUSED,
        )
    if q.is_cuda:
        from reinforge.models.kernels import exact as kernels

        return kernels.attend(q, k, v, plan, tables, block, rule, parts=parts)
    groups = q.shape[1] // k.shape[1]
    kv_heads = k.shape[1]
    rows, _ = tile_shape(groups, False)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    jobs = len(plan.first) * kv_heads
    size = max(1, SCORES // (rows * KEYS))
    # neighbours need about the same number of key tiles
    order = torch.argsort(plan.first.long().repeat_interleave(kv_heads), stable=True)
    for a in range(0, jobs, size):
        chosen = order[a : a + size]
        job = torch.cat([chosen, chosen[-1:].expand(size - len(chosen))])
        _attend_jobs(
            q,
            k,
            v,
            plan,
            tables,
            block,
            rule,
            job // kv_heads,
            job % kv_heads,
            groups,
            rows,
            len(chosen),
            out,
        )
    return out


def _attend_jobs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: TilePlan,
    tables: Tensor | None,
    block: int,
    rule: AttentionRule,
    tile: Tensor,
    head: Tensor,
    groups: int,
    rows: int,
    count: int,
    out: Tensor,
) -> None:
    """J jobs (tile, key head) at once, always as many: the first `count` of them write to `out`.

    R rows, C keys of a tile.
    """
    row = torch.arange(rows)
    first = plan.first.long()[tile]
    high = plan.high.long()[tile]
    at = first[:, None] + row // groups  # [J, R] positions
    real = (row // groups < plan.positions) & (at >= plan.low[tile, None]) & (at < high[:, None])
    real[count:] = False
    where = torch.where(real, plan.base[tile, None] + at, 0)
    heads = head[:, None] * groups + row % groups
    x_q = q[where, heads].float()  # [J, R, D]
    top = torch.full((len(tile), rows, 1), -1e30)
    total = torch.zeros(len(tile), rows, 1)
    acc = torch.zeros(len(tile), rows, q.shape[2])
    begin = 0 if rule.window is None else max(0, int(first.min()) + 1 - rule.window) // KEYS
    for j in range(begin, int(first.max()) // KEYS + 1):
        t = j * KEYS + torch.arange(KEYS)
        known = torch.minimum(t[None], high[:, None] - 1)  # [J, C]
        if tables is None:
            index = plan.keys.long()[tile, None] + known
        else:
            index = tables[tile[:, None], known // block] * block + known % block
        x = torch.bmm(x_q, k[index, head[:, None]].float().transpose(1, 2)) * rule.scale
        if rule.softcap is not None:
            x = torch.tanh(x / rule.softcap) * rule.softcap
        seen = t <= at[:, :, None]
        if rule.window is not None:
            seen = seen & (t > at[:, :, None] - rule.window)
        x = torch.where(seen, x, -1e30)
        new_top = torch.maximum(top, x.amax(-1, keepdim=True))
        # exp is slow where it underflows
        p = torch.exp(torch.where(seen, x - new_top, 0.0)).masked_fill_(~seen, 0.0)
        keep = exact_functions.evaluate(
            "exp", top - new_top
        )  # here the neighbours in a vector are other rows; above they are keys of one row
        total = total * keep + p.sum(-1, keepdim=True)
        acc = acc * keep + torch.bmm(p, v[index, head[:, None]].float())
        top = new_top
    out[where[real], heads[real]] = (acc[real] / total[real]).to(out.dtype)


class _Attention(torch.autograd.Function):
    """The backward is that of the ordinary attention, computed again."""

    @staticmethod
    def forward(ctx, q, k, v, segments, plan, rule):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v)
        ctx.segments = segments
        ctx.rule = rule
        return attend(q, k, v, plan, None, 1, rule)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out = Segments.attend(ctx.segments, q, k, v, ctx.rule)
        return *torch.autograd.grad(out, (q, k, v), g), None, None, None


@dataclass(slots=True)
class ExactSegments(Segments):
    """Attention between runs of tokens, tile by tile in an order that does not depend on what else
    is in the pack (`model.exact`).
    """

    plans: dict[int, TilePlan] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        with torch._C.DisableTorchFunction():
            positions = tile_shape(q.shape[1] // k.shape[1], q.is_cuda)[1]
            if positions not in self.plans:
                self.plans[positions] = plan_segments(self, positions)
            out: Tensor = _Attention.apply(q, k, v, self, self.plans[positions], rule)
            return out


@dataclass(slots=True)
class ExactPaged:
    """Attention of one new token for each sequence over the paged cache, with the bits that a pack
    would give (`model.exact`).
    """

    paged: PagedLayout
    plan: TilePlan
    slots: Tensor | None = None  # where new keys go, once that was asked for

    @classmethod
    def of(cls, paged: PagedLayout) -> ExactPaged:
        return cls(paged, plan_paged(paged.cached))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`rope`: cos and sin [positions, D] by which q and k are to be turned; None: they were."""
        with torch._C.DisableTorchFunction():
            cache = self.paged.cache
            if rope is not None and q.is_cuda and not self.paged.shared:
                return self._attend_new(layer, q, k, v, rule, rope)
            q = self._store(layer, q, k, v, rope)
            keys, values = (x[layer].view(-1, *k.shape[1:]) for x in (cache.keys, cache.values))
            return attend(
                q,
                keys,
                values,
                self.plan,
                self.paged.tables,
                cache.block_size,
                rule,
                self.paged.parts,
            )

    def _attend_new(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """One kernel: no row needs the keys of another one."""
        from reinforge.models.kernels import exact as kernels

        cache = self.paged.cache
        keys, values = (x[layer].view(-1, *k.shape[1:]) for x in (cache.keys, cache.values))
        return kernels.attend(
            q,
            keys,
            values,
            self.plan,
            self.paged.tables,
            cache.block_size,
            rule,
            kernels.NewKeys(k, v, *rope),
            self.paged.parts,
        )

    def _store(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Writes k and v to the cache; q as it attends."""
        paged = self.paged
        cache = paged.cache
        if rope is not None and q.is_cuda:
            from reinforge.models.kernels.paged_attention import rotate_and_store

            return rotate_and_store(
                q,
                k,
                v,
                cache.keys[layer],
                cache.values[layer],
                paged.tables,
                paged.cached,
                rope,
            )[0]
        if rope is not None:
            cos, sin = (table.index_select(0, paged.cached) for table in rope)
            q = rotate(q, cos, sin)
            k = rotate(k, cos, sin)
        if self.slots is None:
            size = cache.block_size
            block = paged.tables.gather(1, (paged.cached // size)[:, None])[:, 0]
            self.slots = block * size + paged.cached % size
        cache.write(layer, self.slots, k, v)
        return q


@dataclass(slots=True)
class _UnknownLayout:
    """A layout that is not known here (one that only looks at shapes) does what it does."""

    ordinary: AttentionLayout

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        with torch._C.DisableTorchFunction():
            return self.ordinary.attend(layer, q, k, v, rule)


def layout(ordinary: AttentionLayout) -> AttentionLayout:
    """The exact counterpart of a layout."""
    if isinstance(ordinary, (PackedLayout, PrefillLayout)):
        s = ordinary.segments
        exact = copy.copy(ordinary)
        exact.segments = ExactSegments(s.lengths, s.starts, s.key_lengths, s.key_starts)
        return exact
    return (
        ExactPaged.of(ordinary) if isinstance(ordinary, PagedLayout) else _UnknownLayout(ordinary)
    )
