"""A server that speaks SGLang's HTTP API as its 0.5.23 sources have it, with a bigram model in
plain Python behind it: logits = E[previous] E^T with E the embedding of the safetensors that it was
given. Copied as sglang/launch_server.py it is started as SGLang would be.

Environment: STUB_HANG: a file that, while it exists, stops all generation (health included);
STUB_STALE: update_weights_from_disk reports success and loads nothing; STUB_HOLD: a file that,
while it exists, holds every request that has HOLD_AT tokens (or STUB_HOLD_AT), so that a test can
act in the middle of an answer however slow the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

NAME = "model.embed_tokens.weight"
HOLD_AT = 20
LETTERS = "abcdefgh"  # what its tokens say: as the tokenizer of the toys does
BAD = 62  # a prompt that begins with it fails in the server, and only it


def load(folder: str) -> list[list[float]]:
    file = Path(folder) / "model.safetensors"
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    entry = json.loads(raw[8 : 8 + size])[NAME]
    rows, width = entry["shape"]
    start = 8 + size + entry["data_offsets"][0]
    flat = struct.unpack(f"<{rows * width}f", raw[start : start + 4 * rows * width])
    return [list(flat[i * width : (i + 1) * width]) for i in range(rows)]


class Stub:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.table = load(args.model_path)
        self.path = args.model_path
        self.version = "default"
        self.flushed = 0
        self.running: dict[str, bool] = {}  # rid -> aborted
        self.held: set[str] = set()
        self.hold_at = int(os.environ.get("STUB_HOLD_AT", HOLD_AT))
        self.memory: set[str] = {"weights", "kv_cache"}

    def logprobs(self, previous: int, temperature: float) -> list[float]:
        state = self.table[previous]
        logits = [
            sum(a * b for a, b in zip(state, row, strict=True)) / temperature for row in self.table
        ]
        top = max(logits)
        total = top + math.log(sum(math.exp(x - top) for x in logits))
        return [x - total for x in logits]

    async def write(self, rid: str, tokens: list[int], p: dict[str, Any]) -> dict[str, Any]:
        assert "kv_cache" in self.memory and "weights" in self.memory, "generating in its sleep"
        self.running[rid] = False
        chance = random.Random(p.get("sampling_seed"))
        drawn = []
        reason = {"type": "length", "length": p["max_new_tokens"]}
        last = tokens[-1]
        try:
            for _ in range(p["max_new_tokens"]):
                await asyncio.sleep(0)
                while Path(os.environ.get("STUB_HANG", "/nowhere")).exists():
                    await asyncio.sleep(0.02)
                while (
                    len(drawn) == self.hold_at
                    and not self.running[rid]
                    and Path(os.environ.get("STUB_HOLD", "/nowhere")).exists()
                ):
                    self.held.add(rid)
                    await asyncio.sleep(0.01)
                self.held.discard(rid)
                if self.running[rid]:
                    reason = {"type": "abort", "message": "Abort before prefill"}
                    break
                t = p.get("temperature", 1.0)
                logp = self.logprobs(last, t or 1.0)
                last = (
                    max(range(len(logp)), key=logp.__getitem__)
                    if t == 0
                    else chance.choices(range(len(logp)), [math.exp(x) for x in logp])[0]
                )
                drawn.append([logp[last], last, None])
                if last in p.get("stop_token_ids", ()):
                    reason = {"type": "stop", "matched": last}
                    break
                text = "".join(LETTERS[t % 8] for _, t, _ in drawn if t > 2)
                if any(string in text for string in p.get("stop", ())):
                    reason = {"type": "stop", "matched": text}
                    break
        finally:
            self.held.discard(rid)
            del self.running[rid]
        scored = [[None, tokens[0], None]] + [
            [self.logprobs(a, 1.0)[b], b, None] for a, b in pairwise(tokens)
        ]
        return {
            "text": "",
            "output_ids": [t for _, t, _ in drawn],
            "meta_info": {
                "id": rid,
                "finish_reason": reason,
                "prompt_tokens": len(tokens),
                "completion_tokens": len(drawn),
                "weight_version": self.version,
                "output_token_logprobs": drawn,
                "input_token_logprobs": scored,
            },
        }

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/generate":
            if isinstance(body["input_ids"][0], int):
                return 200, await self.write("one", body["input_ids"], body["sampling_params"])
            if any(tokens[0] == BAD for tokens in body["input_ids"]):
                return 500, {"error": {"message": "this request breaks"}}
            works = [
                self.write(r, t, p)
                for r, t, p in zip(
                    body["rid"], body["input_ids"], body["sampling_params"], strict=True
                )
            ]
            return 200, list(await asyncio.gather(*works))
        if path == "/health_generate":
            await self.write("HEALTH_CHECK", [1], {"max_new_tokens": 1})
            return 200, ""
        if path == "/model_info":
            return 200, {
                "model_path": self.path,
                "weight_version": self.version,
                "is_generation": True,
            }
        if path == "/update_weights_from_disk":
            if self.running:
                return 400, {
                    "success": False,
                    "message": "requests are running",
                    "num_paused_requests": 0,
                }
            if not os.environ.get("STUB_STALE"):
                self.table = load(body["model_path"])
            self.path = body["model_path"]
            self.version = body["weight_version"]
            self.flushed = self.flushed + body["flush_cache"]
            return 200, {
                "success": True,
                "message": "Succeeded to update model weights.",
                "num_paused_requests": 0,
            }
        if path == "/abort_request":
            for rid in self.running:
                self.running[rid] = self.running[rid] or body["abort_all"] or rid == body["rid"]
            return 200, ""
        if path == "/release_memory_occupation":
            self.memory -= set(body["tags"])
            return 200, ""
        if path == "/resume_memory_occupation":
            self.memory |= set(body["tags"])
            return 200, ""
        if path == "/stub":
            return 200, {
                "running": len(self.running),
                "held": len(self.held),
                "flushed": self.flushed,
                "memory": sorted(self.memory),
                "args": vars(self.args),
            }
        return 404, {"detail": "Not Found"}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            _, path, _ = line.decode().split()
            headers = {}
            while (line := await reader.readline()).strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            body = json.loads(
                await reader.readexactly(int(headers.get("content-length", 0))) or b"{}"
            )
            if headers.get("authorization") != f"Bearer {self.args.api_key}":
                status = 401
                content = {"error": "Unauthorized"}
            else:
                work = asyncio.ensure_future(self.answer(path, body))
                gone = asyncio.ensure_future(reader.read(1))
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():  # the client has left: what it asked for is aborted
                    work.cancel()
                    break
                gone.cancel()
                status, content = work.result()
            raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            writer.write(
                f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length:"
                f" {len(raw)}\r\nconnection: close\r\n\r\n".encode()
                + raw
            )
            await writer.drain()
            break
        writer.close()


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "dtype", "api-key"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "random-seed", "context-length", "max-running-requests"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--device", default="cuda")
    for name in ("enable-deterministic-inference", "enable-memory-saver"):
        parser.add_argument(f"--{name}", action="store_true")
    stub = Stub(args := parser.parse_args())
    server = await asyncio.start_server(stub.serve, args.host, args.port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
