"""The client that an agent function gets: `openai`'s where it is installed, otherwise a small one
of the same shape.

Ours knows `chat.completions.create`, `completions.create` and `models.list`, with `stream=True`
too. It needs nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import importlib.util
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit


def make_client(base_url: str, api_key: str, *, asynchronous: bool, small: bool = False) -> Any:
    """Without retries and time limits: the endpoint answers when it can, and the episode has a
    deadline. `small`: ours in any case.
    """
    if small or importlib.util.find_spec("openai") is None:
        return (
            AsyncAgentClient(base_url, api_key) if asynchronous else AgentClient(base_url, api_key)
        )
    openai = importlib.import_module("openai")
    common: dict[str, Any] = {
        "base_url": base_url,
        "api_key": api_key,
        "max_retries": 0,
        "timeout": None,
    }
    plain = {
        "verify": False,
        "trust_env": False,
        "timeout": None,
    }  # loopback: reading certificates would take a hundred times as long as the rest
    if asynchronous:
        return openai.AsyncOpenAI(**common, http_client=openai.DefaultAsyncHttpxClient(**plain))
    return openai.OpenAI(**common, http_client=openai.DefaultHttpxClient(**plain))


class StatusError(Exception):
    """The endpoint refused.

    `status_code` is the HTTP status, `code` what the endpoint calls the problem.
    """

    def __init__(self, status_code: int, message: str, code: str | None):
        super().__init__(f"{status_code}: {message}")
        self.status_code = status_code
        self.code = code


class AgentReply:
    """A JSON object with its keys as attributes. Keys that are not there are None."""

    def __init__(self, fields: dict[str, Any]):
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _wrapped(self._fields.get(name))

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return self._fields


def _wrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return AgentReply(value)
    return [_wrapped(v) for v in value] if isinstance(value, list) else value


class _Transport:
    def __init__(self, base_url: str, api_key: str):
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key

    def send(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        parts = urlsplit(self.base_url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        text = None if body is None else json.dumps(body, default=lambda o: o.model_dump())
        headers = {"authorization": f"Bearer {self.api_key}", "content-type": "application/json"}
        connection.request(method, f"{parts.path}/{path}", text, headers)
        response = connection.getresponse()
        if response.status != 200:
            error = _error(response.read())
            raise StatusError(response.status, str(error.get("message")), error.get("code"))
        return response

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        with self.send(method, path, body) as response:
            return AgentReply(json.loads(response.read()))

    def events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        with self.send("POST", path, body) as response:
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise StatusError(
                            500, str(chunk["error"].get("message")), chunk["error"].get("code")
                        )
                    yield AgentReply(chunk)


def _error(body: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return {"message": body[:500].decode(errors="replace")}


class _Completions:
    def __init__(self, transport: _Transport, path: str):
        self.transport = transport
        self.path = path

    def create(self, *, stream: bool = False, **body: Any) -> Any:
        if stream:
            return self.transport.events(self.path, {**body, "stream": True})
        return self.transport.ask("POST", self.path, body)


class _AsyncCompletions(_Completions):
    async def create(self, *, stream: bool = False, **body: Any) -> Any:
        if stream:
            return _drained(self.transport.events(self.path, {**body, "stream": True}))
        return await asyncio.to_thread(self.transport.ask, "POST", self.path, body)


async def _drained(events: Iterator[Any]) -> AsyncIterator[Any]:
    end = object()
    while (event := await asyncio.to_thread(next, events, end)) is not end:
        yield event


class _Models:
    def __init__(self, transport: _Transport):
        self.transport = transport

    def list(self) -> Any:
        return self.transport.ask("GET", "models")


class _AsyncModels(_Models):
    async def list(self) -> Any:  # type: ignore[override]
        return await asyncio.to_thread(self.transport.ask, "GET", "models")


class _Chat:
    def __init__(self, completions: _Completions):
        self.completions = completions


class AgentClient:
    """In the shape of `openai.OpenAI`."""

    completions_type = _Completions
    models_type = _Models

    def __init__(self, base_url: str, api_key: str):
        self.base_url = base_url
        self.api_key = api_key
        transport = _Transport(base_url, api_key)
        self.chat = _Chat(self.completions_type(transport, "chat/completions"))
        self.completions = self.completions_type(transport, "completions")
        self.models = self.models_type(transport)

    def close(self) -> None: ...


class AsyncAgentClient(AgentClient):
    """In the shape of `openai.AsyncOpenAI`."""

    completions_type = _AsyncCompletions
    models_type = _AsyncModels

    async def close(self) -> None: ...  # type: ignore[override]
