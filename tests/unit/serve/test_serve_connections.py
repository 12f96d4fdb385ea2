"""Connections that say nothing, say it slowly or do not listen: they are closed, and those who ask
get their answer.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from helpers.chat_server import until
from reinforge.serve import connections as serve_connections
from reinforge.serve.connections import HEADER_BYTES, ConnectionLimits, LogLimiter
from reinforge.serve.http import server_of

HALF = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: "
PATIENT = 600.0  # longer than any test
LARGE = bytes(range(256)) * 32768  # 8 MiB: much more than a system keeps between two sockets
STEP = 512 << 10  # so is this
BUFFER = 64 << 10  # what it keeps at each of them


@dataclass
class Timer:
    due: float
    do: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """The time of all deadlines. It moves only when a test says so, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []
        self.loop: asyncio.AbstractEventLoop | None = None

    def later(self, seconds: float, do: Callable[[], None]) -> Timer:
        self.loop = asyncio.get_running_loop()
        self.timers.append(Timer(self.now + seconds, do))
        return self.timers[-1]

    def advance(self, seconds: float) -> bool:
        """True, when everything that is due has been done."""
        until(lambda: self.loop is not None)
        assert self.loop is not None
        done = threading.Event()
        self.loop.call_soon_threadsafe(self._advance, seconds, done)
        return done.wait(timeout=30)

    def _advance(self, seconds: float, done: threading.Event) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer.due <= self.now]
        self.timers = [timer for timer in self.timers if timer.due > self.now]
        for timer in due:
            if not timer.cancelled:
                timer.do()
        done.set()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(serve_connections, "later", made.later)
    return made


def get(path: str) -> bytes:
    close = "connection: close\r\n" if path == "/large" else ""
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n{close}\r\n".encode()


async def answers(scope: Any, receive: Any, send: Any) -> None:
    """Says ok at once, or much under /large; under /stream it goes on until nobody is there."""
    endless = scope["path"] == "/stream"
    body = LARGE if scope["path"] == "/large" else b"ok"
    length = [] if endless else [(b"content-length", str(len(body)).encode())]
    await receive()
    gone = asyncio.ensure_future(receive())
    await send({"type": "http.response.start", "status": 200, "headers": length})
    while endless and not gone.done():
        await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        await asyncio.sleep(0)
    gone.cancel()
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(params=[H11Protocol, HttpToolsProtocol])
def protocol(request: pytest.FixtureRequest) -> Any:
    return request.param


class Served:
    def __init__(self, limits: ConnectionLimits, protocol: Any, loop: str):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self.server = server_of(answers, limits, protocol)
        self.server.config.loop = loop
        self.server.config.timeout_keep_alive = int(PATIENT)
        self.thread = threading.Thread(
            target=lambda: self.server.run(sockets=[self.listener]), daemon=True
        )
        self.thread.start()
        until(lambda: self.server.started)

    @property
    def open(self) -> int:
        return len(self.server.server_state.connections)

    @property
    def heard(self) -> int:
        """Bytes of headers that are not complete."""
        return sum(c._heard for c in self._connections)

    @property
    def unread(self) -> int:
        """Bytes that the server wrote and could not send yet."""
        return sum(c.transport.get_write_buffer_size() for c in self._connections)

    @property
    def _connections(self) -> list[Any]:
        return list(self.server.server_state.connections)

    def connect(self, said: bytes = b"") -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        made.settimeout(30)
        made.connect(self.listener.getsockname())
        made.sendall(said)
        return made

    def ask(self) -> tuple[int, bytes]:
        """What an honest client gets."""
        host, port = self.listener.getsockname()
        connection = http.client.HTTPConnection(host, port, timeout=30)
        connection.request("GET", "/")
        reply = connection.getresponse()
        try:
            return reply.status, reply.read()
        finally:
            connection.close()


@contextmanager
def served(protocol: Any, loop: str = "auto", **limits: Any) -> Iterator[Served]:
    found = Served(ConnectionLimits(**limits), protocol, loop)
    try:
        yield found
    finally:
        found.server.should_exit = found.server.force_exit = True
        found.thread.join(timeout=10)
        found.listener.close()


def part_of(connection: socket.socket, size: int) -> bytes:
    """As many bytes."""
    said = b""
    while len(said) < size:
        part = connection.recv(size - len(said))
        assert part, "it was cut off"
        said += part
    return said


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    said = b""
    while part := connection.recv(65536):
        said += part
    return said


@pytest.mark.parametrize("said", [b"", b"GET", HALF], ids=["nothing", "a word", "half its headers"])
def test_headers_have_a_deadline(protocol: Any, clock: Clock, said: bytes) -> None:
    with served(protocol, header_seconds=PATIENT) as there, there.connect(said) as slow:
        until(lambda: there.open == 1 and there.heard == len(said))
        clock.advance(PATIENT)
        head, _, body = rest_of(slow).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
        assert "within 600 s" in json.loads(body)["error"]["message"]
        until(lambda: there.open == 0)


