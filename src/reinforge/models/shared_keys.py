"""Keys and values of a prompt that several answers share: copied to each of them, and their
gradients added up again.

Torch does not know that the index of a gather is that of a pack: with deterministic algorithms its
gradient sorts the index anew in each layer, for keys and for values, by some 15 kernels that are
started one after the other. Here the index is sorted once, where the pack is made, and the gradient
is one kernel for both.

Legend: N tokens of a pack, P places that they are copied to, K key/value heads, D head size (of
values it may be another one).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reinforge.core.arrays import to_device

SUMMED = (torch.bfloat16, torch.float16, torch.float32)  # what the kernel adds up, in float32


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Which token of a pack each key of its segments is a copy of, and where the copies of a token
    are. `attention.PackedLayout` makes one per pack, and asks it in every layer.
    """

    index: Tensor  # [P] int64: the token of each place
    # the places of token t, in ascending order: places[starts[t] : starts[t + 1]]
    starts: Tensor  # [N+1] int32
    places: Tensor  # [P] int32
    has_kernel: bool  # whether there is a kernel on this device

    @classmethod
    def of(
        cls, lengths: list[int], prefix: list[int], device: torch.device, *, has_kernel: bool
    ) -> SharedKeys:
        """Of segments end to end, some of which continue an earlier one: -1 = none."""
        ends = np.cumsum(lengths)
        tokens = [np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]
        pieces = []
        for i, before in enumerate(prefix):
            if before >= 0:
                assert prefix[before] < 0, "a segment continues one that continues another"
                pieces.append(tokens[before])
            pieces.append(tokens[i])
        index = np.concatenate(pieces)
        starts = np.zeros(ends[-1] + 1, np.int32)
        np.cumsum(np.bincount(index, minlength=ends[-1]), out=starts[1:])
        places = np.argsort(index, kind="stable").astype(np.int32)
        tables = [to_device(torch.from_numpy(x), device) for x in (index, starts, places)]
        return cls(tables[0], tables[1], tables[2], has_kernel)

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [N, K, D] -> [P, K, D] of each."""
        if self.has_kernel and (k.requires_grad or v.requires_grad) and _summable(k, v):
            found: tuple[Tensor, Tensor] = _Gather.apply(k, v, self)
            return found
        return k.index_select(0, self.index), v.index_select(0, self.index)


def _summable(k: Tensor, v: Tensor) -> bool:
    """Whether they are plain tensors (no shapes without numbers, no shards) that the kernel knows,
    and not in what the compiler makes kernels of.
    """
    return (
        type(k) is Tensor
        and type(v) is Tensor
        and k.dtype in SUMMED
        and v.dtype in SUMMED
        and not torch.compiler.is_compiling()
    )


class _Gather(torch.autograd.Function):
    """Nothing is kept but the tables of the pack, which all layers have in common."""

    @staticmethod
    def forward(ctx, k, v, shared):  # type: ignore[no-untyped-def]
        ctx.shared = shared
        return k.index_select(0, shared.index), v.index_select(0, shared.index)

    @staticmethod
    def backward(ctx, dk, dv):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import shared_keys as kernels

        shared = ctx.shared
        return *kernels.sum_places(dk, dv, shared.starts, shared.places), None
