"""Drafts for lossless speculative decoding: guesses of the next tokens, which one forward verifies
together (docs/decisions/0021-speculation.md).

They come from what is at hand: the row's own text, finished siblings of its group, and earlier
answers to the same prompt. `look_up` is where drafts are made; a draft model would be another
function from rows to drafts, and nothing else would change.

Legend: B rows, k drafts, M tokens of a line that is searched.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reinforge.core.arrays import ints

NOTHING = -1  # no token has this id: such a draft is never drawn
MATCH = 4  # so many of a row's last tokens are looked for, the more the better
LEAST = 2  # and so many must be found
ANSWERS = 8  # of one prompt are remembered, the newest
TIMES = 4  # a line has room for so many of the longest answers
MOST = 1 << 14  # and never for more tokens than this
TRIAL = 1024  # steps of rows after which it is judged whether drafts pay
WORTH = 1.4  # tokens a step from which on they do: a step with drafts costs as much as so many
PAUSE = 1 << 14  # tokens without drafts before they are tried again


@dataclass(frozen=True, slots=True)
class Speculation:
    """When and how the native engine drafts. `build/engines.py` makes it from
    `rollout.speculation`.
    """

    drafts: int = 3  # tokens that one forward verifies beside the next one
    rows: int | None = 32  # only while at most so many sequences are decoded; None: always
    memory: int = 1 << 22  # tokens of finished answers that are remembered


@dataclass(slots=True)
class DraftTrial:
    """Whether drafts pay. The native engine tells it what came of them, and drafts while it says
    so: a policy that never says the same thing twice is not slowed down by guesses.
    """

    steps: int = 0
    tokens: int = 0
    pause: int = 0  # tokens still to come without drafts

    @property
    def pays(self) -> bool:
        return self.pause <= 0

    def count(self, steps: int, tokens: int) -> None:
        """So many tokens came of so many steps of rows with drafts; 0 steps: without."""
        if not steps:
            self.pause -= tokens
            return
        self.steps += steps
        self.tokens += tokens
        if self.steps >= TRIAL:
            if self.tokens < WORTH * self.steps:
                self.pause = PAUSE
            self.steps = 0
            self.tokens = 0


Kin = bytes | int  # the hash of a prompt, or the number of a request


def kin_of(prompt: Sequence[int]) -> Kin:
    data = ints(list(prompt)).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


class AnswerMemory:
    """Finished answers by their kin: the same prompt, or the same request. The native engine puts
    them in and looks for drafts in those of kin.

    Bounded: the newest few of each kin, and those that were asked for last.
    """

    def __init__(self, tokens: int):
        self.bound = tokens
        self.size = 0
        self._answers: OrderedDict[Kin, deque[list[int]]] = OrderedDict()

    def add(self, kin: Kin, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """What is kept begins with the prompt's end, by which the beginning of the answer is
        found.
        """
        known = self._answers.setdefault(kin, deque())
        known.append([*prompt[-MATCH:], *answer])
        self.size += len(known[-1])
        if len(known) > ANSWERS:
            self.size -= len(known.popleft())
        self._answers.move_to_end(kin)
        while self.size > self.bound:
            _, oldest = self._answers.popitem(last=False)
            self.size -= sum(map(len, oldest))

    def line(self, kin: Kin, room: int) -> list[int]:
        """The answers of kin, the newest last, `NOTHING` after each: as many as fit."""
        found: list[int] = []
        if kin not in self._answers:
            return found
        self._answers.move_to_end(kin)
        for answer in reversed(self._answers[kin]):
            if len(found) + len(answer) + 1 > room:
                break
            found = [*answer, NOTHING, *found]
        return found


def room_for(longest: int) -> int:
    """Tokens of answers in a line, where completions have at most `longest`: a power of two, so
    that lines of like runs have one size.
    """
    return min(MOST, TIMES << max(4, longest.bit_length()))


def padded(lines: Sequence[Sequence[int]], width: int) -> Tensor:
    """[B, width], filled up with `NOTHING`."""
    table = np.full((len(lines), width), NOTHING, dtype=np.int64)
    for row, line in zip(table, lines, strict=True):
        row[: len(line)] = line
    return torch.from_numpy(table)


def look_up(seen: Tensor, newest: Tensor, count: int) -> Tensor:
    """[B, count] drafts: what followed where the last tokens of a row occurred before; `NOTHING`
    where they did not.

    seen [B, M]; newest [B]: the place of the newest token in it, after which there is nothing. Of
    several places the one where most tokens agree is taken, then one that has `count` successors,
    then the last one. Nothing here asks the host: a CUDA graph may hold it.
    """
    width = seen.shape[1]
    device = seen.device
    back = torch.arange(MATCH, device=device)
    last = seen.gather(1, (newest[:, None] - back).clamp_(min=0))  # the newest first
    same = torch.ones_like(seen, dtype=torch.bool)
    agree = torch.zeros_like(seen)
    for i in range(MATCH):  # the token i + 1 places before each place
        equal = (seen[:, : width - 1 - i] == last[:, i, None]) & (last[:, i, None] != NOTHING)
        same = same & torch.nn.functional.pad(equal, (i + 1, 0))
        agree += same
    there = seen != NOTHING
    whole = torch.nn.functional.pad(there[:, count - 1 :], (0, count - 1))
    place = torch.arange(width, device=device)
    score = (agree * 2 + whole) * width + place
    best, at = torch.where(there & (agree >= LEAST), score, NOTHING).max(1)
    after = (at[:, None] + torch.arange(count, device=device)).clamp_(max=width - 1)
    found = seen.gather(1, after)
    # what comes after a gap belongs to another text
    gap = (found == NOTHING).cumsum(1) > 0
    return found.masked_fill(gap | (best[:, None] < 0), NOTHING)
