"""Who may ask: the rules of `reinforge serve` (Host, Origin, a key away from loopback).

Browsers keep the key in a cookie, and headers let a page do nothing that is not ours.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from reinforge.serve.connections import ConnectionLimits
from reinforge.serve.http import AccessGuard, read_body
from reinforge.serve.requests import ApiError

COOKIE = "reinforge_token"
LOGIN = "/api/login"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src"
    " 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
Message = dict[str, Any]


class BrowserGuard(AccessGuard):
    """Before every request. The page itself has nothing to hide: its data need the token."""

    def refusal(self, error: ApiError) -> Response:
        return refusal(error.status, str(error))

    def given(self, request: Any) -> str:
        return super().given(request) or request.cookies.get(COOKIE, "")

    def is_open(self, request: Any) -> bool:
        path = request.url.path
        return path == LOGIN or not path.startswith("/api/")


def refusal(status: int, what: str, where: str | None = None, fix: str | None = None) -> Response:
    """An error as all of them are."""
    error = {"what": what, "where": where, "fix": fix}
    return JSONResponse({"error": error}, status, HEADERS)


class BodyLimit:
    """Reads the body of a request before anybody else does, and no more of it than is allowed."""

    def __init__(self, app: Any, limits: ConnectionLimits):
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        try:
            body = await read_body(Request(scope, receive), self.limits)
        except ApiError as error:
            await refusal(error.status, str(error))(scope, receive, send)
            return
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def once() -> Message:
            return waiting.pop() if waiting else await receive()

        await self.app(scope, once, send)


class SafeHeaders:
    """Puts our headers on every answer."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                ours = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [
                    *message["headers"],
                    *((name, value) for name, value in ours if name not in there),
                ]
            await send(message)

        await self.app(scope, receive, sent)
