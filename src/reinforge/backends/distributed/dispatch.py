"""Which rank computes which packs of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.core.batch import Batch, cut


def dispatch_packs(sizes: Sequence[int], ranks: int) -> list[list[tuple[int, bool]]]:
    """For each rank the packs it computes, in order, and whether they count.

    All ranks get equally many: who would get none computes the smallest one for nothing. Ranks work
    in step, so packs of like size go side by side, the larger to whoever has done less.

    >>> deal([10, 30, 20], 2)
    [[(1, True), (0, True)], [(2, True), (0, False)]]
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    shares: list[list[tuple[int, bool]]] = [[] for _ in range(ranks)]
    done = [0] * ranks
    for a in range(0, len(order), ranks):
        free = sorted(range(ranks), key=lambda rank: (done[rank], rank))
        for place, rank in enumerate(free):
            i = order[a + place] if a + place < len(order) else order[-1]
            shares[rank].append((i, a + place < len(order)))
            done[rank] += sizes[i]
    return shares


def split_evenly(cuts: Sequence[Sequence[Batch]], ranks: int, unit: int = 1) -> list[list[Batch]]:
    """The parts of every batch, the largest cut in two until the ranks can share them equally, or
    until nothing can be cut.
    """
    parts = [list(own) for own in cuts]
    wanted = -(-sum(map(len, parts)) // ranks) * ranks
    whole: set[int] = set()  # ids of packs that are one unit
    while sum(map(len, parts)) < wanted:
        able = [
            (i, j) for i, own in enumerate(parts) for j, p in enumerate(own) if id(p) not in whole
        ]
        if not able:
            break
        i, j = max(able, key=lambda place: parts[place[0]][place[1]].n_tokens)
        pack = parts[i][j]
        # near the middle, as units allow
        tries = (cut(pack, -(-pack.n_tokens * eighths // 8), unit=unit) for eighths in (4, 5, 6, 7))
        halves = next((found for found in tries if len(found) == 2), None)
        if halves is None:
            whole.add(id(pack))
        else:
            parts[i][j : j + 1] = halves
    return parts
