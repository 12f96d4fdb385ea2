"""What a run sets aside for the garbage collector comes back when the last run is over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from reinforge.core import garbage


class Node:
    """Refers to itself, so that only the collector can end it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_dead_when_a_run_begins_is_not_kept() -> None:
    gone = weakref.ref(Node())
    gc.disable()
    try:
        garbage.set_aside()
    finally:
        gc.enable()
    assert gone() is None
    garbage.look_again()


def test_cycles_from_before_a_run_are_collected_when_the_last_run_is_over() -> None:
    before = gc.get_freeze_count()
    node = Node()
    gone = weakref.ref(node)
    garbage.set_aside()
    garbage.set_aside()  # a run inside of it
    assert gc.get_freeze_count() > before + 1000
    del node
    gc.collect()
    assert gone() is not None
    inner = weakref.ref(Node())  # made by the run
    gc.collect()
    assert inner() is None
    garbage.look_again()
    gc.collect()
    assert gone() is not None
    garbage.look_again()
    gc.collect()
    assert gone() is None
