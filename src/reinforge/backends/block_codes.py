"""Numbers in 8 bits by blocks: a code of 255 levels, times the largest of every 256 numbers.

Levels are dense near the largest and go down to a ten-millionth of it: of each power of ten twice
as many as of the one below (the dynamic code of 2110.02861, here with both ends and 0 in it).

A moment moves by less than a level in one step, so rounding to the nearest would hold it where it
is. It is rounded up or down as a hash of its place and of the step says, so often up as it is far:
right on average, and a resumed run rounds as the whole one did.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
DECADES = 7
# of a hash of 32 bits: what a place and a step are multiplied by, and its two rounds
PLACE = 0x9E3779B1
STEP = 0x85EBCA6B
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
WORD = (1 << 32) - 1


def magnitudes(first: int) -> list[float]:
    """Levels above 0: `first` of the lowest power of ten, and twice as many of every next one."""
    found = []
    for decade in range(DECADES):
        count = first << decade
        top = 10.0 ** (decade - DECADES + 1)
        found += [top * (0.1 + 0.9 * (i + 1) / count) for i in range(count)]
    return found


@cache
def _levels(signed: bool) -> Tensor:
    if signed:
        up = magnitudes(1)
        return torch.tensor([*(-x for x in reversed(up)), 0.0, *up])
    return torch.tensor([0.0, *(x * x for x in magnitudes(2))])


def levels(signed: bool, device: torch.device) -> Tensor:
    """The 255 numbers of a code, rising, from -1 or 0 to 1. Those without a sign are squares: it is
    the root of a second moment that an update is divided by.
    """
    return _levels(signed).to(device)


def dither(begin: int, n: int, step: int, device: torch.device) -> Tensor:
    """How far between two levels a number of each place is rounded up in this step: [0, 1)."""
    word = (torch.arange(begin, begin + n, device=device) * PLACE + step * STEP) & WORD
    for shift, factor in ROUNDS:
        word = ((word ^ (word >> shift)) * factor) & WORD
    word ^= word >> 16
    return (word >> 8).float() * 2.0**-24


def scales(n: int) -> int:
    return -(-n // BLOCK)


def encoded(values: Tensor, *, signed: bool, between: Tensor | float) -> tuple[Tensor, Tensor]:
    """Codes [N] and the largest of each block of flat float32 numbers. What is not 0 does not
    become 0 in the code without signs: something is divided by it.
    """
    blocks = pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    unit = blocks / torch.where(largest > 0, largest, 1.0)[:, None]
    x = unit.view(-1)[: len(values)]
    table = levels(signed, values.device)
    low = (torch.bucketize(x, table, right=True, out_int32=True) - 1).clamp_(0, len(table) - 2)
    below = table[low]
    up = x - below > between * (table[low + 1] - below)
    codes = (low + up).to(torch.uint8)
    if not signed:
        codes = torch.maximum(codes, (x > 0).to(torch.uint8))
    return codes, largest


def decoded(codes: Tensor, largest: Tensor, *, signed: bool) -> Tensor:
    table = levels(signed, codes.device)
    found = pad(table[codes.int()], (0, -len(codes) % BLOCK)).view(-1, BLOCK)
    return (found * largest[:, None]).view(-1)[: len(codes)]
