"""What the stubs of servers share: HTTP, and a bigram model in plain Python that can be computed by
hand: logits = E[previous] E^T with E the embedding of the safetensors that it was given.

A stub is a subclass of `BigramStub` that speaks one server's API (sglang_stub.py), in a process of
its own that imports nothing but this and the standard library. `StubServers` (stub_servers.py)
starts it.

Environment: STUB_HANG: a file that, while it exists, stops all generation; STUB_STALE: new weights
are reported as loaded and are not; STUB_SLOW: a file that, while it exists, keeps a server from
starting; STUB_HOLD: a file that, while it exists, holds every request
that has HOLD_AT tokens, so that a test can act in the middle of an answer however slow the machine
is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import struct
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

NAME = "model.embed_tokens.weight"
HOLD_AT = 10
LETTERS = "abcdefgh"  # what its tokens say: as the tokenizer of the toys does
BAD = 62  # a prompt that begins with it fails in the server, and only it


class RequestFailed(Exception):
    """Answered with 500."""


@dataclass
class Written:
    """What was sampled for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = "length"  # length | stop | abort
    matched: int | str | None = None  # the token or string that it stopped at


def load(folder: str) -> list[list[float]]:
    raw = (Path(folder) / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    entry = json.loads(raw[8 : 8 + size])[NAME]
    rows, width = entry["shape"]
    start = 8 + size + entry["data_offsets"][0]
    flat = struct.unpack(f"<{rows * width}f", raw[start : start + 4 * rows * width])
    return [list(flat[i * width : (i + 1) * width]) for i in range(rows)]


def likely(
    chances: Sequence[float], *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> list[int]:
    """The tokens that the filters leave."""
    order = sorted(range(len(chances)), key=lambda token: -chances[token])
    if top_k > 0:
        order = order[:top_k]
    order = [token for token in order if chances[token] >= min_p * chances[order[0]]]
    before = itertools.accumulate((chances[token] for token in order), initial=0.0)
    return [token for token, sum_ in zip(order, before, strict=False) if sum_ < top_p]


def exists(variable: str) -> bool:
    return variable in os.environ and Path(os.environ[variable]).exists()


class BigramStub:
    """A server with a bigram model. A subclass has `answer`."""

    notices_after = 0.0  # seconds: that a client has left, whose request then is aborted

    def __init__(self, folder: str, key: str | None = None):
        """`key`: what every request must bring; None: nothing."""
        self.key = key
        self.table = load(folder)
        self.loads = 0  # updates of the weights
        self.running: dict[int, bool] = {}  # request: whether it is aborted
        self.held: set[int] = set()
        self.numbers = itertools.count()

    async def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and content; lines as they come where that is an asynchronous generator."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What tests ask for, at /stub."""
        return {"running": len(self.running), "held": len(self.held), "loads": self.loads}

    # ---- the model ----

    def load(self, folder: str) -> None:
        assert not self.running, "weights are loaded while something is generated"
        if not os.environ.get("STUB_STALE"):
            self.table = load(folder)
        self.loads += 1

    def logprobs(self, previous: int, temperature: float = 1.0) -> list[float]:
        state = self.table[previous]
        logits = [
            sum(a * b for a, b in zip(state, row, strict=True)) / temperature for row in self.table
        ]
        top = max(logits)
        total = top + math.log(sum(math.exp(x - top) for x in logits))
        return [x - total for x in logits]

    def scores(self, tokens: Sequence[int]) -> list[float]:
        """Of every token after the first."""
        return [self.logprobs(a)[b] for a, b in pairwise(tokens)]

    def abort(self) -> None:
        self.running = dict.fromkeys(self.running, True)

    async def sample(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 1.0,
        seed: int | None = None,
        stops: Collection[int] = (),
        strings: Sequence[str] = (),
        done: Written | None = None,
        **filters: Any,
    ) -> Written:
        """`done`: where it is written, for those who read along."""
        if tokens[0] == BAD:
            raise RequestFailed("this request breaks")
        if not temperature:
            filters = {"top_k": 1}
        me = next(self.numbers)
        self.running[me] = False
        chance = random.Random(seed)
        done = done or Written()
        last = tokens[-1]
        try:
            while len(done.tokens) < max_tokens:
                await self._pause(me, len(done.tokens))
                if self.running[me]:
                    done.reason = "abort"
                    break
                logp = self.logprobs(last, temperature or 1.0)
                chances = [math.exp(x) for x in logp]
                left = likely(chances, **filters)
                last = chance.choices(left, [chances[token] for token in left])[0]
                done.tokens.append(last)
                done.logprobs.append(logp[last])
                text = "".join(LETTERS[token % 8] for token in done.tokens if token > 2)
                found = [string for string in strings if string in text]
                if found or last in stops:
                    done.reason = "stop"
                    done.matched = found[0] if found else last
                    break
        finally:
            self.held.discard(me)
            del self.running[me]
        return done

    async def _pause(self, me: int, written: int) -> None:
        await asyncio.sleep(0)
        while exists("STUB_HANG"):
            await asyncio.sleep(0.02)
        while written == HOLD_AT and not self.running[me] and exists("STUB_HOLD"):
            self.held.add(me)
            await asyncio.sleep(0.01)
        self.held.discard(me)

    # ---- HTTP ----

    async def listen(self, port: int) -> None:
        while exists("STUB_SLOW"):
            await asyncio.sleep(0.02)
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        print(f"listens on http://127.0.0.1:{port}", flush=True)
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of one connection."""
        if line := await reader.readline():
            _, path, _ = line.decode().split()
            headers = {}
            while (line := await reader.readline()).strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            size = int(headers.get("content-length", 0))
            body = json.loads(await reader.readexactly(size) or b"{}")
            work = asyncio.ensure_future(self._reply(path, headers.get("authorization"), body))
            gone = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and isinstance(work.result()[1], AsyncGenerator):
                await self._write_lines(writer, work.result()[1], gone)
            elif work.done():
                status, content = work.result()
                raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(raw)}\r\nconnection: close\r\n\r\n".encode()
                    + raw
                )
                await writer.drain()
            else:
                await asyncio.wait({work}, timeout=self.notices_after)
                work.cancel()  # the client has left: what it asked for is aborted
            gone.cancel()
        writer.close()

    async def _write_lines(
        self,
        writer: asyncio.StreamWriter,
        lines: AsyncGenerator[str, None],
        gone: asyncio.Future[bytes],
    ) -> None:
        writer.write(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        async with aclosing(lines):
            async for line in lines:
                if gone.done():
                    return  # the client has left
                raw = line.encode() + b"\n"
                writer.write(b"%x\r\n%s\r\n" % (len(raw), raw))
                await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def _reply(self, path: str, authorization: str | None, body: Any) -> tuple[int, Any]:
        if self.key is not None and authorization != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if path == "/stub":
            return 200, self.facts()
        try:
            return await self.answer(path, body)
        except RequestFailed as error:
            return 500, {"error": {"message": str(error)}}
