"""A pack split over the k ranks of a sequence group (Ulysses, 2309.14509): each rank runs the trunk
on a slice of the tokens, and around attention the ranks change places with heads: all tokens of H /
k heads instead of 1 / k of the tokens of all heads.

What is read of the hidden states (log-probs, values) is computed by the rank that has the row and
then joined, so every rank sees the [M] numbers of the whole pack and computes the same loss. Going
back, each rank takes the gradient of its own rows only: summed over the group that is the gradient
of the unsplit pack.

Legend: N tokens of a pack, n of a slice, M places that are read, m of them here, k ranks, H query
heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reinforge.core.errors import InputError
from reinforge.models.attention import AttentionLayout
from reinforge.models.attention_rule import AttentionRule


class SequenceSlices:
    """The ranks that share every pack of a model, seen from one of them."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sizes(self, tokens: int) -> list[int]:
        """Tokens of each rank: even but for one, the first ranks get more."""
        return [tokens // self.size + (i < tokens % self.size) for i in range(self.size)]

    def span(self, tokens: int) -> slice:
        """Which tokens of a pack are here."""
        sizes = self.sizes(tokens)
        begin = sum(sizes[: self.rank])
        return slice(begin, begin + sizes[self.rank])

    def computed(self, tokens: int) -> slice:
        """Which tokens of a pack this rank computes: its own; all of them where there are fewer
        than ranks, because somebody would have none.
        """
        return slice(None) if tokens < self.size else self.span(tokens)


@dataclass(slots=True)
class SliceReading:
    """M places of a pack whose hidden states are read, and which m of them lie here.

    Without slices that is all of them.
    """

    places: Tensor  # [m] rows of this rank's states
    mine: Tensor | None = None  # [m] which of the M they are; None: all
    total: int = 0  # M
    slices: SequenceSlices | None = None

    @classmethod
    def of(cls, places: Tensor, tokens: int, slices: SequenceSlices | None) -> SliceReading:
        if slices is None:
            return cls(places)
        here = slices.span(tokens)
        mine = ((places >= here.start) & (places < here.stop)).nonzero()[:, 0]
        return cls(places.index_select(0, mine) - here.start, mine, len(places), slices)

    def rows(self, states: Tensor) -> Tensor:
        return states.index_select(0, self.places)

    def own(self, x: Tensor) -> Tensor:
        """Of [M, ...], what belongs to the rows here."""
        return x if self.mine is None else x.index_select(0, self.mine)

    def join(self, x: Tensor) -> Tensor:
        """[M, ...] of the whole pack, of the [m, ...] that each rank has found out."""
        if self.mine is None or self.slices is None:
            return x
        everywhere = x.new_zeros(self.total, *x.shape[1:]).index_copy(0, self.mine, x)
        joined: Tensor = _SumOverRanks.apply(everywhere, self.slices.group)
        return joined


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks of vectors of which each place is 0 on all ranks but one.

    All ranks go on to compute the same loss with it, so the gradient that arrives is complete on
    each, and a rank takes its own places of it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Exchange(torch.autograd.Function):
    """all_to_all of rows: `give[j]` of x go to rank j, `take[j]` come from it. Going back they
    return.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, give: list[int], take: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way = (give, take, group)
        return _exchanged(x, give, take, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        give, take, group = ctx.way
        return _exchanged(grads[0], take, give, group), None, None, None


def _exchanged(x: Tensor, give: list[int], take: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(take), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), take, give, group=group)
    return out


@dataclass(slots=True)
class Ulysses:
    """The layout of one slice.

    `whole` is that of the pack: it knows segments, shared prompts and windows, and never hears of
    slices.
    """

    whole: AttentionLayout
    slices: SequenceSlices
    tokens: int  # N

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [n, H, D], k and v [n, K, D] -> [n, H, D]."""
        ranks = self.slices.size
        heads = q.shape[1]
        check_heads(heads, ranks)
        # fewer key heads than ranks: each rank gets the one that its query heads share
        copies = math.lcm(k.shape[1], ranks) // k.shape[1]
        k, v = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))
        q, k, v = self._all_tokens(q, k, v)
        if rule.sinks is not None:
            rule = replace(rule, sinks=rule.sinks.chunk(ranks)[self.slices.rank])
        return self._all_heads(self.whole.attend(layer, q, k, v, rule))

    def _all_tokens(self, *parts: Tensor) -> list[Tensor]:
        """[n, H, D] each -> [N, H / k, D] each, in one exchange."""
        ranks = self.slices.size
        n = parts[0].shape[0]
        sizes = self.slices.sizes(self.tokens)
        shapes = [(x.shape[1] // ranks, x.shape[2]) for x in parts]
        widths = [heads * size for heads, size in shapes]
        flat = torch.cat(
            [x.reshape(n, ranks, width) for x, width in zip(parts, widths, strict=True)], -1
        )
        rows = _Exchange.apply(
            flat.transpose(0, 1).reshape(ranks * n, -1), [n] * ranks, sizes, self.slices.group
        )
        return [
            x.view(self.tokens, *shape)
            for x, shape in zip(rows.split(widths, -1), shapes, strict=True)
        ]

    def _all_heads(self, x: Tensor) -> Tensor:
        """[N, H / k, D] -> [n, H, D]."""
        ranks = self.slices.size
        sizes = self.slices.sizes(self.tokens)
        n = sizes[self.slices.rank]
        heads = x.shape[1]
        size = x.shape[2]
        rows: Tensor = _Exchange.apply(
            x.reshape(self.tokens, heads * size), sizes, [n] * ranks, self.slices.group
        )
        return rows.view(ranks, n, heads, size).transpose(0, 1).reshape(n, ranks * heads, size)


def check_heads(heads: int, ranks: int) -> None:
    if heads % ranks:
        fits = [k for k in range(1, heads + 1) if heads % k == 0]
        raise InputError(
            f"{heads} attention heads do not divide by {ranks} ranks of a sequence group.",
            where="train.sequence_parallel",
            fix=f"Set it to one of {', '.join(map(str, fits))}.",
        )
