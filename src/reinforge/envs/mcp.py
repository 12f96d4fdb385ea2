"""MCP servers as sources of tools: `tools: [{mcp: {command: [python, server.py]}}, {mcp: {url:
"http://host/mcp"}}]`.

A connection belongs to a task of its own, since the client must be closed where it was opened. By
default all episodes of a run share one; it ends with the event loop. With `shared: false` every
episode has a server of its own, which ends with it.

What a tool says of itself (isError, wrong arguments) is for the model to read. A server that is
gone says nothing about the model: the episode cannot be scored, and the next one starts the server
again.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from reinforge.core.errors import InputError
from reinforge.envs.tools import NAMES, Tool, ToolError, ToolUnavailable, fitted

MARK = "REINFORGE_MCP"  # in the environment of a server and of all that it starts
PAGES = 100  # of a server's list of tools
TAIL = 2000  # bytes of stderr that are kept
# PR_SET_PDEATHSIG, SIGKILL: a server ends with the run, however that ends
LEASH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execvp(sys.argv[1],"
    " sys.argv[1:])"
)
WHERE = "env.options.tools"


@dataclass(frozen=True)
class McpServer:
    """Where a server is.

    A command runs with PATH, HOME and the like, and `env`; nothing else of our environment.
    """

    command: tuple[str, ...] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    only: tuple[str, ...] | None = None  # names of the tools that are used; None: all
    shared: bool = True  # by all episodes
    start_seconds: float = 30.0

    @property
    def name(self) -> str:
        return self.url or " ".join(self.command)

    @property
    def key(self) -> str:
        return json.dumps(
            [self.command, self.url, dict(self.env), self.cwd, self.only], default=str
        )


def server_of(given: Mapping[str, Any]) -> McpServer:
    """From the config: `{command: [...]}` or `{url: ...}`, and the other fields of `McpServer`."""
    unknown = sorted(set(given) - set(McpServer.__dataclass_fields__))
    if unknown or ("command" in given) == ("url" in given):
        raise InputError(
            (
                f"mcp has no option {', '.join(unknown)}."
                if unknown
                else "mcp needs a command or a url; one of them."
            ),
            where=WHERE,
            fix=(
                "Write {mcp: {command: [python, server.py]}} or {mcp: {url: http://host/mcp}};"
                " also: env, cwd, only, shared, start_seconds."
            ),
        )
    _package()
    command = given.get("command", ())
    words = tuple(command.split() if isinstance(command, str) else map(str, command))
    if words and words[0] == "python":
        words = (sys.executable, *words[1:])
    if words and shutil.which(words[0], path=given.get("env", {}).get("PATH")) is None:
        raise InputError(
            f"there is no program {words[0]!r} to run the MCP server.",
            where=WHERE,
            fix="Install it, or give its whole path.",
        )
    only = given.get("only")
    env = {str(k): str(v) for k, v in (given.get("env") or {}).items()}
    return McpServer(
        words,
        given.get("url"),
        env,
        given.get("cwd"),
        None if only is None else tuple(only),
        bool(given.get("shared", True)),
        float(given.get("start_seconds", 30.0)),
    )


class McpTool(Tool):
    """Its schema is the server's, and so is the last word on arguments: simple types are checked
    here, the rest there.
    """

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        known = self.parameters["properties"]
        missing = [name for name in self.parameters["required"] if name not in arguments]
        if missing:
            raise ToolError(f"{self.name} needs the argument {', '.join(missing)}")
        return {
            n: fitted(v, known[n], f"{self.name}: {n}") if _simple(known.get(n)) else v
            for n, v in arguments.items()
        }


def _simple(schema: Any) -> bool:
    return (
        isinstance(schema, dict)
        and isinstance(schema.get("type"), str)
        and schema["type"] in NAMES
        and "items" not in schema
    )


class McpConnection:
    """One session with a server, from the running event loop."""

    def __init__(self, server: McpServer):
        self.server = server
        self.over = False
        self._mark = secrets.token_hex(16)
        self._stderr = b""
        self._client: Any = None
        self._stop = asyncio.Event()
        self._listed: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(), name=f"mcp {server.name}")

    async def tools(self) -> list[Tool]:
        """What the server offers, and the config wants of it."""
        try:
            async with asyncio.timeout(self.server.start_seconds):
                listed = await asyncio.shield(self._listed)
        except TimeoutError:
            await self.close()
            raise ToolUnavailable(
                f"the MCP server {self.server.name} was not ready after"
                f" {self.server.start_seconds:g} s"
            ) from None
        wanted = self.server.only
        lost = sorted(set(wanted or ()) - {t.name for t in listed})
        if lost:
            raise InputError(
                f"the MCP server {self.server.name} has no tool {', '.join(lost)}.",
                where=WHERE,
                fix=f"It has: {', '.join(t.name for t in listed)}.",
            )
        return [self._tool(t) for t in listed if wanted is None or t.name in wanted]

    async def close(self) -> None:
        """Ends the server and all that it started."""
        self.over = True
        self._stop.set()
        if not self._listed.done():
            self._task.cancel()  # it still waits for the server
        await asyncio.wait([self._task], timeout=10)

    # ---- inside ----

    async def _hold(self) -> None:
        """Opens the session, keeps it open, and closes it: all in one task, as the
        client wants it.
        """
        mcp = _package()
        try:
            with _StderrTail(self) as errors:
                async with mcp.Client(
                    self.server.url or mcp.stdio_client(self._settings(mcp), errlog=errors)
                ) as client:
                    self._client = client
                    self._listed.set_result(await _all_tools(client))
                    await self._stop.wait()
        except Exception as error:
            self._failed(error)
        finally:
            self.over = True
            self._failed(RuntimeError("it was closed"))
            kill_marked(self._mark)

    def _settings(self, mcp: Any) -> Any:
        words = list(self.server.command)
        if sys.platform == "linux":
            words = [sys.executable, "-I", "-S", "-c", LEASH, *words]
        return mcp.StdioServerParameters(
            command=words[0],
            args=words[1:],
            env={**self.server.env, MARK: self._mark},
            cwd=self.server.cwd,
        )

    def _failed(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not self._listed.done():
            last = self._stderr.decode(errors="replace").strip().splitlines()[-1:]
            why = "; it said: ".join([f"{type(error).__name__}: {error}", *last])
            self._listed.set_exception(
                ToolUnavailable(f"the MCP server {self.server.name} did not start: {why}")
            )
            self._listed.exception()  # whoever waits hears it; if nobody does, that is no news

    def _tool(self, listed: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            return await self._call(listed.name, arguments)

        schema = dict(listed.input_schema or {})
        parameters = {
            **schema,
            "type": "object",
            "properties": schema.get("properties") or {},
            "required": list(schema.get("required") or []),
        }
        return McpTool(listed.name, listed.description or listed.title or "", parameters, call)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if self.over:
            raise ToolUnavailable(f"the MCP server {self.server.name} is gone")
        mcp = _package()
        try:
            result = await self._client.call_tool(name, arguments)
        except mcp.MCPError as error:
            if error.code == mcp.types.CONNECTION_CLOSED or self._task.done():
                self.over = True
                self._stop.set()
                raise ToolUnavailable(
                    f"the MCP server {self.server.name} ended while {name} ran"
                ) from error
            raise ToolError(str(error)) from None
        text = text_of(result)
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, McpConnection]] = (
    WeakKeyDictionary()
)


def connect(server: McpServer) -> McpConnection:
    """A connection of the running loop: the shared one, if there is one that still works."""
    if not server.shared:
        return McpConnection(server)
    held = _SHARED.setdefault(asyncio.get_running_loop(), {})
    if server.key not in held or held[server.key].over:
        held[server.key] = McpConnection(server)
    return held[server.key]


async def _all_tools(client: Any) -> list[Any]:
    found = []
    cursor = None
    for _ in range(PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def text_of(result: Any) -> str:
    """What a result says. What is no text is named, with its size."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and getattr(block.resource, "text", None) is not None:
            parts.append(block.resource.text)
        else:
            data = (
                getattr(block, "data", "")
                or getattr(getattr(block, "resource", None), "blob", "")
                or ""
            )
            parts.append(
                f"({block.type}, {getattr(block, 'mime_type', None) or 'unknown type'},"
                f" {len(data) * 3 // 4} bytes)"
            )
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


