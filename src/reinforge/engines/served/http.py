"""JSON over HTTP to a server that we trust and that may die.

Used from whatever event loop runs, one pool of connections for each.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

import httpx2

from reinforge.core.errors import InputError

JSON = {"content-type": "application/json"}
ABORTED = 499  # the status of a request that was aborted


class ServerDown(RuntimeError):
    """No answer, or one that says that the server cannot go on. `ServerClient` and dialects raise
    it; the engine replaces the replica and asks another.
    """


class ServerFault(ServerDown):
    """An answer that says that this request failed, by a server that may be well otherwise. The
    engine asks for a token to see, and raises the fault if one comes.
    """


class RequestAborted(ServerFault):
    """An answer that says that the request was aborted, as it was told to. `ServerClient` raises
    it; a dialect gives outputs that end with `abort`.
    """


class ServerClient:
    """The connection to one server. A `Replica` has one; dialects send every request through it.

    What an answer becomes:

    | answer | becomes |
    |---|---|
    | 2xx | its JSON; the plain text where it is no object or list |
    | 401, 403 | `InputError`: the key is wrong |
    | 404 | `InputError`: the server does not know the path, with the advice `unknown_path` |
    | 499 | `RequestAborted` |
    | other 4xx | `InputError`: the server refuses what was asked for |
    | 502, 503, 504, "EngineDead" | `ServerDown`: the server is replaced and another one asked |
    | no answer, or none in time | `ServerDown` |
    | anything else, e.g. 500 | `ServerFault`: this request failed |

    An `InputError` ends the run; so while a server starts it must not answer with 4xx.
    """

    def __init__(self, address: str, key: str | None = None, unknown_path: str = ""):
        """`unknown_path`: what a user should do whose server does not know a path."""
        self.address = address.rstrip("/")
        self.key = key
        self.unknown_path = unknown_path or "Ask for it from a server that has it."
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _here(self) -> httpx2.AsyncClient:
        """The client of the running loop.

        That of a loop that is gone is dropped: its connections went with it.
        """
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
            # a kept one may be closed as it is used
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
            self._client = httpx2.AsyncClient(
                base_url=self.address,
                headers=headers,
                limits=limits,
                timeout=httpx2.Timeout(None, connect=60.0),
                trust_env=False,
            )
            self._loop = loop
        return self._client

    async def post(self, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        return await self._ask("POST", path, {} if body is None else body, timeout)

    async def get(self, path: str, *, timeout: float | None = None) -> Any:
        return await self._ask("GET", path, None, timeout)

    async def lines(self, path: str, body: Any) -> AsyncGenerator[str, None]:
        """The lines of an answer as they come. Whoever stops reading closes the connection."""
        content = json.dumps(body).encode()
        try:
            async with self._here().stream("POST", path, content=content, headers=JSON) as reply:
                if not 200 <= reply.status_code < 300:
                    await reply.aread()
                    self._refuse(path, reply)
                async for line in reply.aiter_lines():
                    yield line
        except (httpx2.TransportError, OSError) as error:
            raise self._down(path, error) from error

    async def _ask(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        try:
            reply = await asyncio.wait_for(
                self._here().request(method, path, content=content, headers=JSON), timeout
            )
        except (httpx2.TransportError, TimeoutError, OSError) as error:
            raise self._down(path, error) from error
        if 200 <= reply.status_code < 300:
            return json.loads(reply.content) if reply.content[:1] in (b"{", b"[") else reply.text
        return self._refuse(path, reply)

    def _down(self, path: str, error: Exception) -> ServerDown:
        return ServerDown(f"{self.address}{path}: {type(error).__name__} {error}".strip())

    def _refuse(self, path: str, reply: httpx2.Response) -> NoReturn:
        """Raises what an answer that is none becomes."""
        said = reply.text[:600]
        if reply.status_code in (401, 403):
            raise InputError(
                f"{self.address} refuses the key: {said}",
                where="engine.key_env",
                fix="Name the variable that holds the server's key.",
            )
        if reply.status_code == 404:
            raise InputError(
                f"{self.address} does not know {path}.",
                where="engine.address",
                fix=self.unknown_path,
            )
        if reply.status_code == ABORTED:
            raise RequestAborted(f"{self.address}{path}: {said}")
        if 400 <= reply.status_code < 500:
            raise InputError(
                f"{self.address}{path} refuses: {said}",
                where="rollout",
                fix="Change what was asked for.",
            )
        kind = (
            ServerDown
            if "EngineDead" in said or reply.status_code in (502, 503, 504)
            else ServerFault
        )
        raise kind(f"{self.address}{path}: {reply.status_code} {said}")
