"""A server with the OpenAI API as a source of completions: text in, text out.

Token ids only where the server gives them.

What may pass is tried again (429, 5xx, no connection) with growing pauses; what is wrong with the
request is said at once.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import httpx2

from reinforge.core.constraint import Constraint
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError, RequestError
from reinforge.core.sample import Stop
from reinforge.core.seeds import seed_of
from reinforge.engines.structured_outputs import server_words

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
THIS_ONE = {400, 413, 422}  # what is wrong may be with one request: it is too long
LONGEST_PAUSE = 60.0
Prompt = str | list[dict[str, Any]]


class ServerSilent(InputError):
    """A server that was asked again and again and did not answer. `OpenAIClient` raises it."""


class ServerRefuses(InputError):
    """A server that says no, whatever it is asked (a key, a name). `OpenAIClient` raises it; what
    may be wrong with one request alone is a `RequestError`.
    """


@dataclass(frozen=True)
class OpenAIServer:
    """Where a server with an OpenAI-compatible API is, and how hard it may be asked. Made from a
    config or from options of the command line.
    """

    url: str  # up to and including /v1
    model: str | None = None  # None: the only one it has
    api_key: str | None = None
    parallel: int = 16  # requests at once
    per_minute: float | None = None  # requests started per minute
    retries: int = 6
    timeout: float = 600.0
    pause: float = 0.5  # before the first retry; doubles with each


@dataclass(frozen=True, slots=True)
class OpenAIReply:
    """One answer of such a server."""

    text: str
    stop: Stop
    logprobs: list[float] | None = None
    tokens: list[int] | None = None


class OpenAIClient:
    """Asks an OpenAI-compatible server, at most so many requests at once, and again where it fails
    for the moment. Judges, opponents and `reinforge generate` make one. Use it within one event
    loop, as `async with`.
    """

    def __init__(self, server: OpenAIServer, *, where: str = "--server"):
        self.server = server
        self.where = where
        headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        self.http = httpx2.AsyncClient(
            base_url=server.url.rstrip("/") + "/",
            headers=headers,
            # certificates take 50 ms to read, and some clients live for one pack of a step
            verify=not server.url.startswith("http://"),
            timeout=httpx2.Timeout(server.timeout, connect=10.0),
            limits=httpx2.Limits(max_connections=server.parallel),
        )
        self._room = asyncio.Semaphore(server.parallel)
        self._next = 0.0  # when the next request may start
        self._model = server.model

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()

    async def model(self) -> str:
        """The name to ask for: the given one, or the only one there is."""
        if self._model is None:
            found = [m["id"] for m in (await self._request("GET", "models")).get("data", [])]
            if len(found) != 1:
                raise InputError(
                    f"{self.server.url} has the models {', '.join(found) or '(none)'}.",
                    where=self.where,
                    fix="Name one with --model-name, or with `model` in a configuration.",
                )
            self._model = found[0]
        return self._model

    async def complete(
        self,
        prompt: Prompt,
        params: Sampling,
        *,
        key: int,
        n: int = 1,
        raw: bool = False,
        logprobs: bool = False,
        token_ids: bool = False,
    ) -> list[OpenAIReply]:
        """n answers to a conversation, or to text as the first turn of one; `raw`: continuations of
        text. A server that gives fewer than asked for is asked again, with another seed.
        """
        if raw and not isinstance(prompt, str):
            raise InputError(
                "a conversation cannot be continued as raw text.",
                where=self.where,
                fix="Leave --raw out.",
            )
        body: dict[str, Any] = {
            "model": await self.model(),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_tokens": params.max_new_tokens,
        }
        if params.stop_strings:
            body["stop"] = list(params.stop_strings)
        if params.constraint is not None:
            body |= _form(params.constraint, raw)
        if logprobs:
            body["logprobs"] = 0 if raw else True
        if token_ids:
            body["return_token_ids"] = True
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body |= {"prompt": prompt} if raw else {"messages": messages}
        answers: list[OpenAIReply] = []
        while len(answers) < n:
            asked = body | {"n": n - len(answers), "seed": seed_of(key, len(answers)) >> 32}
            reply = await self._request("POST", "completions" if raw else "chat/completions", asked)
            choices = reply.get("choices")
            if not choices:
                raise InputError(f"the reply has no choices: {str(reply)[:300]}", where=self.where)
            answers += [
                _answer(choice, raw) for choice in sorted(choices, key=lambda c: c.get("index", 0))
            ]
        return answers[:n]

    async def get(self, path: str) -> dict[str, Any]:
        """What the server says at a path below its address."""
        return await self._request("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What another service says: a path below the server's address, or an address
        of its own.
        """
        return await self._request("POST", path, body)

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        async with self._room:
            for attempt in range(self.server.retries + 1):
                await self._turn()
                try:
                    reply = await self.http.request(method, path, json=body)
                except httpx2.TransportError as error:
                    problem = f"{type(error).__name__} {error}".strip()
                    wait = None
                else:
                    if reply.status_code == 200:
                        return _object(reply, self.where)
                    problem = f"{reply.status_code} {_message(reply)}"
                    wait = _seconds(reply.headers.get("retry-after"))
                    if reply.status_code not in AGAIN:
                        kind = RequestError if reply.status_code in THIS_ONE else ServerRefuses
                        raise kind(
                            f"{self.server.url} refuses: {problem}",
                            where=self.where,
                            fix=_advice(reply.status_code),
                        )
                if attempt < self.server.retries:
                    grown = min(LONGEST_PAUSE, self.server.pause * 2**attempt) * random.uniform(
                        0.5, 1.0
                    )
                    await asyncio.sleep(grown if wait is None else min(wait, 5 * LONGEST_PAUSE))
            raise ServerSilent(
                f"{self.server.url} does not answer after {self.server.retries + 1} tries:"
                f" {problem}",
                where=self.where,
                fix="Run the same command again when it is back: what it answered so far is kept.",
            )

    async def _turn(self) -> None:
        """Spaces requests evenly where there is a rate."""
        if self.server.per_minute:
            now = asyncio.get_running_loop().time()
            at = max(now, self._next)
            self._next = at + 60 / self.server.per_minute
            await asyncio.sleep(at - now)


