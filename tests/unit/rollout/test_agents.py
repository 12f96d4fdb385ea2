"""Any agent program trains unmodified: what it was answered is what is trained, and whatever it
does harms nobody else.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from helpers import agent_programs as programs
from helpers.chat_server import make_chat_model, until
from helpers.paths import ROOT
from helpers.tiny_runs import DATA, digest, lines, make_config
from helpers.toys import SilentView
from reinforge.build.agent_endpoint import AgentEndpoint
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.data import DataConfig
from reinforge.config.load import load_config
from reinforge.config.model import ModelConfig
from reinforge.core.engine import Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row, Stop
from reinforge.data.chat import Renderer
from reinforge.engines.native import NativeEngine
from reinforge.envs.agent_client import StatusError, make_client
from reinforge.envs.calls import FORMATS
from reinforge.envs.calls.tool_template import ToolTemplate
from reinforge.envs.games import GuessNumber
from reinforge.envs.programs import EndpointAddress, as_program, outcome_of
from reinforge.models.load import load_model
from reinforge.rollout.dialogue.agent_session import AgentModel, AgentSession
from reinforge.rollout.dialogue.agents import AgentPlayer
from reinforge.rollout.dialogue.env_player import EnvPlayer
from reinforge.rollout.dialogue.episode import EpisodeLimits
from reinforge.rollout.dialogue.episodes import EpisodeRollout
from reinforge.rollout.dialogue.lockstep import Lockstep
from reinforge.rollout.journal import Journal
from reinforge.rollout.scoring import RewardScorer

RECIPES = ROOT / "recipes"
ROW = Row("r0", "12+5=", {"answer": "17"})
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {}},
    },
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_chat_model(tmp_path_factory.mktemp("agents") / "model")


@pytest.fixture(scope="module")
def engine(path: str) -> NativeEngine:
    model = load_model(ModelConfig(path=path), None, seed=0)
    return NativeEngine(model, stop_tokens=[2], max_batch=64, kv_gib=0.01, context=512)


class Spy:
    """The engine, and what it was asked and answered."""

    def __init__(self, engine: NativeEngine):
        self.engine = engine
        self.seen = []

    async def generate(self, tokens: Any, params: Sampling, *, key: int, n: int = 1) -> Any:
        found = await self.engine.generate(tokens, params, key=key, n=n)
        self.seen += [(list(tokens), c) for c in found]
        return found


def episodes(
    engine: Any,
    agent: Any,
    *,
    n: int = 3,
    journal: Journal | None = None,
    seconds: float | None = 60.0,
    lockstep: bool = False,
    max_tokens: int = 400,
    max_calls: int = 64,
    new_tokens: int = 12,
    **more: Any,
) -> EpisodeRollout:
    tokenizer = getattr(engine, "engine", engine).model.tokenizer
    renderer = Renderer(tokenizer, DataConfig(source="test"))
    model = AgentModel(
        engine,
        renderer,
        ToolTemplate(FORMATS["hermes"], True),
        EpisodeLimits(max_tokens, max_calls, episode_seconds=seconds),
        seed=0,
        temperature=more.pop("temperature", "override"),
        lockstep=Lockstep() if lockstep else None,
    )
    player = AgentPlayer(
        model,
        as_program(agent),
        AgentEndpoint(tokenizer, max_tokens),
        journal or Journal(None),
        more.pop("on_error", "unscored"),
    )
    scorer = RewardScorer(more.pop("rewards", []), weights={"agent": 1.0})
    return EpisodeRollout(player, scorer, Sampling(new_tokens, 1.0), n=n, component="agent", **more)


def play(rollout: EpisodeRollout, row: Row = ROW, group: str = "g") -> Group:
    async def go() -> Group:
        return await rollout(row, RolloutContext(group))

    return asyncio.run(go())


def same(a: Group, b: Group, bits: float = 0.0) -> bool:
    """`bits`: how far log-probs may be apart, where requests met others in the batch."""
    return [s.uid for s in a.samples] == [s.uid for s in b.samples] and all(
        torch.equal(x.tokens, y.tokens)
        and torch.allclose(x.logprobs, y.logprobs, rtol=0, atol=bits)
        and torch.equal(x.trained, y.trained)
        and x.reward == y.reward
        for x, y in zip(a.samples, b.samples, strict=True)
    )


# ---- what is trained is what was sampled ----


@pytest.mark.parametrize("agent", [programs.guess, programs.guess_sync])
def test_an_unmodified_agent_is_trained_on_the_ids_it_was_answered_with(
    engine: NativeEngine, agent: Any
) -> None:
    spy = Spy(engine)
    group = play(episodes(spy, agent))
    assert len(group.samples) == 3 and len(spy.seen) == 3 * programs.HINTS
    assert len({tuple(s.tokens.tolist()) for s in group.samples}) == 3, (
        "three agents of one prompt drew the same"
    )
    for sample in group.samples:
        tokens = sample.tokens.tolist()
        trained = sample.trained.tolist()
        mine = [(p, c) for p, c in spy.seen if tokens[: len(p) + len(c.tokens)] == p + c.tokens]
        assert len(mine) == programs.HINTS
        wanted = [False] * len(tokens)
        logprobs = [0.0] * len(tokens)
        for prompt, completion in mine:
            wanted[len(prompt) : len(prompt) + len(completion.tokens)] = [True] * len(
                completion.tokens
            )
            logprobs[len(prompt) : len(prompt) + len(completion.tokens)] = completion.logprobs
        assert trained == wanted
        assert sample.logprobs.tolist() == pytest.approx(logprobs, abs=0)
        assert (
            sample.reward is not None
            and 0 < sample.reward < 1
            and sample.rewards == {"agent": sample.reward}
        )
    assert group.metrics["agent/turns"] == 3 and group.metrics["agent/failed"] == 0


def test_an_agent_and_an_environment_that_say_the_same_become_the_same_rows(
    engine: NativeEngine,
) -> None:
    row = Row("r", "guess: ", {"number": 7})
    agents = episodes(engine, programs.guess_number, n=1, new_tokens=16)
    agents.sampling = Sampling(16, 0.0)
    model = agents.player.model  # type: ignore[union-attr]
    player = EnvPlayer(
        engine,
        model.renderer,
        model.tool_template,
        lambda row: GuessNumber(),
        EpisodeLimits(400),
        seed=0,
    )
    played = EpisodeRollout(player, RewardScorer([], weights={"env": 1.0}), Sampling(16, 0.0), n=1)
    [mine], [theirs] = play(agents, row).samples, play(played, row).samples
    assert (
        mine.tokens.tolist() == theirs.tokens.tolist()
        and mine.trained.tolist() == theirs.trained.tolist()
    )
    assert torch.equal(mine.logprobs, theirs.logprobs) and torch.equal(
        mine.versions, theirs.versions
    )
    assert mine.reward == theirs.reward == 0.0 and mine.n_trained >= 5, "five guesses"


def test_draws_depend_on_the_sample_and_the_prompt_alone(engine: NativeEngine) -> None:
    first, again = (play(episodes(engine, programs.guess, lockstep=True)) for _ in range(2))
    assert same(first, again)
    assert not same(first, play(episodes(engine, programs.guess, lockstep=True), group="h"))


def test_branches_are_rows_of_one_episode_and_every_answer_is_trained_once(
    engine: NativeEngine,
) -> None:
    spy = Spy(engine)
    group = play(episodes(spy, programs.crowd, n=2, lockstep=True))
    assert [s.uid for s in group.samples] == [
        f"g#{i}{k}" for i in (0, 1) for k in ("", ".1", ".2", ".3")
    ]
    assert [s.episode for s in group.samples] == ["g#0"] * 4 + ["g#1"] * 4
    assert len(group.episodes) == 2, "branches count once in the statistics of the group"
    sampled = sum(len(c.tokens) for _, c in spy.seen)
    assert len(spy.seen) == 10 and sum(s.n_trained for s in group.samples) == sampled
    for sample in group.samples:
        if not any(sample.tokens.tolist() == p + c.tokens for p, c in spy.seen):
            raise AssertionError("a row that no call ended with")
    assert same(group, play(episodes(engine, programs.crowd, n=2)), bits=1e-4), (
        "the order of calls decides nothing"
    )


def test_a_request_with_n_answers_is_n_rows(engine: NativeEngine) -> None:
    async def agent(client: Any, row: dict[str, Any]) -> float:
        reply = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], n=3, logprobs=True
        )
        assert len({c.message.content for c in reply.choices}) == 3
        assert all(len(c.logprobs.content) for c in reply.choices)
        return 1.0

    group = play(episodes(engine, agent, n=1))
    assert (
        len(group.samples) == 3 and len({len(s.tokens) - s.n_trained for s in group.samples}) == 1
    )


def test_tool_calls_go_out_and_their_results_come_back_into_the_same_row(
    engine: NativeEngine,
) -> None:
    """The model is made to write a call; the agent answers it as the API wants."""
    tokenizer = engine.model.tokenizer
    call = tokenizer(
        'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        add_special_tokens=False,
    )["input_ids"]
    asked: list[list[int]] = []

    class Scripted(Spy):
        async def generate(self, tokens: Any, params: Sampling, *, key: int, n: int = 1) -> Any:
            from reinforge.core.engine import Completion

            asked.append(list(tokens))
            ids = [*call, 2] if len(asked) == 1 else [5, 6, 2]
            return [Completion(ids, [-0.5] * len(ids), [0] * len(ids), Stop.EOS)]

    async def agent(client: Any, row: dict[str, Any]) -> float:
        messages: list[Any] = [{"role": "user", "content": "1+1?"}]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        assert reply.choices[0].finish_reason == "tool_calls" and message.content == "so"
        assert message.tool_calls[0].function.name == "add" and json.loads(
            message.tool_calls[0].function.arguments
        ) == {"a": 1}
        messages += [
            message,
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"},
        ]
        await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        return 1.0

    group = play(episodes(Scripted(engine), agent, n=1))
    assert len(group.samples) == 1 and asked[1][: len(asked[0]) + len(call) + 1] == [
        *asked[0],
        *call,
        2,
    ]
    assert (
        tokenizer.decode(asked[1][len(asked[0]) + len(call) + 1 :])
        == "<|bos|>tool: 2<|eos|><|bos|>assistant: "
    )
    assert group.metrics["agent/calls"] == 1 and group.samples[0].n_trained == len(call) + 4


def test_text_completions_continue_their_ids(engine: NativeEngine) -> None:
    async def agent(client: Any, row: dict[str, Any]) -> float:
        text = "12"
        for _ in range(3):
            reply = await client.completions.create(
                model="m", prompt=text, max_tokens=2, extra_body={"return_token_ids": True}
            )
            text += reply.choices[0].text
            if reply.choices[0].finish_reason != "length":
                break
            text += " "
        return 1.0

    group = play(episodes(engine, agent, n=2))
    assert len(group.samples) == 2
    assert all(s.n_trained == group.metrics["agent/turns"] * 2 for s in group.samples)


# ---- sampling belongs to the trainer ----


def asks(**settings: Any) -> Any:
    async def agent(client: Any, row: dict[str, Any]) -> float:
        reply = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], **settings
        )
        return float(reply.usage.completion_tokens)

    return agent


@pytest.mark.parametrize(
    "setting",
    [
        {"top_p": 0.9},
        {"extra_body": {"top_k": 5}},
        {"extra_body": {"min_p": 0.1}},
        {"frequency_penalty": 1.0},
    ],
)
def test_filters_are_refused(engine: NativeEngine, setting: dict[str, Any]) -> None:
    rollout = episodes(engine, asks(**setting), n=1)
    group = play(rollout)
    assert group.samples[0].reward is None and group.samples[0].stop is Stop.ERROR
    assert "400" in rollout.errors[0]


def test_another_temperature_is_overridden_and_counted_or_refused(engine: NativeEngine) -> None:
    plain, cold = (
        play(episodes(engine, asks(**s), n=2, lockstep=True))
        for s in ({}, {"temperature": 0.0, "top_p": 1.0, "seed": 7})
    )
    assert (
        same(plain, cold)
        and cold.metrics["agent/overridden"] == 1
        and plain.metrics["agent/overridden"] == 0
    )
    refused = episodes(engine, asks(temperature=0.0), n=1, temperature="refuse")
    assert play(refused).samples[0].reward is None and "is what is trained" in refused.errors[0]


def test_a_billion_tokens_are_as_many_as_there_is_room_for(engine: NativeEngine) -> None:
    group = play(episodes(engine, asks(max_tokens=10**9), n=2, new_tokens=7))
    assert all(s.n_trained <= 7 for s in group.samples) and {
        s.reward for s in group.samples
    } <= set(map(float, range(1, 8)))


# ---- agents that fail ----


@pytest.mark.parametrize(
    ("agent", "kind", "why"),
    [
        (programs.crashing, "error", "the agent's own bug"),
        (programs.lazy, "error", "never asked the model"),
        (programs.nonsense, "error", "very good"),
        (programs.hanging, "timeout", "more than"),
        (programs.blocking, "timeout", "more than"),
    ],
)
def test_a_failed_episode_is_unscored_not_0(
    engine: NativeEngine, tmp_path: Path, agent: Any, kind: str, why: str
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    rollout = episodes(
        engine, agent, n=2, seconds=2.0 if kind == "timeout" else 60.0, journal=journal
    )
    group = play(rollout)
    assert [s.reward for s in group.samples] == [None, None] and all(
        s.rewards == {"agent": None} for s in group.samples
    )
    assert rollout.counts[f"failed_{kind}"] == 2 and why in rollout.errors[0]
    assert not engine._busy()
    # whatever it would do now, it has failed
    again = episodes(engine, programs.guess, n=2, journal=Journal(tmp_path / "journal.jsonl"))
    assert same(group, play(again)) and again.counts[f"failed_{kind}"] == 2


def test_an_error_can_stop_the_run(engine: NativeEngine) -> None:
    with pytest.raises(
        InputError, match="the agent failed: ZeroDivisionError: the agent's own bug"
    ):
        play(episodes(engine, programs.crashing, n=1, on_error="raise"))


def test_an_agent_without_reward_leaves_it_to_the_rewards(engine: NativeEngine) -> None:
    from reinforge.rewards.function import FunctionReward

    def length(
        prompts: Any, completions: list[str], transcript: list[Any], **_: Any
    ) -> list[float]:
        assert all(
            t[-1] == {"role": "assistant", "content": c}
            for t, c in zip(transcript, completions, strict=True)
        )
        return [float(len(c)) for c in completions]

    scored = play(
        episodes(engine, programs.silent, n=2, rewards=[FunctionReward("length", length, 1.0)])
    )
    assert all(
        s.reward == s.rewards["length"] and s.rewards["agent"] is None for s in scored.samples
    )
    assert [s.reward for s in play(episodes(engine, programs.silent, n=2)).samples] == [None, None]


def test_a_broken_engine_is_not_the_agents_fault(engine: NativeEngine) -> None:
    class Broken(Spy):
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise MemoryError("no memory")

    with pytest.raises(MemoryError):
        play(episodes(Broken(engine), programs.guess, n=1))


def test_no_room_is_a_failure_of_its_own_kind_and_calls_are_counted(engine: NativeEngine) -> None:
    full = episodes(engine, programs.guess, n=1, max_tokens=24)
    assert (
        play(full).samples[0].reward is None
        and full.counts["failed_length"] == 1
        and "leaves no room" in full.errors[0]
    )
    busy = episodes(engine, programs.guess, n=1, max_calls=2)
    assert play(busy).samples[0].reward is None and "at most 2 answers" in busy.errors[0]


# ---- keys ----


def test_keys_open_one_episode_each_and_only_while_it_runs(engine: NativeEngine) -> None:
    seen: list[EndpointAddress] = []
    errors: list[str] = []

    def agent(client: Any, row: dict[str, Any]) -> float:
        seen.append(EndpointAddress(str(client.base_url), client.api_key))
        for key in ("", "none", secrets.token_urlsafe(32)):
            stranger = openai.OpenAI(base_url=client.base_url, api_key=key or "x", max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return 1.0

    def late() -> None:
        client = openai.OpenAI(base_url=seen[0].base_url, api_key=seen[0].api_key, max_retries=0)
        try:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        except openai.AuthenticationError as error:
            errors.append(str(error))

    async def go() -> Group:
        rollout = episodes(engine, agent, n=3)
        group = await rollout(ROW, RolloutContext("g"))
        await asyncio.to_thread(late)
        return group

    group = asyncio.run(go())
    assert len({a.api_key for a in seen}) == 3 and len({a.base_url for a in seen}) == 1
    assert errors and "401" in errors[0]
    assert [s.reward for s in group.samples] == [1.0] * 3 and all(
        s.n_trained > 0 for s in group.samples
    )
    until(lambda: not any(t.name == "agent endpoint" for t in threading.enumerate()))


def test_an_agent_that_gives_up_on_a_call_costs_nothing_and_is_not_trained_on_it(
    engine: NativeEngine,
) -> None:
    async def agent(client: Any, row: dict[str, Any]) -> float:
        task = asyncio.ensure_future(
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "long"}]
            )
        )
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.sleep(0.3)
        reply = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )
        return float(reply.usage.completion_tokens)

    class Slow(Spy):
        async def generate(self, tokens: Any, params: Sampling, *, key: int, n: int = 1) -> Any:
            await asyncio.sleep(0 if params.max_new_tokens == 3 else 3600)
            return await super().generate(tokens, params, key=key, n=n)

    [sample] = play(episodes(Slow(engine), agent, n=1)).samples
    assert sample.n_trained == sample.reward


# ---- programs of their own ----

PROGRAM = """
import json, os, sys
from openai import OpenAI
row = json.load(open(sys.argv[1])) if len(sys.argv) > 1 else json.load(sys.stdin)
messages = [{"role": "user", "content": row["prompt"]}]
reply = OpenAI().chat.completions.create(model="gpt-4o", messages=messages)
print("thinking aloud: 5")
reward = float(len(reply.choices[0].message.content))
print(json.dumps({"reward": reward, "answer": int(row["answer"])}))
"""


def test_a_command_is_an_agent(engine: NativeEngine, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    spy = Spy(engine)
    group = play(episodes(spy, ["python", str(tmp_path / "agent.py")], n=1))
    [(prompt, completion)] = spy.seen
    [sample] = group.samples
    assert sample.tokens.tolist() == prompt + completion.tokens and sample.n_trained == len(
        completion.tokens
    )
    assert (
        sample.reward
        == len(engine.model.tokenizer.decode(completion.tokens, skip_special_tokens=True))
        and group.metrics["agent/answer"] == 17
    )
    by_file = play(episodes(engine, [sys.executable, str(tmp_path / "agent.py"), "{row}"], n=1))
    assert same(group, by_file)


@pytest.mark.parametrize(
    ("code", "kind", "why"),
    [
        ("raise SystemExit('out of luck')", "error", "ended with code 1: out of luck"),
        ("import time; time.sleep(600)", "timeout", "more than"),
    ],
)
def test_a_command_that_fails(engine: NativeEngine, code: str, kind: str, why: str) -> None:
    rollout = episodes(engine, ["python", "-c", code], n=1, seconds=3.0)
    assert play(rollout).samples[0].reward is None
    assert rollout.counts[f"failed_{kind}"] == 1 and why in rollout.errors[0]


def test_what_agents_may_return() -> None:
    assert outcome_of(None).reward is None and outcome_of(2).reward == 2.0
    for bad in ("1", float("nan"), {"reward": "x"}, [1.0], {"reward": 1.0, "note": "text"}):
        with pytest.raises(TypeError):
            outcome_of(bad)


# ---- the small client ----


@contextmanager
def one_line(engine: NativeEngine) -> Iterator[tuple[AgentSession, EndpointAddress]]:
    """An endpoint with one open episode, and its engine in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    player = episodes(engine, programs.guess).player
    assert isinstance(player, AgentPlayer)
    line = AgentSession(player.model, ROW, "u", Sampling(8, 1.0))

    async def start() -> EndpointAddress:
        return player.endpoint.open(line)

    try:
        yield line, asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:

        async def stop() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def test_our_own_client_has_the_same_shape(engine: NativeEngine) -> None:
    with one_line(engine) as (line, address):
        client = make_client(address.base_url, address.api_key, asynchronous=False, small=True)
        reply = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
        message = reply.choices[0].message
        assert (
            line.recording.turns[-1].messages[-1]["content"] == message.content
            and reply.usage.completion_tokens > 0
        )
        stream = client.chat.completions.create(
            messages=[{"role": "user", "content": "hi"}, message, {"role": "user", "content": "?"}],
            stream=True,
        )
        assert "".join(c.choices[0].delta.content or "" for c in stream) == line.last.content  # type: ignore[union-attr]
        assert line.recording.turns[-1].parent is line.recording.turns[0]
        assert client.models.list().data[0].id == "policy"
        with pytest.raises(StatusError, match="400: top_p") as refused:
            client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], top_p=0.5)
        assert refused.value.code == "unsupported_parameter"

        async def later() -> tuple[str, str]:
            other = make_client(address.base_url, address.api_key, asynchronous=True, small=True)
            whole = await other.completions.create(prompt="12", max_tokens=3)
            chunks = [
                c.choices[0].text
                async for c in await other.completions.create(
                    prompt="12", max_tokens=3, stream=True
                )
            ]
            return whole.choices[0].text, "".join(chunks)

        texts = asyncio.run(later())
        assert all(texts) and texts[0] != texts[1], "a prompt that comes again is drawn anew"


