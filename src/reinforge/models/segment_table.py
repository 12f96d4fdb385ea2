"""Segments of tokens that lie end to end in a pack, cut into chunks, as the kernels of
`models.kernels.delta` read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reinforge.core.arrays import ints, to_device

CHUNK = 32  # tokens of a chunk


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """Segments that lie end to end, as kernels read them. Each begins with nothing, with a state
    that is given, or with the last state of the one that it continues.

    Columns of `segments`: the first token, how many, the first chunk; the state that it begins with
    and where its last one goes; where the gradient of its first state goes, and from where to where
    those of its last one stand. -1: nowhere.
    """

    segments: Tensor  # [S, 8] int32: those that begin first, then those that continue them
    chunks: Tensor  # [n, 2] int32: the first token of each chunk, and how many it has
    waves: tuple[tuple[int, int], ...]  # the first row and the number of rows of each
    forks: int  # segments that are continued
    continued: int  # segments that continue another one
    given: bool  # first states may be given, and last ones are asked for

    @classmethod
    def of_pack(
        cls, lengths: list[int], prefix: list[int] | None, device: torch.device
    ) -> SegmentTable:
        """`prefix`: which segment each one continues, -1 = none."""
        prefix = prefix or [-1] * len(lengths)
        roots = [i for i, parent in enumerate(prefix) if parent < 0]
        # by parent, so that the gradients for one stand side by side
        children = sorted((i for i, p in enumerate(prefix) if p >= 0), key=lambda i: prefix[i])
        assert all(prefix[prefix[i]] < 0 for i in children), "a prefix has no prefix"
        slots: dict[int, list[int]] = {}
        for at, i in enumerate(children):
            slots.setdefault(prefix[i], []).append(at)
        fork = {parent: at for at, parent in enumerate(slots)}
        ends: dict[int, list[int]] = {}
        for i in roots:
            own = slots.get(i, [0, -1])
            ends[i] = [-1, fork.get(i, -1), -1, own[0], own[-1] + 1]
        for at, i in enumerate(children):
            ends[i] = [fork[prefix[i]], -1, at, 0, 0]
        return cls(
            *_rows(lengths, ends, [roots, children], device), len(fork), len(children), False
        )

    @classmethod
    def of_tile(cls, rows: int, length: int, begun: bool, device: torch.device) -> SegmentTable:
        """Rows of one length. `begun`: a state is given for each."""
        ends = {i: [i if begun else -1, i, i if begun else -1, i, i + 1] for i in range(rows)}
        return cls(*_rows([length] * rows, ends, [list(range(rows))], device), 0, 0, True)


def _rows(
    lengths: list[int], ends: dict[int, list[int]], waves: list[list[int]], device: torch.device
) -> tuple[Tensor, Tensor, tuple[tuple[int, int], ...]]:
    places = []
    chunks: list[list[int]] = []
    begin = 0
    for length in lengths:
        places.append([begin, length, len(chunks)])
        chunks += [[begin + a, min(CHUNK, length - a)] for a in range(0, length, CHUNK)]
        begin += length
    rows: list[list[int]] = []
    spans = []
    for wave in waves:
        spans.append((len(rows), len(wave)))
        # long ones first, so that none is left over at the end
        rows += [places[i] + ends[i] for i in sorted(wave, key=lambda i: -lengths[i])]
    return (
        to_device(ints(rows, np.int32), device),
        to_device(ints(chunks, np.int32), device),
        tuple(span for span in spans if span[1]),
    )
