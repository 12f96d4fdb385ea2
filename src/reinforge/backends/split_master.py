"""A float32 master as the bfloat16 weight and what is left of it: 16 bits, and one for ties.

The weight is the master rounded to the nearest, as it is without splitting, and the rest is the
difference of their bits as whole numbers:

    bits(master) = bits(weight) * 65536 + rest,    -32768 <= rest <= 32768

A master in the middle between two weights is rounded to the even one, so an even weight has 65,537
masters and 16 bits are one too few: `ties` has a bit for each weight that says whether a rest of
-32768 means 32768.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = 1 << 15
BITS = 8  # of a byte


def joined(weight: Tensor, rest: Tensor, ties: Tensor) -> Tensor:
    """The float32 masters of flat bfloat16 weights, exactly."""
    bits = weight.view(torch.int16).to(torch.int32) << 16
    bits += rest
    bits += _unpacked(ties, len(rest)) << 16
    return bits.view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, rest and ties of flat float32 masters."""
    weight = master.to(torch.bfloat16)
    rest = master.view(torch.int32) - (weight.view(torch.int16).to(torch.int32) << 16)
    tie = rest == HALF
    rest -= tie.to(torch.int32) << 16
    return weight, rest.to(torch.int16), _packed(tie)


def tie_bytes(n: int) -> int:
    return -(-n // BITS)


def _packed(flags: Tensor) -> Tensor:
    """Eight flags a byte, the first in the lowest bit."""
    rows = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % BITS)).view(-1, BITS)
    places = torch.arange(BITS, dtype=torch.uint8, device=flags.device)
    return (rows << places).sum(-1, dtype=torch.uint8)


def _unpacked(packed: Tensor, n: int) -> Tensor:
    places = torch.arange(BITS, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> places) & 1).view(-1)[:n].to(torch.int32)