# ---- whole runs ----


def run(path: str, folder: Path, name: str, *overrides: str, agent: Any = None) -> Any:
    cfg = make_config(
        path,
        folder,
        name,
        "grpo",
        *overrides,
        rewards=[],
        agent={"lockstep": True, **(agent or {"name": "helpers.agent_programs:guess"})},
        rollout={"max_new_tokens": 6, "kv_gib": 0.01},
    )
    train_config(cfg, CallerObjects(data=DATA), SilentView())
    return cfg


def test_the_recipe_runs(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)
    cfg = load_config(
        RECIPES / "agent_calculator.yaml",
        [
            f"model.path={path}",
            "model.device=cpu",
            f"run.dir={tmp_path / 'run'}",
            "train.steps=1",
            "train.prompts_per_step=2",
            "data.eval.size=2",
            "agent.max_tokens=500",
            "rollout.max_new_tokens=8",
            "rollout.kv_gib=0.01",
        ],
    )
    train_config(cfg, view=SilentView())
    [first, last] = [line for line in lines(cfg) if "eval/accuracy" in line]
    assert (
        first["eval/n"] == 2 and first["eval/accuracy"] == 0 and first["eval/agent/used_tools"] == 0
    ), "random weights call nothing"
    step = next(line for line in lines(cfg) if "agent/turns" in line)
    assert (
        last["eval/agent/turns"] == step["agent/turns"] == 1
        and step["agent/failed"] == 0
        and step["reward/mean"] == 0
    )


