"""What an SGLang server is told, and what is particular to it. What its dialect owes is in
test_dialects.py, over a stub.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.stub_servers import StubServers, stub_of, until
from helpers.toys import EOS, VOCABULARY, run
from reinforge.config.engine import EngineConfig
from reinforge.core.constraint import Constraint
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Stop
from reinforge.engines.served.dialect import SampleOutput, SampleRequest, ServerSetup
from reinforge.engines.served.http import RequestAborted
from reinforge.engines.served.sglang import Sglang

PROMPT = [5, 9, 33]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[StubServers]:
    made = StubServers(stub_of("sglang"), tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_command(tmp_path: Path, device: str) -> None:
    setup = ServerSetup(
        kind="sglang",
        cfg=EngineConfig(memory=0.3, args={"enable-torch-compile": False}),
        model="/m",
        folder=tmp_path,
        dtype="float32",
        device=device,
        context=4096,
        vocabulary=100,
        longest=1280,
    )
    found = Sglang().command(setup, "py", 5)
    asked = dict(pairwise(found))
    assert found[:2] == ["py", "-c"] and asked["--host"] == "127.0.0.1" and asked["--port"] == "5"
    assert asked["--dtype"] == "float32" and asked["--context-length"] == "1288"
    assert asked["--mem-fraction-static"] == "0.3"
    assert "--enable-deterministic-inference" in found
    assert ("--enable-memory-saver" in found) == (device == "cuda")
    assert ("--device" in found) == (device == "cpu")
    assert not any("torch-compile" in word for word in found)  # it knows no --no-enable-...
    environment = Sglang().environment(setup, "k")
    assert ("SGLANG_USE_CPU_ENGINE" in environment) == (device == "cpu")


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (None, {}),
        (Constraint("regex", "a|b"), {"regex": "a|b"}),
        (Constraint("json_schema", '{"a": 1}'), {"json_schema": '{"a": 1}'}),
        (Constraint("json_object"), {"json_schema": '{"type": "object"}'}),
        (Constraint("grammar", 'root ::= "a"'), {"ebnf": 'root ::= "a"'}),
    ],
)
def test_the_form_of_an_answer_in_its_words(
    constraint: Constraint | None, words: dict[str, str]
) -> None:
    asked: list[dict[str, Any]] = []

    class Http:
        async def post(self, path: str, body: dict[str, Any]) -> list[Any]:
            asked.append(body)
            return []

    params = Sampling(4, constraint=constraint)
    run(Sglang().generate(Http(), [SampleRequest([1], 2, 4)], params, frozenset()))  # type: ignore[arg-type]
    [sent] = asked[0]["sampling_params"]
    forms = {"regex", "json_schema", "ebnf", "structural_tag"}
    assert {name: value for name, value in sent.items() if name in forms} == words


def test_ends_are_ours_and_not_the_models(servers: StubServers) -> None:
    """SGLang always ends at the end of sequence of the model's configuration too, unless it is to
    end at no token at all.
    """
    mine = next(token for token in range(3, VOCABULARY) if token not in PROMPT)
    engine = servers.engine(stop_tokens=[mine])
    found = run(engine.generate(PROMPT, Sampling(100), key=1, n=64))
    for done in found:
        assert mine not in done.tokens[:-1]
        assert (done.stop is Stop.EOS) == (done.tokens[-1] == mine)
        assert done.stop is Stop.EOS or len(done.tokens) == 100
    assert any(done.stop is Stop.EOS for done in found)
    assert any(EOS in done.tokens for done in found)


def test_the_whole_context_is_ours(servers: StubServers) -> None:
    """Though SGLang keeps some of what it is told for itself, and takes no prompt that long."""
    engine = servers.engine()
    context = engine.setup.context
    for size in (1, context - 1):
        prompt = [5 + i % 20 for i in range(size)]
        [done] = run(engine.generate(prompt, Sampling(context - size, ignore_eos=True), key=1))
        assert len(done.tokens) == context - size


@pytest.mark.parametrize("then", ["update", "sleep"])
def test_what_was_left_is_ended_first(servers: StubServers, then: str) -> None:
    """SGLang notices seconds later that a caller is gone, and dies of an update meanwhile."""
    engine = servers.engine(device="cuda", sleep="cache")
    servers.hold.touch()

    async def work() -> None:
        await engine.update(servers.weights, 1)
        asked = Sampling(60, ignore_eos=True)
        task = asyncio.ensure_future(engine.generate(PROMPT, asked, key=1, n=2))
        await until(engine, "held", 2)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if then == "update":
            await engine.update(servers.weights, 2)
        else:
            await engine.sleep()
        assert engine.restarts == 0 and engine.replicas[0].up

    run(work())


@pytest.mark.parametrize("told", [False, True])
def test_aborted_before_it_had_begun(told: bool) -> None:
    """Then SGLang answers the whole request with 499."""

    class Http:
        address = "here"

        async def post(self, path: str, body: dict[str, Any]) -> list[Any]:
            raise RequestAborted("was aborted")

        async def lines(self, path: str, body: dict[str, Any]) -> AsyncGenerator[str, None]:
            drawn = [[-0.5, 7, None], [-0.25, 8, None]]
            about = {"id": body["rid"][1], "finish_reason": None, "completion_tokens": 2}
            yield f"data: {json.dumps({'meta_info': {**about, 'output_token_logprobs': drawn}})}"
            yield f"data: {json.dumps({'error': {'message': 'was aborted', 'code': 499}})}"
            yield "data: [DONE]"

    heard: list[tuple[int, SampleOutput]] = []
    asked = [SampleRequest([1], 2, 4), SampleRequest([1], 3, 4)]
    found = run(
        Sglang().generate(
            Http(),  # type: ignore[arg-type]
            asked,
            Sampling(4),
            frozenset({2}),
            (lambda *new: heard.append(new)) if told else None,
        )
    )
    nothing = SampleOutput([], [], "abort")
    assert heard == ([(1, SampleOutput([7], [-0.5], "abort"))] if told else [])
    assert found == [nothing, SampleOutput([8], [-0.25], "abort") if told else nothing]


def test_a_token_without_log_prob_is_refused() -> None:
    """The real server did so under a grammar. What is trained on must be known."""

    class Http:
        address = "here"

        async def post(self, path: str, body: dict[str, Any]) -> list[Any]:
            drawn = [[-0.5, 7, None], [None, 8, None]]
            end = {"finish_reason": {"type": "stop"}, "completion_tokens": 2}
            return [{"meta_info": {**end, "output_token_logprobs": drawn}}]

    form = Sampling(4, constraint=Constraint("regex", "[0-9]"))
    with pytest.raises(InputError, match=r"rollout\.engine.*no log-prob.*native or vllm"):
        run(Sglang().generate(Http(), [SampleRequest([1], 2, 4)], form, frozenset({2}), None))  # type: ignore[arg-type]
