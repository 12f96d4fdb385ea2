"""Environments that draw from the process's global generators, each with a state of its own.

Several episodes run at once, and `random.seed(seed)` in one would decide the draws of all: the
episodes of a prompt would not share their task, and no run would repeat. Inside `with chance:` the
global generators are this episode's; outside they are as before. One episode at a time: a call that
hangs here holds up the others, which `env.python` (a process for each) avoids.
"""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

_LOCK = threading.RLock()


class RandomState:
    """
    >>> a, b = Chance(1), Chance(1)
    >>> with a: x = random.random()
    >>> with b: y = random.random(), random.random()
    >>> with a: z = random.random()
    >>> (x, z) == y
    True
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._own: tuple[Any, Any] | None = None
        self._outside: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        _LOCK.acquire()
        self._outside = _states()
        if self._own is None:
            random.seed(self.seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(self.seed % 2**32)
        else:
            _restore(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = _states()
        _restore(self._outside)
        _LOCK.release()


def _states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _restore(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