def test_two_runs_are_the_same_to_the_bit(path: str, tmp_path: Path) -> None:
    one, two = (run(path, tmp_path, name) for name in ("one", "two"))
    assert digest(one) == digest(two)
    assert digest(run(path, tmp_path, "other", "run.seed=1")) != digest(one)
    rows = lines(one)
    assert all(
        r["agent/turns"] == 3 and r["agent/failed"] == 0 and 0 < r["reward/mean"] < 1
        for r in rows
        if "agent/turns" in r
    )
    assert any(r.get("train/grad_norm", 0) > 0 for r in rows)


@pytest.mark.long
def test_an_agent_learns_what_the_environment_teaches(path: str, tmp_path: Path) -> None:
    """Two turns for a reward that any model can learn: both runs go from about one half to nearly
    all of it.
    """
    curves = {}
    for name, section in (
        ("agent", {"agent": "helpers.agent_programs:plain_twice"}),
        ("env", {"env": "helpers.agent_programs:PlainTwice"}),
    ):
        cfg = make_config(
            path,
            tmp_path,
            name,
            "grpo",
            "train.steps=20",
            "train.learning_rate=1e-2",
            "algorithm.group_size=8",
            rewards=[],
            rollout={"max_new_tokens": 6, "kv_gib": 0.02},
            **section,
        )
        train_config(cfg, CallerObjects(data=DATA), SilentView())
        curves[name] = [line["reward/mean"] for line in lines(cfg) if "reward/mean" in line]
    first, last = (
        {k: sum(c[part]) / 3 for k, c in curves.items()} for part in (slice(0, 3), slice(-3, None))
    )
    assert all(first[k] < 0.65 and last[k] > 0.85 for k in curves), curves


