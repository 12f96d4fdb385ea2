"""What follows the weights of a backend whose model is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from reinforge.core.backend import State


class PartOwner(Protocol):
    """A backend whose averages and moving references are held by ranks or by an actor. `part` is a
    name in `parts()`. `WeightFollower` calls it.
    """

    def swap_part(self, part: str, into: bool) -> None:
        """Whether the model computes with the average `part` of its weights."""
        ...

    def part_state(self, part: str) -> State: ...

    def load_part(self, part: str, state: State) -> None: ...


class WeightFollower:
    """An average or a moving reference that is held where the model is, as a part of the run: the
    backend on ranks and the backend in an actor make it, loops save and load it.
    """

    def __init__(self, backend: PartOwner, name: str):
        self.backend = backend
        self.name = name

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model computes with the average. See `WeightAverage.swapped`."""
        self.backend.swap_part(self.name, True)
        try:
            yield
        finally:
            self.backend.swap_part(self.name, False)

    def state(self) -> State:
        return self.backend.part_state(self.name)

    def load(self, state: State) -> None:
        self.backend.load_part(self.name, state)
