"""vLLM as a server of our own: started with our plug-in (`vllm_plugin.py`), spoken to in tokens.

Spans vLLM 0.26 and 0.32.
"""

from __future__ import annotations

import array
import base64
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.routes import from_json
from reinforge.engines.served.dialect import (
    ASK,
    LOAD,
    OnOutput,
    SampleOutput,
    SampleRequest,
    ServerSetup,
    given_options,
    options,
)
from reinforge.engines.served.http import ServerClient, ServerDown, ServerFault
from reinforge.engines.structured_outputs import server_words

MODULE = "reinforge_vllm"
GROUP = "reinforge_group"  # the plug-in's name for a process group with the trainer


def plugin_file() -> Path:
    """The file that a vLLM server loads as `reinforge_vllm`."""
    return Path(__file__).with_name("vllm_plugin.py")


def install_plugin(folder: Path) -> Path:
    """Puts the plug-in, alone, into a folder for the server's PYTHONPATH."""
    place = folder / "engine-plugin"
    place.mkdir(parents=True, exist_ok=True)
    part = place / f".{os.getpid()}"
    shutil.copyfile(plugin_file(), part)
    part.rename(place / f"{MODULE}.py")
    return place


class Vllm:
    """The `Dialect` of vLLM: it speaks to a plug-in of ours that the server loads."""

    name = "vllm"
    channels: tuple[str, ...] = ("ipc", "files", "adapter", "group")
    unknown_path = "Start that server with our plug-in: docs/engines.md."

    def command(self, setup: ServerSetup, python: str, port: int) -> list[str]:
        args: dict[str, Any] = {
            "model": setup.model,
            "served-model-name": "policy",
            "host": "127.0.0.1",
            "port": port,
            "dtype": setup.dtype,
            "seed": setup.seed % 2**31,
            "max-model-len": min(
                setup.context, max(64, setup.longest + 1) if setup.longest else setup.context
            ),
            "max-num-seqs": setup.max_batch,
            "logprobs-mode": "processed_logprobs",
            "worker-extension-cls": f"{MODULE}.WorkerExtension",
            "middleware": f"{MODULE}.ControlMiddleware",
            "disable-uvicorn-access-log": True,
        }
        if setup.cfg.channel == "api":
            backend = "ipc" if setup.near else GROUP
            args["weight-transfer-config"] = json.dumps({"backend": backend})
        if setup.routed is not None:
            if setup.device != "cuda":
                raise InputError(
                    "vLLM tells which experts its tokens went to on a GPU only.",
                    where="train.router_replay",
                    fix="Set rollout.engine=native, or leave it out.",
                )
            args["enable-return-routed-experts"] = True
        if setup.device == "cuda":
            args |= {"gpu-memory-utilization": setup.cfg.memory} | (
                {"enable-sleep-mode": True} if setup.sleep_level else {}
            )
        else:
            # a prompt cut in two rewinds its seeded generator, which a CPU's cannot: the worker
            # would end
            args |= {
                "enforce-eager": True,
                "enable-chunked-prefill": False,
                "max-num-batched-tokens": max(4096, args["max-model-len"]),
            }
        words = options({**args, **given_options(setup)})
        return [python, "-m", "vllm.entrypoints.openai.api_server", *words]

    def environment(self, setup: ServerSetup, key: str) -> dict[str, str]:
        found = {
            "PYTHONPATH": str(install_plugin(setup.folder).absolute()),
            "VLLM_API_KEY": key,
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
        }
        if setup.device == "cpu":
            found["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(setup.kv_gib or 1)))
        return found

    async def status(self, http: ServerClient, setup: ServerSetup) -> dict[str, Any]:
        facts: dict[str, Any] = await http.post("/reinforge/status", timeout=ASK)
        if facts["logprobs"] != "processed_logprobs":
            raise InputError(
                f"{http.address} reports {facts['logprobs']}: log-probs before temperature are not"
                " those of sampling.",
                where="engine.address",
                fix="Start it with --logprobs-mode processed_logprobs.",
            )
        if setup.cfg.address and facts["dtype"] != setup.dtype:
            raise InputError(
                f"{http.address} computes in {facts['dtype']}, the trainer in {setup.dtype}.",
                where="engine.address",
                fix=f"Start it with --dtype {setup.dtype}.",
            )
        if setup.routed is not None and not facts["routes"]:
            raise InputError(
                f"{http.address} does not tell which experts its tokens went to.",
                where="engine.address",
                fix="Start it with --enable-return-routed-experts, or set train.router_replay=off.",
            )
        return facts

    async def generate(
        self,
        http: ServerClient,
        requests: Sequence[SampleRequest],
        params: Sampling,
        stops: frozenset[int],
        on_output: OnOutput | None = None,
    ) -> list[SampleOutput]:
        shared: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "stop_token_ids": sorted(stops),
        }
        if params.stop_strings and not params.ignore_eos:
            shared["stop"] = list(params.stop_strings)
        if params.constraint is not None:
            shared["structured_outputs"] = server_words(params.constraint)
        items = [
            {"tokens": request.tokens, "seed": request.seed, "max_tokens": request.max_tokens}
            for request in requests
        ]
        body = {"items": items, "params": shared}
        if on_output is None:
            reply = await http.post("/reinforge/generate", body)
            return [_output(item) for item in reply["items"]]
        ends: dict[int, SampleOutput] = {}
        async with aclosing(http.lines("/reinforge/stream", body)) as lines:
            async for line in lines:
                item = json.loads(line)
                if "error" in item:
                    raise _failed(http, item["error"])
                if item["reason"] is None:
                    on_output(item["place"], _output({**item, "reason": "abort"}))
                else:
                    ends[item["place"]] = _output(item)
        if len(ends) < len(items):
            raise ServerDown(f"{http.address}/reinforge/stream: the answer breaks off")
        return [ends[i] for i in range(len(items))]

    async def score(self, http: ServerClient, tokens: Sequence[int]) -> list[float]:
        reply = await http.post("/reinforge/score", {"tokens": list(tokens)}, timeout=LOAD)
        return unpacked("f", reply["logprobs"])

    async def stage(self, http: ServerClient, message: Mapping[str, Any]) -> None:
        method = "join" if message["kind"] == "join" else "stage"
        await http.post(
            "/reinforge/call", {"method": method, "args": [json.dumps(message)]}, timeout=LOAD
        )

    async def commit(
        self, http: ServerClient, version: int, fix_head: bool, keep: bool = False
    ) -> float:
        reply = await http.post(
            "/reinforge/commit",
            {"version": version, "fix_head": fix_head, "keep": keep},
            timeout=LOAD,
        )
        return max(float(result["head_error"]) for result in reply["results"])

    async def abort(self, http: ServerClient) -> None:
        await http.post("/reinforge/abort", timeout=ASK)

    async def sleep(self, http: ServerClient, level: int) -> None:
        await http.post("/reinforge/sleep", {"level": level}, timeout=LOAD)

    async def wake(self, http: ServerClient, level: int) -> None:
        await http.post("/reinforge/wake", {"tags": None}, timeout=LOAD)


def _output(item: dict[str, Any]) -> SampleOutput:
    return SampleOutput(
        unpacked("q", item["tokens"]),
        unpacked("f", item["logprobs"]),
        item["reason"],
        from_json(item.get("routes")),
        [(at, version) for at, version in item.get("cuts", ())],
    )


def _failed(http: ServerClient, said: str) -> ServerDown:
    """What an error in the middle of an answer becomes: as `ServerClient` has it for others."""
    kind = ServerDown if "EngineDead" in said else ServerFault
    return kind(f"{http.address}/reinforge/stream: {said}")


def unpacked(code: str, text: str) -> list[Any]:
    values = array.array(code)
    values.frombytes(base64.b64decode(text))
    return values.tolist()
