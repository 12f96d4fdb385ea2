"""A server with the OpenAI API that says what a test tells it to, and remembers what it
was asked.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# texts of the choices, or status, headers and body
Reply = str | list[str] | tuple[int, dict[str, str], dict[str, Any]]


class Stub:
    def __init__(self, say: Callable[[dict[str, Any]], Reply]):
        self.say = say
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def answer(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, dict[str, str], dict[str, Any]]:
        if path == "/v1/models":
            return 200, {}, {"data": [{"id": "stub"}]}
        self.asked.append(body)
        self.headers.append(headers)
        said = self.say(body)
        if isinstance(said, tuple):
            return said
        texts = [said] * body.get("n", 1) if isinstance(said, str) else said
        chat = path.endswith("/chat/completions")
        choices = [
            {
                "index": i,
                "finish_reason": "stop",
                **({"message": {"content": t}} if chat else {"text": t}),
            }
            for i, t in enumerate(texts)
        ]
        return 200, {}, {"choices": choices}


@contextmanager
def stub_server(say: Callable[[dict[str, Any]], Reply]) -> Iterator[Stub]:
    stub = Stub(say)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _reply(self) -> None:
            length = int(self.headers.get("content-length", 0))
            raw = self.rfile.read(length)
            if len(raw) < length:  # a client that was cancelled between its headers and its body
                self.close_connection = True
                return
            asked = {name.lower(): value for name, value in self.headers.items()}
            status, headers, body = stub.answer(self.path, json.loads(raw or b"{}"), asked)
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _reply

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
