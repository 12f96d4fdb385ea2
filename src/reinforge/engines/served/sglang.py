"""SGLang as a server of our own, over its HTTP API (0.5.17 to 0.5.23).

No plug-in: weights go through a directory of safetensors that it loads.

Tests run against a stub that speaks this API as its sources have it
(tests/helpers/sglang_stub.py); its packages need CUDA.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from reinforge.core.constraint import Constraint
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
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
from reinforge.engines.served.http import (
    ABORTED,
    RequestAborted,
    ServerClient,
    ServerDown,
    ServerFault,
)

SEEDS = 2**31
# Of its context SGLang keeps some for itself: a prompt may have 6 tokens fewer, and prompt and
# answer 2
SPARE = 8
TELL_EVERY = 8  # tokens, where they are told as they come
KEY = "REINFORGE_SGLANG_KEY"
# SGLang takes its key only as an argument, and those of a process are there for every user to read:
# it becomes one inside
BOOT = (
    f"import os, runpy, sys; sys.argv += ['--api-key=' + os.environ.pop('{KEY}')]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)


class Sglang:
    """The `Dialect` of SGLang. It needs nothing in the server but its own HTTP API, so it is the
    example to copy for another server.
    """

    name = "sglang"
    channels: tuple[str, ...] = ("safetensors",)
    unknown_path = "Start an SGLang server of version 0.5.17 or later: docs/engines.md."

    def __init__(self) -> None:
        self.staged: dict[str, Mapping[str, Any]] = {}  # address -> what it is to load

    def command(self, setup: ServerSetup, python: str, port: int) -> list[str]:
        args: dict[str, Any] = {
            "model-path": setup.model,
            "host": "127.0.0.1",
            "port": port,
            "dtype": setup.dtype,
            "random-seed": setup.seed % SEEDS,
            "context-length": min(setup.context, max(64, setup.longest or setup.context)) + SPARE,
            "max-running-requests": setup.max_batch,
            "mem-fraction-static": setup.cfg.memory,
        }
        if setup.cfg.seeded:
            args["enable-deterministic-inference"] = True
        if setup.sleep_level:
            args["enable-memory-saver"] = True
        if setup.device == "cpu":
            args["device"] = "cpu"
        asked = {**args, **given_options(setup)}
        # its switches are off where they are not named, and most know no --no- form
        named = {name: value for name, value in asked.items() if value is not False}
        return [python, "-c", BOOT, *options(named)]

    def environment(self, setup: ServerSetup, key: str) -> dict[str, str]:
        found = {
            KEY: key,
            # log-probs after temperature: those of sampling
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
            # `SPARE`: nothing is ever written there
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        }
        return found | ({"SGLANG_USE_CPU_ENGINE": "1"} if setup.device == "cpu" else {})

    async def status(self, http: ServerClient, setup: ServerSetup) -> dict[str, Any]:
        await http.get("/health_generate", timeout=ASK)
        facts: dict[str, Any] = await http.get("/model_info", timeout=ASK)
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
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "stop_token_ids": sorted(stops),
            "ignore_eos": not stops,  # true: the stop tokens count no more either
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if params.stop_strings and not params.ignore_eos:
            shared["stop"] = list(params.stop_strings)
        if params.constraint is not None:
            shared |= _form(params.constraint)
        sampling = []
        for request in requests:
            own = {**shared, "max_new_tokens": request.max_tokens}
            if request.seed is not None:
                own["sampling_seed"] = request.seed % SEEDS
            if on_output is not None:
                own["stream_interval"] = TELL_EVERY
            sampling.append(own)
        body = {
            "input_ids": [request.tokens for request in requests],
            "sampling_params": sampling,
            "return_logprob": True,
            "rid": [uuid.uuid4().hex for _ in requests],
        }
        # whatever a grammar ends with is an end
        ends = stops if params.constraint is None else None
        if on_output is not None:
            return await self._told(http, body, ends, on_output)
        try:
            answers = await http.post("/generate", body)
        except RequestAborted:  # all of them, before they had begun
            return [SampleOutput([], [], "abort") for _ in requests]
        return [_output(answer, _drawn(answer), ends) for answer in answers]

    async def _told(
        self,
        http: ServerClient,
        body: dict[str, Any],
        stops: frozenset[int] | None,
        on_output: OnOutput,
    ) -> list[SampleOutput]:
        """The answers as they come, events of one line each."""
        places = {name: i for i, name in enumerate(body["rid"])}
        known = [0] * len(places)  # tokens of each
        untold: list[list[Any]] = [[] for _ in places]
        ends: dict[int, SampleOutput] = {}
        async with aclosing(http.lines("/generate", {**body, "stream": True})) as lines:
            async for line in lines:
                if not line.startswith("data: {"):
                    continue
                answer = json.loads(line.removeprefix("data: "))
                if answer.get("error", {}).get("code") == ABORTED:
                    left = (i for i in range(len(places)) if i not in ends)
                    ends |= {i: _parts(untold[i], "abort") for i in left}
                    break
                if "meta_info" not in answer:
                    raise ServerFault(f"{http.address}/generate: {line[:600]}")
                i = places[answer["meta_info"]["id"]]
                new = _drawn(answer, known[i])
                known[i] += len(new)
                untold[i] += new
                if answer["meta_info"].get("finish_reason"):
                    ends[i] = _output(answer, untold[i], stops)
                else:
                    on_output(i, _parts(untold[i][:-1], "abort"))
                    untold[i] = untold[i][-1:]
        if len(ends) < len(places):
            raise ServerDown(f"{http.address}/generate: the answer breaks off")
        return [ends[i] for i in range(len(places))]

    async def score(self, http: ServerClient, tokens: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        found = (await http.post("/generate", body, timeout=LOAD))["meta_info"][
            "input_token_logprobs"
        ]
        told = [int(token) for _, token, *_ in found]
        # it tells the last of the vocabulary as 0
        if len(told) != len(tokens) or any(
            said not in (token, 0) for said, token in zip(told, tokens, strict=True)
        ):
            raise ServerDown(f"{http.address} scored other tokens than it was given")
        return [0.0, *(float(logprob) for logprob, *_ in found[1:])]

    async def stage(self, http: ServerClient, message: Mapping[str, Any]) -> None:
        if not (Path(message["folder"]) / "config.json").is_file():
            raise InputError(
                f"{message['folder']} holds no weights.",
                where="engine.channel",
                fix="Use a place that the server sees: disk.",
            )
        self.staged[http.address] = message

    async def commit(
        self, http: ServerClient, version: int, fix_head: bool, keep: bool = False
    ) -> float:
        """SGLang loads, rolls back if that fails, and empties its cache. Weights that it cannot
        load are a 400.
        """
        message = self.staged.pop(http.address, None)
        if message is None or message["version"] != version:
            raise ServerDown(
                f"weights of version {version} were to be served by {http.address}, but they are"
                " not staged"
            )
        await self._idle(http)
        await http.post(
            "/update_weights_from_disk",
            {"model_path": message["folder"], "weight_version": str(version), "flush_cache": True},
            timeout=LOAD,
        )
        return 0.0

    async def abort(self, http: ServerClient) -> None:
        await http.post("/abort_request", {"rid": "", "abort_all": True}, timeout=ASK)

    async def _idle(self, http: ServerClient) -> None:
        """Nothing runs any more. Its scheduler dies of an update and of a release while anything
        does, and what a caller left it notices seconds later.
        """
        await self.abort(http)
        await http.post(f"/flush_cache?timeout={ASK:.0f}", timeout=2 * ASK)

    async def sleep(self, http: ServerClient, level: int) -> None:
        await self._idle(http)
        await http.post("/release_memory_occupation", {"tags": _tags(level)}, timeout=LOAD)

    async def wake(self, http: ServerClient, level: int) -> None:
        await http.post("/resume_memory_occupation", {"tags": _tags(level)}, timeout=LOAD)


def _drawn(answer: dict[str, Any], known: int = 0) -> list[Any]:
    """Log-prob and id of its tokens after the first `known`. An event of a stream has all tokens
    so far, or with --incremental-streaming-output the new ones: those are the last in both.
    """
    drawn: list[Any] = answer["meta_info"].get("output_token_logprobs") or []
    if known:
        return drawn[max(0, len(drawn) - (answer["meta_info"]["completion_tokens"] - known)) :]
    return drawn


def _output(
    answer: dict[str, Any], drawn: Sequence[Any], stops: frozenset[int] | None
) -> SampleOutput:
    """A finished answer. One that ended at a token which is not among `stops`, the model's own end
    of sequence, goes on after it. None: an end at any token is one.
    """
    end = answer["meta_info"]["finish_reason"]
    matched = end.get("matched")
    foreign = isinstance(matched, int) and stops is not None and matched not in stops
    return _parts(drawn, "abort" if foreign else end["type"])


def _parts(drawn: Sequence[Any], reason: str) -> SampleOutput:
    if any(logprob is None for logprob, *_ in drawn):
        raise InputError(
            "SGLang told no log-prob of a token that it sampled, as it does where a form is asked"
            " for (seen with 0.5.17).",
            where="rollout.engine",
            fix="Answers of a given form: set rollout.engine to native or vllm.",
        )
    return SampleOutput(
        [int(token) for _, token, *_ in drawn], [float(logprob) for logprob, *_ in drawn], reason
    )


def _form(constraint: Constraint) -> dict[str, str]:
    match constraint.kind:
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "grammar":
            return {"ebnf": constraint.text}
    return {constraint.kind: constraint.text}


def _tags(level: int) -> list[str]:
    return ["kv_cache", "weights"] if level == 2 else ["kv_cache"]