class _StderrTail:
    """A file for a server's stderr, of which the end is kept.

    It must not fill the terminal, nor block the server.
    """

    def __init__(self, connection: McpConnection):
        self.connection = connection
        self.loop = asyncio.get_running_loop()

    def __enter__(self) -> Any:
        self.source, sink = os.pipe()
        os.set_blocking(self.source, False)
        self.loop.add_reader(self.source, self._read)
        self.file = os.fdopen(sink, "w")
        return self.file

    def _read(self) -> None:
        with suppress(OSError):
            data = os.read(self.source, 1 << 16)
            self.connection._stderr = (self.connection._stderr + data)[-TAIL:]
            if not data:
                self.loop.remove_reader(self.source)

    def __exit__(self, *error: object) -> None:
        self._read()
        self.loop.remove_reader(self.source)
        self.file.close()
        os.close(self.source)


def kill_marked(mark: str) -> int:
    """Kills every process that has the mark in its environment, children that left the server's
    process group too. How many there were.
    """
    wanted = f"{MARK}={mark}".encode()
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
                found += 1
    return found


def _package() -> Any:
    try:
        import mcp
    except ModuleNotFoundError as error:
        raise InputError(
            f"MCP servers need {error.name}, which is not installed.",
            where=WHERE,
            fix="pip install 'reinforge[mcp]'",
        ) from error
    return mcp
