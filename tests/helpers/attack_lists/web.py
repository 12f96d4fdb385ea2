"""Requests and connections that a server must not suffer from: each is refused or cut, and honest
clients get their answers.

`REQUESTS` are whole requests with the status that they deserve. `CONNECTIONS` are bytes on a
socket: what is said at once, and what is then said again every now and then for as long as somebody
listens. The server must end each of them by itself.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


class Hostile(NamedTuple):
    name: str
    path: str
    body: bytes
    status: int = 400


def text(name: str, status: int = 400, **fields: Any) -> Hostile:
    return Hostile(
        name, COMPLETIONS, json.dumps({"prompt": "hi", "max_tokens": 1, **fields}).encode(), status
    )


def chat(name: str, status: int = 400, **fields: Any) -> Hostile:
    return Hostile(
        name, CHAT, json.dumps({"messages": [USER], "max_tokens": 1, **fields}).encode(), status
    )


def raw(name: str, body: bytes, path: str = COMPLETIONS, status: int = 400) -> Hostile:
    return Hostile(name, path, body, status)


REQUESTS = [
    text("a million prompts", prompt=["a"] * 1_000_000),
    text("a million prompts of ids", prompt=[[5]] * 1_000_000),
    text("600 prompts", prompt=["a"] * 600),
    text("100 prompts of 100 completions", prompt=["a"] * 100, n=100),
    text("a prompt of seven million letters", prompt="a" * 7_000_000),
    text("a prompt of seven million spaces", prompt=" " * 7_000_000),
    text("a prompt of two million ids", prompt=[5] * 2_000_000),
    text("a million ids and a word", prompt=[*[5] * 1_000_000, "a"]),
    text("a million words and an id", prompt=[*["a"] * 1_000_000, 5]),
    text("no prompt at all", prompt=[]),
    text("an empty prompt", prompt=""),
    text("prompts of nothing", prompt=[[]] * 100),
    text("null", prompt=None),
    text("an object for a prompt", prompt={"a": "b"}),
    text("lists in lists in lists", prompt=[[[5]]]),
    text("a negative id", prompt=[-1]),
    text("an id of 64 bits", prompt=[2**63]),
    text("an id that is a fraction", prompt=[0.5]),
    text("a huge max_tokens", max_tokens=10**9),
    text("a negative max_tokens", max_tokens=-1),
    text("max_tokens of 400 digits", max_tokens=10**400),
    text("a billion completions", n=10**9),
    text("no completion", n=0),
    text("a hundred million likeliest tokens", logprobs=10**8),
    text("ten thousand stop strings", stop=["x"] * 10_000),
    text("a stop string of a megabyte", stop="x" * 1_000_000),
    text("ten thousand stop tokens", stop_token_ids=[5] * 10_000),
    text("an enormous top_k", top_k=2**40),
    text("top_p of nothing", top_p=0),
    text("min_p beyond one", min_p=2),
    text("a temperature next to nothing", temperature=1e-300),
    text("an endless temperature", temperature=1e300),
    text("a seed of 70 bits", seed=2**70),
    text("an unknown field of five megabytes", whatever="x" * 5_000_000),
    text("ten thousand unknown fields", **{f"field_{i}": i for i in range(10_000)}),
    text("a model's name of a megabyte", status=404, model="x" * 1_000_000),
    text("echo in a stream", echo=True, stream=True),
    text("options of a stream without one", stream_options={"include_usage": True}),
    raw("nine megabytes", b'{"prompt": "' + b"x" * 9_000_000 + b'"}', status=413),
    raw("lists a hundred thousand deep", b"[" * 100_000),
    raw("objects ten thousand deep", b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    raw("a prompt ten thousand lists deep", b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    raw("a number of a million digits", b'{"prompt":"a","max_tokens":' + b"9" * 1_000_000 + b"}"),
    raw("bytes that are no UTF-8", b'{"prompt":"\xff\xfe"}'),
    raw("UTF-16", '{"prompt":"a"}'.encode("utf-16-be")[:-1]),
    raw("half of a surrogate pair", b'{"prompt":"\\ud800"}'),
    raw("not a number", b'{"prompt":"a","temperature":NaN}'),
    raw("an infinite number", b'{"prompt":"a","temperature":1e999}'),
    raw("nothing", b""),
    raw("a list", b"[]"),
    raw("half of an object", b'{"prompt": "a'),
    raw("only spaces", b" " * 5_000_000),
    chat("half a million messages", messages=[{}] * 500_000),
    chat("a thousand messages", messages=[USER] * 1_000),
    chat(
        "a message of seven million letters",
        messages=[{"role": "user", "content": "x" * 7_000_000}],
    ),
    chat(
        "a message of two hundred thousand parts",
        messages=[{"role": "user", "content": [{"type": "text", "text": "xxxx"}] * 100_000}],
    ),
    chat("no message", messages=[]),
    chat("a message without a role", messages=[{"content": "hi"}]),
    chat("a role that nobody has", messages=[{"role": "wizard", "content": "hi"}]),
    chat("a number for a message", messages=[5]),
    chat("a number in a message", messages=[{"role": "user", "content": 5}]),
    chat(
        "a picture",
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
            }
        ],
    ),
    chat("calls that are none", messages=[{"role": "assistant", "tool_calls": [5]}]),
    chat(
        "a hundred thousand tools",
        tools=[{"type": "function", "function": {"name": "f"}}] * 100_000,
    ),
    chat(
        "a tool that must be called",
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="required",
    ),
    chat("a huge max_completion_tokens", max_completion_tokens=10**12),
    chat("129 completions", n=129),
]


class Rude(NamedTuple):
    name: str
    said: bytes
    more: bytes = b""  # said again and again


def head(*lines: str, path: str = COMPLETIONS) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: 127.0.0.1", *lines, "", ""]).encode(
        "latin-1"
    )


HALF = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: "
CONNECTIONS = [
    Rude("nothing", b""),
    Rude("half a word", b"PO"),
    Rude("half its headers", HALF),
    Rude("a header letter by letter", HALF, b"x"),
    Rude("a header that never ends", HALF, b"x" * 20_000),
    Rude("headers without end", HALF, b"x\r\nx-more: "),
    Rude("a path that never ends", b"GET /", b"x" * 20_000),
    Rude("empty lines without end", b"", b"\r\n"),
    Rude("binary noise", bytes(range(256)) * 8),
    Rude("TLS", bytes.fromhex("16030100c8010000c40303") + b"\0" * 189),
    Rude("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Rude("a version that does not exist", b"GET /health HTTP/9.9\r\nhost: 127.0.0.1\r\n\r\n"),
    Rude("a NUL in a header", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: \0\r\n\r\n"),
    Rude("two lengths", head("content-length: 2", "content-length: 3") + b"{}"),
    Rude("a negative length", head("content-length: -5") + b"{}"),
    Rude("a length that is none", head("content-length: many") + b"{}"),
    Rude("a body that does not come", head("content-length: 100")),
    Rude("a terabyte that does not come", head("content-length: 1000000000000")),
    Rude("a body letter by letter", head("content-length: 100000"), b"x"),
    Rude(
        "chunks without end", head("transfer-encoding: chunked"), b"400\r\n" + b"x" * 1024 + b"\r\n"
    ),
    Rude("a chunk of no size", head("transfer-encoding: chunked") + b"zzz\r\n"),
    Rude("a chunk of a size without end", head("transfer-encoding: chunked"), b"f" * 1000),
    Rude("a second request in half", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" + HALF),
    Rude(
        "a request answered early, and a body letter by letter",
        head("content-length: 100000", path="/nothing"),
        b"x",
    ),
]