def test_a_run_that_was_cut_goes_on_exactly(path: str, tmp_path: Path) -> None:
    whole = run(path, tmp_path, "whole", "run.checkpoint.every=1")
    cut = make_config(
        path,
        tmp_path,
        "cut",
        "grpo",
        "run.checkpoint.every=1",
        rewards=[],
        agent={"name": "helpers.agent_programs:guess", "lockstep": True},
        rollout={"max_new_tokens": 6, "kv_gib": 0.01},
    )
    calls = 0

    class Cut(SilentView):
        def update(self, step: int, metrics: dict[str, float]) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_config(cut, CallerObjects(data=DATA), Cut())
    train_config(cut, CallerObjects(data=DATA), SilentView())
    assert digest(cut) == digest(whole)


def test_a_step_that_is_done_again_does_not_run_the_agents_again(
    engine: NativeEngine, tmp_path: Path
) -> None:
    first = play(episodes(engine, programs.crowd, journal=Journal(tmp_path / "j.jsonl")))
    spy = Spy(engine)
    again = play(episodes(spy, programs.crowd, journal=Journal(tmp_path / "j.jsonl")))
    assert same(first, again) and spy.seen == []
    other = play(
        episodes(spy, programs.crowd, journal=Journal(tmp_path / "j.jsonl")),
        Row("r0", "1+1=", {"answer": "2"}),
    )
    assert spy.seen and not same(first, other), "a record is bound to the row it was made for"


