"""Whether the forward that runs now is an engine's, on its way to the next tokens.

Its kernels may round otherwise than those that a gradient goes through. What trains or scores takes
the latter, so that a policy has the same bits with and without a gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _DecodingThread(threading.local):
    on: bool = False


_now = _DecodingThread()


@contextmanager
def decoding() -> Iterator[None]:
    """Inside, the kernels of an engine are used."""
    before = _now.on
    _now.on = True
    try:
        yield
    finally:
        _now.on = before


def is_decoding() -> bool:
    return _now.on
