"""Connections that say nothing, say it slowly or do not listen: they are closed, and those who ask get their answer."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from reinforge.app.serve_connections import HEADER_BYTES, Limits, Sparse
from reinforge.app.serve_http import server_of
from serving import until

pytestmark = pytest.mark.timeout(60)
HALF = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: "
PATIENT = 600.0  # longer than any test


async def answers(scope: Any, receive: Any, send: Any) -> None:
    """Says ok at once; under /stream it goes on until nobody is there."""
    endless = scope["path"] == "/stream"
    await receive()
    gone = asyncio.ensure_future(receive())
    await send({"type": "http.response.start", "status": 200, "headers": [] if endless else [(b"content-length", b"2")]})
    while endless and not gone.done():
        await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        await asyncio.sleep(0)
    gone.cancel()
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(params=[H11Protocol, HttpToolsProtocol])
def protocol(request: pytest.FixtureRequest) -> Any:
    return request.param


class Served:
    def __init__(self, limits: Limits, protocol: Any):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.server = server_of(answers, limits, protocol)
        self.thread = threading.Thread(target=lambda: self.server.run(sockets=[self.listener]), daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    @property
    def open(self) -> int:
        return len(self.server.server_state.connections)

    def connect(self, said: bytes = b"") -> socket.socket:
        made = socket.create_connection(self.listener.getsockname(), timeout=30)
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
def served(protocol: Any, **limits: Any) -> Iterator[Served]:
    found = Served(Limits(**limits), protocol)
    try:
        yield found
    finally:
        found.server.should_exit = found.server.force_exit = True
        found.thread.join(timeout=10)
        found.listener.close()


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    said = b""
    while part := connection.recv(65536):
        said += part
    return said


@pytest.mark.parametrize("said", [b"", b"GET", HALF], ids=["nothing", "a word", "half its headers"])
def test_headers_have_a_deadline(protocol: Any, said: bytes) -> None:
    with served(protocol, header_seconds=0.3) as there, there.connect(said) as slow:
        head, _, body = rest_of(slow).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
        assert "within 0.3 s" in json.loads(body)["error"]["message"]
        until(lambda: there.open == 0)


def test_bytes_that_come_one_by_one_do_not_move_the_deadline(protocol: Any) -> None:
    with served(protocol, header_seconds=0.5) as there, there.connect(HALF) as slow:
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 30:
                slow.sendall(b"x")
                time.sleep(0.05)
        until(lambda: there.open == 0)


def test_a_second_request_has_the_deadline_too(protocol: Any) -> None:
    with served(protocol, header_seconds=0.3) as there, there.connect(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") as slow:
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")
        slow.sendall(HALF)
        assert b"HTTP/1.1 408 " in rest_of(slow)


def test_half_sent_headers_leave_room_for_those_who_ask(protocol: Any) -> None:
    """Many times more connections than there is room for, all of them patient: the oldest of them make room."""
    with served(protocol, connections=20, header_seconds=PATIENT) as there, ExitStack() as held:
        for i in range(100):
            held.enter_context(there.connect(HALF))
            if i % 10 == 9:
                assert there.ask() == (200, b"ok")
                assert there.open <= 20
        until(lambda: there.open <= 20)


def test_a_request_that_is_being_answered_does_not_make_room(protocol: Any) -> None:
    with served(protocol, connections=3, header_seconds=PATIENT) as there, ExitStack() as held:
        busy = held.enter_context(there.connect(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"))
        assert busy.recv(1000).startswith(b"HTTP/1.1 200")
        for _ in range(10):
            held.enter_context(there.connect(HALF))
        assert there.ask() == (200, b"ok") and there.open <= 3
        for _ in range(100):
            assert busy.recv(65536), "it goes on"


def test_the_cap_leaves_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, backlog, connections in ((100, 25, 11), (256, 64, 128), (1024, 256, 704), (resource.RLIM_INFINITY, 1024, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        assert (Limits().backlog, Limits().open_connections) == (backlog, connections)


def test_endless_headers_are_cut(protocol: Any) -> None:
    with served(protocol, header_seconds=PATIENT) as there, there.connect(HALF) as slow:
        with pytest.raises(OSError):
            for _ in range(100 * HEADER_BYTES // 10_000):
                slow.sendall(b"x" * 10_000)
                time.sleep(0.001)
        until(lambda: there.open == 0)


def test_a_client_that_does_not_read_is_left(protocol: Any) -> None:
    with served(protocol, body_seconds=0.3) as there, there.connect(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"):
        until(lambda: there.open == 1)
        until(lambda: there.open == 0)


def test_a_flood_of_messages_is_counted_and_not_written() -> None:
    seen: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger = logging.Logger("flood")
    sparse = Sparse(most=3, seconds=1e9)
    logger.addFilter(sparse)
    logger.addHandler(Collect())
    for i in range(1000):
        logger.warning("bad request from %s", i)
    logger.error("something else")
    assert seen == ["bad request from 0", "bad request from 1", "bad request from 2", "something else"]
    sparse.seconds = 0.0
    logger.warning("bad request from %s", 1000)
    assert seen[-1] == "bad request from 1000 (997 like it were left out)"


def test_the_servers_loggers_are_bounded(protocol: Any) -> None:
    server_of(answers, Limits(), protocol)
    server_of(answers, Limits(), protocol)
    for name in ("uvicorn.error", "asyncio", "reinforge.serve"):
        assert sum(isinstance(f, Sparse) for f in logging.getLogger(name).filters) == 1
