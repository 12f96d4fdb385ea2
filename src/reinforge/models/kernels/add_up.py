# mypy: disable-error-code="no-untyped-def"
"""Many tensors added to as many others by one kernel. Twin: `total.add_(part)` for each.

Legend: S tensors.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.core.arrays import ints, to_device
from reinforge.models.kernels.common import ceil_div

AT_ONCE = 4096  # numbers of a program
ALIGNED = 16  # bytes: of a load that fetches several numbers
NARROW = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _add_up(PLACES, SHAPE, S, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """PLACES [2, S]: where the totals and the parts begin. SHAPE: the S sizes, the S first
    programs, and which tensor each program works on.
    """
    program = tl.program_id(0)
    which = tl.load(SHAPE + 2 * S + program)
    i = (program - tl.load(SHAPE + S + which)) * BLOCK + tl.arange(0, BLOCK)
    there = i < tl.load(SHAPE + which)
    totals = tl.load(PLACES + which).to(tl.pointer_type(tl.float32))
    parts = tl.load(PLACES + S + which).to(tl.pointer_type(DTYPE))
    total = tl.multiple_of(totals, 16) + i
    part = tl.multiple_of(parts, 16) + i
    found = tl.load(total, mask=there) + tl.load(part, mask=there).to(tl.float32)
    tl.store(total, found, mask=there)


@lru_cache(maxsize=64)
def _shape(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """SHAPE of `_add_up`, and how many programs there are."""
    counts = ints([ceil_div(size, AT_ONCE) for size in sizes])
    which = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    return to_device(torch.cat([ints(sizes), counts.cumsum(0) - counts, which]), device), len(which)


def can_add(total: Tensor, part: Tensor) -> bool:
    """Whether the kernel takes them: numbers in 16 bits, without gaps, where loads are quick."""
    return (
        part.dtype in NARROW
        and total.dtype == torch.float32
        and type(part) is Tensor
        and part.is_contiguous()
        and total.is_contiguous()
        and part.data_ptr() % ALIGNED == 0
        and total.data_ptr() % ALIGNED == 0
        and part.numel() > 0
    )


def add_up(totals: list[Tensor], parts: list[Tensor]) -> None:
    """Adds each part to its total; all parts of one type, no total twice."""
    places = ints([[x.data_ptr() for x in some] for some in (totals, parts)])
    device = parts[0].device
    shape, programs = _shape(tuple(part.numel() for part in parts), device)
    _add_up[(programs,)](
        to_device(places, device),
        shape,
        len(parts),
        DTYPE=NARROW[parts[0].dtype],
        BLOCK=AT_ONCE,
        num_warps=8,
    )
