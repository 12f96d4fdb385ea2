"""Whether the hub can be reached: only a definite no keeps a run from asking it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from reinforge.core import hub

SIX = "2001:db8::1"
FOUR = "192.0.2.1"
PROXIES = [
    name
    for scheme in ("http", "https", "all", "no")
    for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY")
]
Network = Callable[..., list[Any]]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """A hub with these addresses, each of which connects (None) or raises; and what was asked of
    them.
    """
    for name in (*PROXIES, *hub.FLAGS):
        monkeypatch.setenv(name, "")  # and back after the test
    for module in hub.READ_ON_IMPORT:
        monkeypatch.setattr(f"{module}.{hub.FLAGS[0]}", False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    monkeypatch.setattr(hub, "_switched", [])
    hub.refused.cache_clear()

    def make(answers: dict[str, Exception | None], lookup: Exception | None = None) -> list[Any]:
        asked: list[Any] = []

        def look_up(host: str, port: int, **_: Any) -> list[Any]:
            asked.append((host, port))
            if lookup is not None:
                raise lookup
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers
            ]

        def connect(place: tuple[str, int], timeout: float) -> socket.socket:
            asked.append((place[0], timeout))
            if (error := answers[place[0]]) is not None:
                raise error
            return socket.socket()

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        monkeypatch.setattr(socket, "create_connection", connect)
        return asked

    return make


def test_an_address_that_leads_nowhere_leaves_time_for_the_next(network: Network) -> None:
    asked = network({SIX: TimeoutError(), FOUR: None})
    assert hub.offline() is None
    assert asked == [("hub.example", 443), (SIX, 2.0), (FOUR, 2.0)]
    assert hub.PROBE_SECONDS == 6.0


@pytest.mark.parametrize(
    "answers", [{FOUR: TimeoutError()}, {SIX: OSError("no route"), FOUR: TimeoutError()}]
)
def test_a_hub_that_does_not_answer_in_time_is_tried(
    network: Network, answers: dict[str, Exception | None]
) -> None:
    network(answers)
    assert hub.offline() is None and hub.unavailable("org/name") is None
    assert not hub._switched


def test_a_name_lookup_that_hangs_is_given_up_and_the_hub_tried(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    network({FOUR: None})
    over = threading.Event()

    def hangs(*_: Any, **__: Any) -> list[Any]:
        over.wait(60)
        raise socket.gaierror("unknown name")

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.05)
    try:
        assert hub.offline() is None
    finally:
        over.set()


@pytest.mark.parametrize(
    ("answers", "lookup"),
    [
        ({}, socket.gaierror("unknown name")),
        ({FOUR: ConnectionRefusedError("refused")}, None),
        ({SIX: OSError("no route"), FOUR: OSError("unreachable")}, None),
    ],
)
def test_a_definite_error_is_offline(
    network: Network, answers: dict[str, Exception | None], lookup: Exception | None
) -> None:
    network(answers, lookup)
    said = "the hub https://hub.example cannot be reached"
    assert hub.offline() == said
    assert hub.unavailable("org/none-such") == f"no such directory: org/none-such, and {said}"


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"HTTPS_PROXY": "http://proxy.example:3128"}, ("proxy.example", 3128)),
        ({"ALL_PROXY": "proxy.example:3128"}, ("proxy.example", 3128)),
        ({"HTTP_PROXY": "http://proxy.example:3128"}, ("hub.example", 443)),
        (
            {"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "other, hub.example"},
            ("hub.example", 443),
        ),
        (
            {"HTTPS_PROXY": "http://proxy.example:3128", "no_proxy": ".example"},
            ("hub.example", 443),
        ),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "*"}, ("hub.example", 443)),
        (
            {"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "other"},
            ("proxy.example", 3128),
        ),
    ],
)
def test_the_proxy_is_asked_unless_no_proxy_names_the_hub(
    network: Network,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    first: tuple[str, int],
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    asked = network({FOUR: None})
    assert hub.offline() is None and asked[0] == first
