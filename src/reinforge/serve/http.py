"""The HTTP side of `serve`: routes, limits, errors, disconnects.

The only file that knows starlette and uvicorn.

Loopback is the default, and any other address needs a key. A web page in somebody's browser can
reach loopback too: requests whose Host is no loopback name (DNS rebinding) or whose Origin is
another site are refused.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from reinforge.core.errors import InputError
from reinforge.serve.connections import ConnectionLimits, bound_logs, connection_class
from reinforge.serve.engine_thread import AnswerPiece
from reinforge.serve.options import is_loopback
from reinforge.serve.replies import ReplyFormatter
from reinforge.serve.requests import (
    CALLER,
    ApiError,
    ChatRequest,
    CompletionRequest,
    ScoreRequest,
    parsed,
)
from reinforge.serve.scorer import RewardModelScorer

T = TypeVar("T")
LOG = logging.getLogger("reinforge.serve")
Handler = Callable[[bytes], Coroutine[Any, Any, Response]]
Key = str | Callable[[str], bool] | None  # what clients must show, or a judge of it


class CompletionService(Protocol):
    """What answers completions."""

    name: str
    context: int
    any_name: bool  # answers whatever model is asked for

    async def chat(
        self, request: ChatRequest
    ) -> tuple[ReplyFormatter, AsyncGenerator[AnswerPiece, None]]: ...

    async def complete(
        self, request: CompletionRequest
    ) -> tuple[ReplyFormatter, AsyncGenerator[AnswerPiece, None]]: ...


class AccessGuard:
    """Host, Origin and key, before anything else is looked at. /health answers without a key and
    says nothing.
    """

    def __init__(self, app: ASGIApp, *, api_key: Key, local: bool):
        self.app = app
        self.api_key = api_key
        self.local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refused = self._refused(Request(scope))
            if refused is not None:
                await self.refusal(refused)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def refusal(self, error: ApiError) -> Response:
        """How somebody is told that he may not."""
        return error_response(error)

    def given(self, request: Request) -> str:
        """The key that was shown."""
        return request.headers.get("authorization", "").removeprefix("Bearer ").strip()

    def is_open(self, request: Request) -> bool:
        """Whether it is answered without a key."""
        return request.url.path == "/health"

    def _refused(self, request: Request) -> ApiError | None:
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        if self.local and not is_loopback(_hostname(host)):
            return ApiError(
                403, "this server answers on loopback names only", kind="permission_error"
            )
        if origin is not None and origin.partition("://")[2] != host:
            return ApiError(
                403, "this server does not answer other sites' pages", kind="permission_error"
            )
        given = self.given(request)
        CALLER.set(given)
        if self.api_key is not None and not self.is_open(request) and not self.knows(given):
            return ApiError(
                401,
                "the API key is missing or wrong",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return None

    def knows(self, given: str) -> bool:
        """Whether this is the key."""
        return (
            hmac.compare_digest(given.encode(), self.api_key.encode())
            if isinstance(self.api_key, str)
            else self.api_key is None or self.api_key(given)
        )


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Endpoints:
    """The endpoints. Counts who is inside, and watches for those who leave before their answer."""

    def __init__(
        self,
        service: CompletionService | None,
        scorer: RewardModelScorer | None,
        limits: ConnectionLimits,
    ):
        self.service = service
        self.scorer = scorer
        self.limits = limits
        self.inside = 0

    def routes(self) -> list[Route]:
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
        ]
        if self.service is not None:
            routes += [
                Route("/v1/chat/completions", self._entered(self.chat), methods=["POST"]),
                Route("/v1/completions", self._entered(self.completions), methods=["POST"]),
            ]
        if self.scorer is not None:
            routes.append(Route("/v1/score", self._entered(self.score), methods=["POST"]))
        return routes

    @property
    def name(self) -> str:
        served = self.service or self.scorer
        assert served is not None
        return served.name

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._known(request.path_params["name"])
        return JSONResponse(self._card())

    async def chat(self, body: bytes) -> Response:
        assert self.service is not None
        request = await asyncio.to_thread(parsed, ChatRequest, body)
        self._known(request.model)
        replies, pieces = await self.service.chat(request)
        return (
            EventStream(replies.chunks(pieces), self)
            if request.stream
            else JSONResponse(await replies.whole(pieces))
        )

    async def completions(self, body: bytes) -> Response:
        assert self.service is not None
        request = await asyncio.to_thread(parsed, CompletionRequest, body)
        self._known(request.model)
        replies, pieces = await self.service.complete(request)
        return (
            EventStream(replies.chunks(pieces), self)
            if request.stream
            else JSONResponse(await replies.whole(pieces))
        )

    async def score(self, body: bytes) -> Response:
        assert self.scorer is not None
        request = await asyncio.to_thread(parsed, ScoreRequest, body)
        self._known(request.model)
        return JSONResponse(await self.scorer.score(request))

    # help

    def _card(self) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "reinforge",
        }
        return {**card, "max_model_len": self.service.context} if self.service is not None else card

    def _known(self, name: str | None) -> None:
        if (
            name is not None
            and name != self.name
            and not (self.service is not None and self.service.any_name)
        ):
            raise ApiError(
                404,
                f"there is no model {name!r} here, only {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def _entered(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def limited(request: Request) -> Response:
            if self.inside >= self.limits.requests:
                return error_response(
                    ApiError(
                        429,
                        "too many requests at once; try again later",
                        kind="rate_limit_error",
                        code="rate_limit_exceeded",
                    )
                )
            self.inside += 1
            response: Response | None = None
            try:
                body = await read_body(request, self.limits)
                response = await unless_gone(request.receive, handler(body))
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody will see it
            except Exception as error:
                response = error_response(as_api_error(error))
            finally:
                if not isinstance(response, EventStream):  # a stream stays inside until its end
                    self.inside -= 1
            return response

        return limited


async def read_body(request: Request, limits: ConnectionLimits) -> bytes:
    """All of it, unless there is too much or it takes too long."""
    parts = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                parts += part
                if len(parts) > limits.body:
                    raise ApiError(
                        413,
                        f"the request has more than {limits.body} bytes",
                        code="request_too_large",
                    )
    except TimeoutError:
        raise ApiError(
            408, f"the request did not arrive within {limits.body_seconds:g} s"
        ) from None
    return bytes(parts)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Its request has been read to the end.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Server-sent events.

    An error in the middle is the last event: the status line has left long ago.
    """

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None], endpoints: Endpoints):
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        self.chunks = chunks
        self.endpoints = endpoints
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientDisconnect:
            pass
        finally:
            self.endpoints.inside -= 1

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self.chunks:
                await _event(send, json.dumps(chunk, ensure_ascii=False))
            await _event(send, "[DONE]")
        except Exception as error:
            await _event(send, json.dumps(as_api_error(error).body))
        finally:
            await self.chunks.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _event(send: Send, data: str) -> None:
    await send(
        {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
    )


def as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError.of(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    LOG.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed: {type(error).__name__}", kind="server_error")


def error_response(error: ApiError) -> Response:
    headers = (
        {"retry-after": "1"}
        if error.status == 429
        else {"www-authenticate": "Bearer"}
        if error.status == 401
        else None
    )
    return JSONResponse(error.body, error.status, headers)


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))


def make_app(
    service: CompletionService | None,
    scorer: RewardModelScorer | None,
    *,
    limits: ConnectionLimits,
    api_key: Key,
    local: bool,
) -> ASGIApp:
    endpoints = Endpoints(service, scorer, limits)
    app = Starlette(
        routes=endpoints.routes(), exception_handlers={ApiError: _failed, HTTPException: _failed}
    )
    return AccessGuard(app, api_key=api_key, local=local)


def run(app: ASGIApp, listener: socket.socket, limits: ConnectionLimits) -> None:
    """Serves until Ctrl-C or SIGTERM."""
    server_of(app, limits).run(sockets=[listener])


def server_of(
    app: ASGIApp,
    limits: ConnectionLimits | None = None,
    http: type[asyncio.Protocol] = AutoHTTPProtocol,
) -> uvicorn.Server:
    """`http`: uvicorn's class for a connection, which gets our limits before it."""
    limits = limits or ConnectionLimits()
    config = uvicorn.Config(
        app,
        http=connection_class(http, limits),
        backlog=limits.backlog,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )
    bound_logs("uvicorn.error", "asyncio", LOG.name)
    return uvicorn.Server(config)