def _form(constraint: Constraint, raw: bool) -> dict[str, Any]:
    """OpenAI's own parameter where it has one; otherwise vLLM's, which we understand too."""
    match constraint.kind:
        case "json_object" if not raw:
            return {"response_format": {"type": "json_object"}}
        case "json_schema" if not raw:
            described = {"name": "answer", "schema": json.loads(constraint.text), "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": described}}
    return {"structured_outputs": server_words(constraint)}


def _answer(choice: dict[str, Any], raw: bool) -> OpenAIReply:
    text = choice.get("text") if raw else (choice.get("message") or {}).get("content")
    found = choice.get("logprobs") or {}
    logprobs = (
        found.get("token_logprobs")
        if raw
        else [entry["logprob"] for entry in found["content"]]
        if found.get("content")
        else None
    )
    reasons = {"length": Stop.LENGTH, "content_filter": Stop.ERROR}
    return OpenAIReply(
        text or "",
        reasons.get(str(choice.get("finish_reason")), Stop.EOS),
        logprobs,
        choice.get("token_ids"),
    )


def _object(reply: httpx2.Response, where: str) -> dict[str, Any]:
    try:
        value = reply.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(
            f"{reply.url} answers something else than JSON: {reply.text[:200]!r}",
            where=where,
            fix="Check the address; it usually ends in /v1.",
        )
    return value


def _message(reply: httpx2.Response) -> str:
    try:
        error = reply.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:500]
    except (ValueError, KeyError, TypeError):
        return reply.text[:500]


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None  # a date: the growing pause will do


def _advice(status: int) -> str:
    return {
        401: "Set the environment variable that --api-key-env names.",
        403: "Check the API key.",
        404: "Check the address, which usually ends in /v1, and --model-name.",
    }.get(status, "If it does not know a parameter: --no-logprobs leaves one out.")