def test_bytes_that_come_one_by_one_do_not_move_the_deadline(protocol: Any, clock: Clock) -> None:
    with served(protocol, header_seconds=PATIENT) as there, there.connect(HALF) as slow:
        for count in range(1, 10):
            slow.sendall(b"x")
            until(lambda count=count: there.heard == len(HALF) + count)
            clock.advance(PATIENT / 10)
            assert there.open == 1
        clock.advance(PATIENT / 10)
        assert b"HTTP/1.1 408 " in rest_of(slow)
        until(lambda: there.open == 0)


def test_a_second_request_has_the_deadline_too(protocol: Any, clock: Clock) -> None:
    with served(protocol, header_seconds=PATIENT) as there, there.connect(get("/")) as slow:
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")
        slow.sendall(HALF)
        until(lambda: there.heard == len(HALF))
        clock.advance(PATIENT)
        assert b"HTTP/1.1 408 " in rest_of(slow)


def test_half_sent_headers_leave_room_for_those_who_ask(protocol: Any) -> None:
    """Many times more connections than there is room for, all of them patient: the oldest of them
    make room.
    """
    with served(protocol, connections=20, header_seconds=PATIENT) as there, ExitStack() as held:
        for i in range(100):
            held.enter_context(there.connect(HALF))
            if i % 10 == 9:
                assert there.ask() == (200, b"ok")
                assert there.open <= 20
        until(lambda: there.open <= 20)


def test_a_request_that_is_being_answered_does_not_make_room(protocol: Any) -> None:
    with served(protocol, connections=3, header_seconds=PATIENT) as there, ExitStack() as held:
        busy = held.enter_context(there.connect(get("/stream")))
        assert busy.recv(1000).startswith(b"HTTP/1.1 200")
        for _ in range(10):
            held.enter_context(there.connect(HALF))
        assert there.ask() == (200, b"ok") and there.open <= 3
        for _ in range(100):
            assert busy.recv(65536), "it goes on"


def test_the_cap_leaves_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, backlog, connections in (
        (100, 25, 11),
        (256, 64, 128),
        (1024, 256, 704),
        (resource.RLIM_INFINITY, 1024, 1024),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        assert (ConnectionLimits().backlog, ConnectionLimits().open_connections) == (
            backlog,
            connections,
        )


def test_endless_headers_are_cut(protocol: Any) -> None:
    with served(protocol, header_seconds=PATIENT) as there, there.connect(HALF) as slow:
        with pytest.raises(OSError):
            for _ in range(100 * HEADER_BYTES // 10_000):
                slow.sendall(b"x" * 10_000)
                time.sleep(0.001)
        until(lambda: there.open == 0)


def test_a_client_that_does_not_read_is_left(protocol: Any, clock: Clock) -> None:
    with served(protocol) as there, there.connect(get("/stream")) as deaf:
        assert deaf.recv(1000).startswith(b"HTTP/1.1 200")
        until(lambda: clock.advance(PATIENT) and there.open == 0)


@pytest.mark.parametrize("loop", ["auto", "asyncio"])
def test_a_slow_client_that_reads_on_gets_everything(
    protocol: Any, loop: str, clock: Clock
) -> None:
    """It needs many times `body_seconds`, and reads a part of the answer in each of them."""
    with (
        served(protocol, loop, body_seconds=PATIENT) as there,
        there.connect(get("/large")) as slow,
    ):
        received = b""
        waits = 0
        until(lambda: there.unread > 0)
        while (left := there.unread) > STEP:
            received += part_of(slow, STEP)
            until(lambda left=left: there.unread < left)
            clock.advance(PATIENT)
            waits += 1
        received += rest_of(slow)
        assert waits >= 10
        assert received.partition(b"\r\n\r\n")[2] == LARGE


@pytest.mark.parametrize("loop", ["auto", "asyncio"])
def test_a_client_that_stops_reading_is_left(protocol: Any, loop: str, clock: Clock) -> None:
    with (
        served(protocol, loop, body_seconds=PATIENT) as there,
        there.connect(get("/large")) as slow,
    ):
        until(lambda: there.unread > 0)
        left = there.unread
        part_of(slow, STEP)
        until(lambda: there.unread < left)
        clock.advance(PATIENT)
        assert there.open == 1, "it read some of it"
        until(lambda: clock.advance(PATIENT) and there.open == 0)


def test_a_flood_of_messages_is_counted_and_not_written() -> None:
    seen: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger = logging.Logger("flood")
    sparse = LogLimiter(most=3, seconds=1e9)
    logger.addFilter(sparse)
    logger.addHandler(Collect())
    for i in range(1000):
        logger.warning("bad request from %s", i)
    logger.error("something else")
    assert seen == [
        "bad request from 0",
        "bad request from 1",
        "bad request from 2",
        "something else",
    ]
    sparse.seconds = 0.0
    logger.warning("bad request from %s", 1000)
    assert seen[-1] == "bad request from 1000 (997 like it were left out)"


def test_the_servers_loggers_are_bounded(protocol: Any) -> None:
    server_of(answers, ConnectionLimits(), protocol)
    server_of(answers, ConnectionLimits(), protocol)
    for name in ("uvicorn.error", "asyncio", "reinforge.serve"):
        assert sum(isinstance(f, LogLimiter) for f in logging.getLogger(name).filters) == 1
