"""Texts of long answers, made in a thread while other groups are scored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from reinforge.core.aio import SerialThread

TOGETHER = 1 << 16  # tokens of groups whose texts are made by one call, the last group's beyond it

Answers = Sequence[Sequence[int]]


@dataclass(slots=True, eq=False)
class _GroupTexts:
    """Answers to a prompt whose texts are wanted, then their texts or what went wrong."""

    answers: Answers
    texts: list[str] | None = None
    error: Exception | None = None


class TextThread:
    """Makes the texts of groups in the order in which they are asked for, in a thread. Groups that
    are there by the time it gets to one of them are made together with it: a tokenizer that has all
    cores is quicker with many answers, and answers of one length all end at once.
    """

    def __init__(self, decode_all: Callable[[Answers], list[str]]):
        self.decode_all = decode_all
        self._thread = SerialThread("texts")
        self._waiting: deque[_GroupTexts] = deque()  # in the order of the calls

    async def of(self, answers: Answers) -> list[str]:
        """One text for each."""
        group = _GroupTexts(answers)
        self._waiting.append(group)
        found: list[str] = await self._thread.run(partial(self._texts, group))
        return found

    def _texts(self, group: _GroupTexts) -> list[str]:
        if group.texts is None and group.error is None:
            self._make()
        if group.error is not None:
            raise group.error
        assert group.texts is not None
        return group.texts

    def _make(self) -> None:
        """The texts of those who wait, the first and as many more as belong to it."""
        groups: list[_GroupTexts] = []
        tokens = 0
        while self._waiting and tokens < TOGETHER:
            groups.append(self._waiting.popleft())
            tokens += sum(map(len, groups[-1].answers))
        try:
            texts = iter(self.decode_all([ids for group in groups for ids in group.answers]))
        except Exception as error:
            for group in groups:
                group.error = error
            return
        for group in groups:
            group.texts = [next(texts) for _ in group.answers]
