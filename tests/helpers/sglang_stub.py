"""A server that speaks SGLang's HTTP API as its sources have it, 0.5.17 to 0.5.23."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from helpers.bigram_stub import BigramStub, Written
from helpers.ledger_gpus import SERVER, ServerLedger

STARTED_AS = "sglang.launch_server"  # the module that the dialect starts, which this one replaces
NOT_FOUND = (404, {"detail": "Not Found"})


class Refused(Exception):
    """Answered with 400."""


class SglangStub(BigramStub):
    notices_after = 0.5

    def __init__(self, args: argparse.Namespace):
        super().__init__(args.model_path, args.api_key)
        self.args = args
        self.path = args.model_path
        self.version = "default"
        self.memory: set[str] = {"weights", "kv_cache"}
        self.ledger = ServerLedger()
        config = json.loads((Path(args.model_path) / "config.json").read_text())
        self.eos = config["eos_token_id"]

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "memory": sorted(self.memory), "args": vars(self.args)}

    async def write(
        self, rid: str, tokens: list[int], asked: dict[str, Any], done: Written | None = None
    ) -> dict[str, Any]:
        assert self.memory == {"weights", "kv_cache"}, "generating in its sleep"
        if len(tokens) >= self.args.context_length - 6:
            raise Refused(f"the input is too long for a context of {self.args.context_length}")
        room = self.args.context_length - 2 - len(tokens)
        stops = {*asked.get("stop_token_ids", ()), self.eos}
        done = await self.sample(
            tokens,
            min(asked["max_new_tokens"], room),
            temperature=asked.get("temperature", 1.0),
            seed=asked.get("sampling_seed"),
            stops=() if asked.get("ignore_eos") else stops,
            strings=asked.get("stop", ()),
            done=done,
            **{name: asked[name] for name in ("top_p", "top_k", "min_p") if name in asked},
        )
        return self.told(rid, tokens, done, {"type": done.reason, "matched": done.matched})

    def told(
        self, rid: str, tokens: list[int], done: Written, end: dict[str, Any] | None
    ) -> dict[str, Any]:
        """All of an answer so far."""
        scores = zip(self.scores(tokens), tokens[1:], strict=True) if end else ()
        drawn = zip(done.logprobs, done.tokens, strict=True)
        return {
            "text": "",
            "output_ids": done.tokens,
            "meta_info": {
                "id": rid,
                "finish_reason": end,
                "prompt_tokens": len(tokens),
                "completion_tokens": len(done.tokens),
                "weight_version": self.version,
                "output_token_logprobs": [[logprob, token, None] for logprob, token in drawn],
                "input_token_logprobs": [
                    [None, self.clipped(tokens[0]), None],
                    *([logprob, self.clipped(token), None] for logprob, token in scores),
                ],
            },
        }

    def clipped(self, token: int) -> int:
        """As it tells the tokens of a prompt: the last of the vocabulary may be an image's."""
        return token if token < len(self.table) - 1 else 0

    async def answer(self, path: str, body: Any) -> tuple[int, Any]:
        asked = urlsplit(path)
        match asked.path:
            case "/generate":
                try:
                    return 200, await self.generate(body)
                except Refused as error:
                    return 400, {"error": {"message": str(error)}}
            case "/flush_cache":
                return await self.flush(float(parse_qs(asked.query)["timeout"][0]))
            case "/health_generate":
                await self.write("HEALTH_CHECK", [1], {"max_new_tokens": 1})
                self.ledger.event("is ready")
                return 200, ""
            case "/model_info":
                return 200, {
                    "model_path": self.path,
                    "weight_version": self.version,
                    "is_generation": True,
                }
            case "/update_weights_from_disk":
                return self.update(body)
            case "/abort_request":
                assert body["abort_all"]
                self.abort()
            case "/release_memory_occupation":
                self.die_unless_idle()
                self.memory -= set(body["tags"])
                self.ledger.resize("sleeps", 0)
            case "/resume_memory_occupation":
                self.memory |= set(body["tags"])
                self.ledger.resize("wakes", SERVER)
            case _:
                return NOT_FOUND
        return 200, ""

    async def generate(self, body: dict[str, Any]) -> Any:
        if isinstance(body["input_ids"][0], int):
            self.ledger.event("scores")
            return await self.write("one", body["input_ids"], body["sampling_params"])
        if body.get("stream"):
            return self.stream(body)
        asked = zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True)
        return list(await asyncio.gather(*(self.write(*one) for one in asked)))

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        """Events as it writes them: of one answer each, with all tokens so far."""
        asked = list(zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True))
        written = [Written() for _ in asked]
        tasks = [
            asyncio.ensure_future(self.write(*one, done))
            for one, done in zip(asked, written, strict=True)
        ]
        seen = [0] * len(tasks)
        left = set(range(len(tasks)))
        try:
            while left:
                await asyncio.wait([tasks[i] for i in left], timeout=0.01)
                for i in sorted(left):
                    rid, tokens, params = asked[i]
                    if tasks[i].done():
                        left.remove(i)
                        event = tasks[i].result()
                    elif len(written[i].tokens) >= seen[i] + params["stream_interval"]:
                        event = self.told(rid, tokens, written[i], None)
                    else:
                        continue
                    seen[i] = event["meta_info"]["completion_tokens"]
                    yield f"data: {json.dumps({**event, 'index': i})}\n"
            yield "data: [DONE]\n"
        finally:
            for task in tasks:
                task.cancel()

    async def flush(self, timeout: float) -> tuple[int, Any]:
        """Waits until nothing runs."""
        for _ in range(int(timeout * 100)):
            if not self.running:
                return 200, "Cache flushed."
            await asyncio.sleep(0.01)
        return 400, "Timed out waiting for idle state."

    def die_unless_idle(self) -> None:
        """As its scheduler does, by an assertion, and the server with it."""
        if self.running:
            print("AssertionError: only when server is idle", file=sys.stderr, flush=True)
            os._exit(1)

    def update(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.die_unless_idle()
        assert body["flush_cache"]
        self.load(body["model_path"])
        self.ledger.event(f"loads {body['weight_version']}")
        self.path = body["model_path"]
        self.version = body["weight_version"]
        return 200, {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": 0,
        }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "dtype", "api-key"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "random-seed", "context-length", "max-running-requests"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--device", default="cuda")
    for name in ("enable-deterministic-inference", "enable-memory-saver"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    assert args.host == "127.0.0.1"
    asyncio.run(SglangStub(args).listen(args.port))
