"""The web app in a thread of this process, and a client that shows what it was answered."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from helpers.chat_server import serving
from reinforge.serve.options import ServeOptions, listen
from reinforge.ui.app import make_app
from reinforge.ui.options import AppOptions


@dataclass
class AppClient:
    """Asks the app over HTTP, as a browser on the same machine would."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, content (of JSON: the value) and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            kind = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, sent, {**kind, **self.headers, **(headers or {})})
            reply = connection.getresponse()
            data = reply.read()
            told = {name.lower(): value for name, value in reply.getheaders()}
        finally:
            connection.close()
        if told.get("content-type", "").startswith("application/json"):
            return reply.status, json.loads(data), told
        return reply.status, data, told

    def get(self, path: str, status: int = 200, **query: Any) -> Any:
        """What /api/PATH answers."""
        code, found, _ = self.ask("GET", f"/api/{path}?{urlencode(query, doseq=True)}")
        assert code == status, found
        return found

    def post(self, path: str, body: Any, status: int = 200, method: str = "POST") -> Any:
        code, found, _ = self.ask(method, f"/api/{path}", body)
        assert code == status, found
        return found


@contextmanager
def web_app(root: Path, token: str | None = None, **options: Any) -> Iterator[AppClient]:
    chosen = AppOptions(root=root, **options)
    listener = listen(ServeOptions(port=0))
    with serving(make_app(chosen, token), listener, chosen.limits):
        yield AppClient(listener.getsockname()[1])
