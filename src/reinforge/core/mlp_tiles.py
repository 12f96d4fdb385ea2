"""How many tokens of a long pack an MLP computes at once, for `models.tiled_mlp` and for who
foretells memory.
"""

from __future__ import annotations

LONG = 32768  # tokens of a pack: up to so many at once
TILE = 8192  # tokens


def in_tiles(tokens: int) -> bool:
    """Whether a pack is computed in tiles."""
    return tokens > LONG
