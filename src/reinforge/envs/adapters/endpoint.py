"""Programs that call a model, turned around: an OpenAI-compatible endpoint whose requests are
observations and whose answers are actions.

A harness or agent wants to ask a model when it pleases; an environment is asked in turns.
`AgentGate` serves one episode on a port of loopback. Each chat completion that is asked for waits
there until the trainer has sampled it. Only the standard library is needed, so that it runs in the
agent's own interpreter.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from reinforge.core.env import Action, Message, Observation

BODY = 32 << 20  # bytes of one request


class AgentGate:
    """`await open()` gives the base URL.

    `await turn(agent)` waits for the agent's next request or its end; `answer` lets a request
    through.
    """

    def __init__(self) -> None:
        self.server: asyncio.Server | None = None
        self.asked: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Message]]] = asyncio.Queue()
        self.pending: asyncio.Future[Message] | None = None
        self.known: list[Message] = []  # the conversation so far, as the agent writes it
        self.over = False  # no turns are left: whatever else is asked for is answered with nothing

    async def open(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=BODY)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"

    async def turn(self, agent: asyncio.Task[Any]) -> Observation | None:
        """What the agent says next; None: it has ended. Its exception is raised here."""
        request = asyncio.ensure_future(self.asked.get())
        await asyncio.wait({request, agent}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            agent.result()
            return None
        body, self.pending = request.result()
        messages = [_plain(m) for m in body.get("messages", [])]
        if not _same(messages[: len(self.known)], self.known):
            raise RuntimeError("the agent rewrote the conversation: it is no longer one episode")
        new = messages[len(self.known) :]
        self.known = messages
        return Observation(new, body.get("tools") or None)

    def answer(self, action: Action) -> None:
        message: Message = {
            "role": "assistant",
            "content": action.content if action.calls else action.text,
        }
        if action.calls:
            message["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))},
                }
                for c in action.calls
            ]
        assert self.pending is not None, "there is no request to answer"
        self.known = [*self.known, message]
        self.pending.set_result(
            {
                **message,
                "finish": (
                    "tool_calls"
                    if action.calls
                    else "length"
                    if action.stop == "length"
                    else "stop"
                ),
            }
        )
        self.pending = None

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()

    # ---- the wire ----

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *fields = head.decode("latin-1").split("\r\n")
                headers = {
                    k.strip().lower(): v.strip()
                    for k, _, v in (f.partition(":") for f in fields if f)
                }
                size = int(headers.get("content-length", 0))
                body = await reader.readexactly(min(size, BODY))
                if "/chat/completions" in line.split(" ")[1]:
                    await self._complete(json.loads(body), writer)
                else:
                    _send(
                        writer,
                        json.dumps(
                            {"object": "list", "data": [{"id": "policy", "object": "model"}]}
                        ),
                        "application/json",
                    )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other side has gone
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if self.over:
            message: Message = {"role": "assistant", "content": "", "finish": "stop"}
        else:
            future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            self.asked.put_nowait((body, future))
            message = dict(await future)
        finish = message.pop("finish")
        base = {"id": "chatcmpl-episode", "created": 0, "model": body.get("model", "policy")}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        if not body.get("stream"):
            whole = {
                **base,
                "object": "chat.completion",
                "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                "usage": usage,
            }
            return _send(writer, json.dumps(whole), "application/json")
        delta = {
            **message,
            **(
                {"tool_calls": [{"index": i, **c} for i, c in enumerate(message["tool_calls"])]}
                if "tool_calls" in message
                else {}
            ),
        }
        chunk = {**base, "object": "chat.completion.chunk"}
        events = [
            {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
            {**chunk, "choices": [], "usage": usage},
        ]
        _send(
            writer,
            "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n",
            "text/event-stream",
        )


def run(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


def _send(writer: asyncio.StreamWriter, text: str, kind: str) -> None:
    data = text.encode()
    writer.write(
        f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )


def _plain(message: Message) -> Message:
    """A message with its content as text; parts that are not text have no place here."""
    content = message.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise RuntimeError("the agent sent something other than text")
        content = "\n".join(str(part["text"]) for part in content)
    role = "system" if message.get("role") == "developer" else message.get("role")
    return {
        **{k: v for k, v in message.items() if v is not None},
        "role": role,
        "content": content or "",
    }


def _same(one: list[Message], other: list[Message]) -> bool:
    """Agents write back what they were answered with keys of their own beside it."""

    def key(m: Message) -> tuple[Any, ...]:
        return (
            m.get("role"),
            (m.get("content") or "").strip(),
            [
                (c["function"]["name"], c["function"]["arguments"])
                for c in m.get("tool_calls") or []
            ],
        )

    return [key(m) for m in one] == [key(m) for m in other]
