"""Continued pre-training: whole texts end to end, cut into blocks of equal length.

Every document is its tokens and EOS (and BOS, where the tokenizer begins texts with one). They are
joined in their order and cut every `size` - 1 tokens; a block begins with the last token of the one
before it, so that every token but the first is predicted exactly once and nothing is padded. Only
the last block is shorter.
"""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, overload

import numpy as np

from reinforge.core.row import Row
from reinforge.core.sample import Sample
from reinforge.data.sources import MIXTURE
from reinforge.data.units import Unit

CODE = "I"  # an id takes four bytes


class TokenBlocks(Sequence[Unit]):
    """Blocks of one long run of tokens, each a unit of one sample in which all is trained.
    `cut_into_blocks` makes it; the loop takes blocks by number as it takes rows.
    """

    def __init__(self, tokens: Any, begins: Sequence[int], ends: Sequence[int], names: list[str]):
        self._tokens = tokens  # uint32, in memory or in a file
        self._begins = begins
        self._ends = ends
        self._names = names  # the source of each, in a mixture

    def __len__(self) -> int:
        return len(self._begins)

    @property
    def tokens(self) -> int:
        return len(self._tokens)

    @property
    def lengths(self) -> list[int]:
        return [end - begin for begin, end in zip(self._begins, self._ends, strict=True)]

    def ids(self, number: int) -> list[int]:
        return [int(i) for i in self._tokens[self._begins[number] : self._ends[number]]]

    @overload
    def __getitem__(self, index: int) -> Unit: ...
    @overload
    def __getitem__(self, index: slice) -> list[Unit]: ...

    def __getitem__(self, index: int | slice) -> Unit | list[Unit]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        ids = self.ids(index)
        return [Sample.from_tokens(f"block {index}", ids, [True] * len(ids))]

    def rows(self) -> list[Row]:
        """What stands for blocks where rows are asked for. An id says what is in its block, so that
        a checkpoint notices when the texts have changed.
        """
        return [self._row(i) for i in range(len(self))]

    def _row(self, number: int) -> Row:
        ids = array(CODE, self.ids(number)).tobytes()
        digest = hashlib.blake2b(ids, digest_size=8).hexdigest()
        name = self._names[number]
        return Row(f"block {number} {digest}", "", {MIXTURE: name} if name else {})


def cut_into_blocks(
    documents: Iterable[tuple[str, Sequence[int]]], size: int, *, on_disk: bool = False
) -> TokenBlocks:
    """The blocks of documents, (source, tokens) each, whose tokens are kept in memory or in a
    temporary file. No block has tokens of two sources.

    >>> blocks = cut_into_blocks([("", [5, 6, 0]), ("", [7, 8, 9, 0])], 4)
    >>> [blocks.ids(i) for i in range(len(blocks))]
    [[5, 6, 0, 7], [7, 8, 9, 0]]
    """
    file = tempfile.TemporaryFile(prefix="reinforge-tokens-") if on_disk else None  # noqa: SIM115
    held = array(CODE)
    count = 0
    parts: list[tuple[str, int, int]] = []  # of each source: its name, first token, end
    for name, of_source in groupby(documents, key=lambda pair: pair[0]):
        begin = count
        for _, ids in of_source:
            count += len(ids)
            if file is None:
                held.extend(ids)
            else:
                file.write(array(CODE, ids).tobytes())
        parts.append((name, begin, count))
    begins = array("q")
    ends = array("q")
    names: list[str] = []
    for name, first, end in parts:
        for begin in range(first, end - 1, size - 1):
            begins.append(begin)
            ends.append(min(begin + size, end))
            names.append(name)
    if file is None:
        return TokenBlocks(held, begins, ends, names)
    file.flush()
    tokens = np.memmap(file, dtype=np.uint32, mode="r", shape=(count,))
    return TokenBlocks(tokens, begins, ends, names)
