"""Which cache block belongs to whom. Blocks of a shared prompt are counted, not copied."""

from __future__ import annotations


class BlockPool:
    """Hands out block ids and takes them back. A block returns to the pool when its last holder lets go."""

    def __init__(self, blocks: int, block_size: int):
        self.total, self.block_size = blocks, block_size
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        assert count <= self.free, f"asked for {count} blocks, {self.free} are free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: list[int]) -> list[int]:
        for block in blocks:
            self._holders[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} released twice"
            if not self._holders[block]:
                self._free.append(block)
