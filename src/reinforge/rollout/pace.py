"""When a group has all its tokens and only its scores are missing: from then on the GPU can do
something else.

A rollout says so by `generated()`. Who follows it sees that through a context variable, which tasks
inherit: rollouts keep the plain signature (row, group) -> Group, and one that says nothing counts
as generating until it is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class Mark:
    def __init__(self, told: Callable[[], None], group: str | None):
        self._told = told
        self._left = 1
        self.over = False
        self.group = group

    def expect(self, parts: int) -> None:
        self._left = parts

    def part(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.tell()

    def tell(self) -> None:
        if not self.over:
            self.over = True
            self._told()


_mark: ContextVar[Mark | None] = ContextVar("generating", default=None)


def expect(parts: int) -> None:
    """The group whose task this is generates in so many parts, each of which says `generated`."""
    if (mark := _mark.get()) is not None:
        mark.expect(parts)


def generated() -> None:
    """Nothing more will be generated for this group, or for this part of it."""
    if (mark := _mark.get()) is not None:
        mark.part()


def group() -> str | None:
    """The group that this task is for; None: nobody follows it."""
    mark = _mark.get()
    return None if mark is None else mark.group


async def followed(work: Awaitable[T], told: Callable[[], None], group: str | None = None) -> T:
    """The result of `work`; `told` is called once, when it has generated everything or
    has ended.
    """
    mark = Mark(told, group)
    token = _mark.set(mark)
    try:
        return await work
    finally:
        mark.tell()
        _mark.reset(token)
