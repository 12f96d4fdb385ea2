"""How patient `serve` is with a connection: deadlines for headers and for readers, a cap on how
many there are, a bound on the log.

uvicorn waits for ever: for the rest of a request's headers, and for a client to read what it was
sent. Whoever opens a few hundred connections and says half a line in each would leave no file
descriptor for anybody else, and every failed accept would be a traceback in the log.
`DeadlineConnection` stands in front of uvicorn's own class for a connection and knows nothing else
of it than asyncio's protocol and two of its fields.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HEADER_BYTES = 64 << 10  # of one request
SPARE_FILES = 64  # file descriptors that are left for everything but connections
_WAITS = itertools.count()


@dataclass(frozen=True)
class ConnectionLimits:
    """How much a server takes from its clients at once, from the options of `reinforge serve`."""

    requests: int = 256  # at once; more are told to come again
    body: int = 8 << 20  # bytes of one request
    connections: int = 1024  # open at once, fewer where the process may not have as many files open
    header_seconds: float = 10.0  # for the headers of a request to arrive as a whole
    body_seconds: float = 60.0  # for its body, and for a client to read some more of its answer

    @property
    def backlog(self) -> int:
        """Connections that are accepted in one go: each is an open file before anybody can refuse
        it.
        """
        return max(16, min(1024, _files() // 4))

    @property
    def open_connections(self) -> int:
        """As many as are wanted, or as many as the system lets this process have."""
        return max(1, min(self.connections, _files() - SPARE_FILES - self.backlog))


def _files() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class DeadlineConnection(asyncio.Protocol):
    """One connection. Stands before uvicorn's class (`connection_class`), which does the talking.

    A connection waits while no request of it is being answered. At the cap one of those makes room
    for a newcomer: the oldest whose headers are not complete, or else the oldest that was answered
    and is kept open.
    """

    limits: ConnectionLimits
    # uvicorn's
    transport: asyncio.Transport
    connections: set[Any]
    cycle: Any  # the newest request, once its headers are there
    # ours
    since: int  # which of all waits this one is: a clock may not tell two of them apart
    _heard = 0  # bytes of headers so far
    _waiting: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.since = next(_WAITS)
        if len(self.connections) > self.limits.open_connections:
            waiting = (c for c in self.connections if c.waits)
            min(
                waiting, key=lambda c: (c.cycle is not None and not c._heard, c.since), default=self
            ).leave()
        if self in self.connections:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._watch()
        if not self.waits:
            self._heard = 0
        elif self.cycle is None or not self.cycle.more_body:
            # no rest of a body that was answered before it was read
            self._heard += len(data)
            if self._heard > HEADER_BYTES:
                self._refuse(
                    431,
                    "Request Header Fields Too Large",
                    f"the headers have more than {HEADER_BYTES} bytes",
                )

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing = _cancelled(self._writing)

    def connection_lost(self, error: Exception | None) -> None:
        self._waiting, self._writing = _cancelled(self._waiting), _cancelled(self._writing)
        super().connection_lost(error)

    def leave(self) -> None:
        """Ends it at once, whatever is still to be sent."""
        self.connections.discard(self)
        self.transport.abort()

    def _wait_for_reader(self) -> None:
        """Gives the client its time to read some of what was written for it."""
        unread = self.transport.get_write_buffer_size()
        self._writing = later(self.limits.body_seconds, lambda: self._look_at_reader(unread))

    def _look_at_reader(self, unread: int) -> None:
        """A slow reader gets the same time again. One that stopped holds a place and is left."""
        if self.transport.get_write_buffer_size() < unread:
            self._wait_for_reader()
        else:
            self.leave()

    def _watch(self) -> None:
        """Keeps the deadline while it waits. Bytes that come in one by one do not move it."""
        if not self.waits:
            self._waiting = _cancelled(self._waiting)
        elif self._waiting is None:
            self.since = next(_WAITS)
            self._waiting = later(self.limits.header_seconds, self._late)

    def _late(self) -> None:
        self._waiting = None
        if self.waits and not self.transport.is_closing():
            self._refuse(
                408,
                "Request Timeout",
                f"the request did not begin within {self.limits.header_seconds:g} s",
            )

    def _refuse(self, status: int, reason: str, message: str) -> None:
        """Written by hand: where no request was read there is none to answer."""
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length:"
            f" {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if self.cycle is None or not self.cycle.more_body:
            self.transport.write(head.encode() + body)
        self.transport.close()


def connection_class(
    base: type[asyncio.Protocol], limits: ConnectionLimits
) -> type[asyncio.Protocol]:
    """uvicorn's class with these limits before it."""
    return type("Connection", (DeadlineConnection, base), {"limits": limits})


def later(seconds: float, do: Callable[[], None]) -> asyncio.TimerHandle:
    """A timer of the running loop: every deadline of a connection is one."""
    return asyncio.get_running_loop().call_later(seconds, do)


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """None, for where it stood."""
    if timer is not None:
        timer.cancel()
    return None


class LogLimiter(logging.Filter):
    """Lets a few messages of a kind through in a minute and counts the others: strangers decide how
    many there are.
    """

    def __init__(self, most: int = 10, seconds: float = 60.0):
        super().__init__()
        self.most = most
        self.seconds = seconds
        # (level, text) -> when its minute began, how many came in it
        self._kinds: dict[tuple[int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = (record.levelno, str(record.msg)[:200])
        now = time.monotonic()
        begun, count = self._kinds.get(kind, (now, 0))
        if now - begun >= self.seconds:
            if count > self.most:
                record.msg = f"{record.msg} ({count - self.most} like it were left out)"
            begun = now
            count = 0
        if len(self._kinds) >= 1000:
            self._kinds.clear()
        self._kinds[kind] = (begun, count + 1)
        return count < self.most


def bound_logs(*names: str) -> None:
    """Their messages are counted from now on."""
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(f, LogLimiter) for f in logger.filters):
            logger.addFilter(LogLimiter())
