"""Every hostile request gets the status it deserves, every rude connection is ended by the server,
and honest clients are answered.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from helpers.attack_lists import web
from helpers.chat_server import make_chat_model, served_model
from reinforge.serve.http import ConnectionLimits

HONEST = b'{"prompt": "hi", "max_tokens": 2}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def address(model: str) -> Iterator[str]:
    """A server with the deadlines that everybody has."""
    with served_model(model, limits=ConnectionLimits(connections=32)) as (url, _):
        yield urlsplit(url).netloc


@pytest.fixture(scope="module")
def hasty(model: str) -> Iterator[str]:
    """A server with deadlines so short that the rude need not be waited for."""
    limits = ConnectionLimits(connections=32, header_seconds=0.5, body_seconds=1.0)
    with served_model(model, limits=limits) as (url, _):
        yield urlsplit(url).netloc


def ask(address: str, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=100)
    try:
        connection.request("POST", path, body)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def answered(status: int, said: bytes) -> bool:
    return status == 200 and json.loads(said)["usage"]["completion_tokens"] > 0


def hasty_answers(hasty: str) -> bool:
    """On a busy machine an honest client may miss a short deadline too: then it asks again."""
    for _ in range(20):
        try:
            status, said = ask(hasty, web.COMPLETIONS, HONEST)
        except ConnectionError:  # the deadline passed between its connection and its request
            continue
        if status != 408:
            return answered(status, said)
    return False


@pytest.mark.parametrize("hostile", web.REQUESTS, ids=lambda h: h.name)
def test_a_hostile_request_is_refused_and_others_are_answered(
    address: str, hostile: web.Hostile
) -> None:
    try:
        status, said = ask(address, hostile.path, hostile.body)
    except (BrokenPipeError, ConnectionResetError):  # it was refused before it was read to its end
        assert hostile.status == 413
    else:
        assert status == hostile.status and json.loads(said)["error"]["message"], said[:300]
        assert len(said) < 10_000 or hostile.status == 404, (
            "an answer does not repeat what it was sent"
        )
    assert answered(*ask(address, web.COMPLETIONS, HONEST))


@pytest.mark.parametrize("rude", web.CONNECTIONS, ids=lambda r: r.name)
def test_a_rude_connection_is_ended_and_others_are_answered(hasty: str, rude: web.Rude) -> None:
    host, _, port = hasty.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=0.05) as connection:
        connection.sendall(rude.said)
        assert hasty_answers(hasty)
        ended = False
        until = time.monotonic() + 60
        while not ended and time.monotonic() < until:
            try:
                connection.sendall(rude.more)
                ended = connection.recv(65536) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
        assert ended, "the server waits for ever"
    assert hasty_answers(hasty)
