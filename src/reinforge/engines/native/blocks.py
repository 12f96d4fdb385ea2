"""Which cache block belongs to whom, and which slot of state.

Blocks of a shared prompt are counted, not copied, and may be found again by their content. A slot
holds what the layers that keep state remember of one sequence: it is never shared.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from reinforge.core.arrays import ints


def block_keys(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """One key per full block: a hash of everything up to its end, because keys and values depend on
    all of it.
    """
    keys: list[bytes] = []
    data = ints(list(tokens)).numpy().tobytes()
    step = 8 * block_size
    for i in range(len(tokens) // block_size):
        keys.append(
            hashlib.blake2b(
                (keys[-1] if keys else b"") + data[i * step : (i + 1) * step], digest_size=16
            ).digest()
        )
    return keys


class BlockPool:
    """The blocks of the paged cache: hands out their ids and takes them back. The native engine has
    one.

    A block returns to the pool when its last holder lets go; one that is remembered by a key can be
    found until its room is needed, the longest unused first.
    """

    def __init__(self, blocks: int, block_size: int, slots: int = 0):
        """`slots`: of state, for as many sequences; 0: the model keeps none."""
        self.total = blocks
        self.slots = slots
        self._free_slots = list(range(slots, 0, -1))  # slot 0 is nobody's
        self.block_size = block_size
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._known: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}
        # remembered, held by nobody, in the order of their last use
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        return len(self._free) + len(self._idle)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        assert count <= self.free, f"asked for {count} blocks, {self.free} are free"
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def take_slot(self) -> int:
        """A slot of state; 0 where there are none."""
        return self._free_slots.pop() if self.slots else 0

    def release_slot(self, slot: int) -> None:
        if slot:
            assert slot not in self._free_slots, f"slot {slot} released twice"
            self._free_slots.append(slot)

    def share(self, blocks: list[int]) -> list[int]:
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):  # the end of a prefix is forgotten before its beginning
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} released twice"
            if not self._holders[block]:
                if block in self._key:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    # ---- blocks known by what is in them ----

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning. They are not held yet."""
        found: list[int] = []
        for key in keys:
            if key not in self._known:
                break
            found.append(self._known[key])
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of these nobody holds: sharing them takes that many from `free`."""
        return sum(block in self._idle for block in blocks)

    def remember(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        for block, key in zip(blocks, keys, strict=False):
            if key not in self._known and block not in self._key:
                self._known[key], self._key[block] = block, key

    def forget(self) -> None:
        """What is cached came from other weights."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._known.clear()
        self._key.clear()

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._known[self._key.pop(block)]
        return block


@dataclass(slots=True)
class CacheHolding:
    """What one sequence holds of the cache: blocks, in the order of its tokens, and a slot where
    the model keeps state. `prefill.admit` fills it, the native engine lets it grow before decode
    steps and gives it back as a whole.

    Everything that a sequence takes and gives back goes through here.
    """

    blocks: list[int] = field(default_factory=list)
    slot: int = 0  # 0: none

    def enter(self, pool: BlockPool) -> None:
        """Takes a slot, where the model keeps state."""
        assert not self.slot
        self.slot = pool.take_slot()

    def missing(self, pool: BlockPool, tokens: int) -> int:
        """Blocks that it would have to take to hold so many tokens."""
        return max(0, pool.needed(tokens) - len(self.blocks))

    def share(self, pool: BlockPool, blocks: list[int]) -> None:
        """Begins with blocks that somebody else has filled or will fill."""
        assert not self.blocks
        self.blocks = pool.share(blocks)

    def grow(self, pool: BlockPool, tokens: int) -> list[int]:
        """Takes what it needs to hold so many tokens. Returns the new blocks."""
        taken = pool.take(self.missing(pool, tokens))
        self.blocks += taken
        return taken

    def give_back(self, pool: BlockPool) -> None:
        pool.release(self.blocks)
        pool.release_slot(self.slot)
        self.blocks = []
        self.slot = 0