def test_a_wave_waits_for_everybody_who_runs() -> None:
    order: list[str] = []

    async def agent(lockstep: Lockstep, uid: str, pause: float, turns: int) -> None:
        lockstep.enter(uid)
        for turn in range(turns):
            await asyncio.sleep(pause)
            async with lockstep.turn(uid, [turn]):
                order.append(f"{uid}{turn}")
                await asyncio.sleep(pause / 2)
        lockstep.leave(uid)

    async def go() -> None:
        lockstep = Lockstep()
        await asyncio.gather(
            agent(lockstep, "b", 0.0, 3),
            agent(lockstep, "c", 0.03, 1),
            agent(lockstep, "a", 0.06, 2),
        )

    asyncio.run(go())
    assert order == ["a0", "b0", "c0", "a1", "b1", "b2"]


def test_config(path: str, tmp_path: Path) -> None:
    made = make_config(path, tmp_path, rewards=[], agent="helpers.agent_programs:guess").agent
    assert made is not None and made.name == "helpers.agent_programs:guess" and made.command is None
    assert make_config(path, tmp_path, rewards=[], agent=["python", "x.py"]).agent.command == [
        "python",
        "x.py",
    ]  # type: ignore[union-attr]
    for bad in (
        {"agent": "guess"},
        {"agent": {}},
        {"agent": "a:b", "env": "single"},
        {"agent": {"name": "a:b", "command": ["c"]}},
    ):
        with pytest.raises(InputError):
            make_config(path, tmp_path, rewards=[], **bad)
    with pytest.raises(InputError, match="samples nothing"):
        make_config(path, tmp_path, "sft", "sft", agent="a:b")


def test_with_exact_log_probs_the_order_of_requests_changes_not_a_bit(
    path: str, tmp_path: Path
) -> None:
    """Several calls at once, no lockstep: whoever comes first, the run is the same."""
    agent = {"name": "helpers.agent_programs:crowd", "lockstep": False}
    one, two = (
        run(path, tmp_path, name, "model.exact=true", "train.steps=2", agent=agent)
        for name in ("one", "two")
    )
    assert digest(one) == digest(two)
    assert all(r["agent/rewritten"] == 3 for r in lines(one) if "agent/rewritten" in r)
