"""Adapters that need no library beside ours: TRL, NeMo-RL and tinker classes, reasoning-gym,
chance, opponents, agents as environments.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reinforge.core.engine import Completion, Engine, Sampling
from reinforge.core.env import Action, Call, Observation, RolloutContext, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row, Stop
from reinforge.envs.adapters.endpoint import AgentGate, run
from reinforge.envs.adapters.opponents import moves_in, opponent_of
from reinforge.envs.adapters.random_state import RandomState
from reinforge.envs.build import EnvMixture, entry_of
from reinforge.envs.calls.tool_template import ToolTemplate
from reinforge.rollout.dialogue.env_player import EnvPlayer
from reinforge.rollout.dialogue.episode import EpisodeLimits


def action(text: str = "", **more: Any) -> Action:
    return Action(text, [1], text, **more)


async def called(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def play(
    name: str, options: dict[str, Any], row: Row, actions: list[Action], seed: int = 0
) -> tuple[Observation, list[Step]]:
    async def work() -> tuple[Observation, list[Step]]:
        env = EnvMixture([entry_of(name, options)])(row)
        first = await called(env.reset(row, seed))
        steps = [await called(env.step(a)) for a in actions]
        await called(env.close())
        return first, steps

    return asyncio.run(work())


TRL = """
class Shelf:
    def __init__(self, size=3):
        self.size, self.items = size, []
    def reset(self, prompt=None, start=None, **columns):
        self.items = list(start)
        return f" There are {len(self.items)}."
    def put(self, item: str, count: int = 1) -> str:
        '''Puts an item on the shelf.

        Args:
            item: What to put.
            count: How many.
        '''
        if len(self.items) + count > self.size: raise ValueError("full")
        self.items += [item] * count
        return f"now {len(self.items)}"
    async def look(self) -> list[str]:
        '''Shows the shelf.'''
        return self.items
    def _hidden(self): ...
    def get_reward(self) -> float:
        return len(self.items) / self.size

def turns(completions, environments, start, **kwargs):
    every = zip(completions, environments, start)
    return [10.0 * len(c) + len(e.items) - len(s) for c, e, s in every]
"""


def test_trl_environment_factory(tmp_path: Path) -> None:
    (tmp_path / "shelf.py").write_text(TRL)
    row = Row("0", "Fill it.", {"start": ["a"]})
    acts = [
        action(calls=[Call("put", {"item": "b"}, "x"), Call("look", {}, "y")]),
        action(calls=[Call("put", {"item": "c", "count": 5}, "z"), Call("drop", {}, "w")]),
        action("done"),
    ]
    first, steps = play(
        f"trl:{tmp_path}/shelf.py:Shelf",
        {"make": {"size": 4}, "rewards": [f"{tmp_path}/shelf.py:turns"]},
        row,
        acts,
    )
    assert first.messages == [{"role": "user", "content": "Fill it. There are 1."}]
    assert [t["function"]["name"] for t in first.tools or []] == ["look", "put"]
    assert steps[0].observation is not None and [
        m["content"] for m in steps[0].observation.messages
    ] == ["now 2", '["a", "b"]']
    assert (
        steps[1].observation is not None and '"full"' in steps[1].observation.messages[0]["content"]
    )
    assert "there is no tool drop" in steps[1].observation.messages[1]["content"]
    # get_reward: 2 of 4; turns: 3 assistant turns and 4 answers of tools, one item more than at the
    # start
    assert steps[2].done and steps[2].reward == 0.5 + 70.0 + 1.0


def test_trl_tools_have_the_schema_that_trl_gives_the_model(tmp_path: Path) -> None:
    from transformers.utils import get_json_schema

    (tmp_path / "shelf.py").write_text(TRL)
    entry = entry_of(f"trl:{tmp_path}/shelf.py:Shelf", {})
    env: Any = entry.make()
    first = asyncio.run(env.reset(Row("0", "x", {"start": []}), 0))
    wanted = get_json_schema(env.env.put)["function"]
    [ours] = [t["function"] for t in first.tools if t["function"]["name"] == "put"]
    assert (
        ours["description"] == wanted["description"]
        and ours["parameters"]["required"] == wanted["parameters"]["required"]
    )
    for name, field in wanted["parameters"]["properties"].items():
        mine = ours["parameters"]["properties"][name]
        assert (mine["type"], mine["description"]) == (field["type"], field["description"])


NEMO = """
import torch
class Halving:
    def __init__(self, cfg): self.goal = cfg["goal"]
    def step(self, message_log_batch, metadata):
        [log], [meta] = message_log_batch, metadata
        meta["left"] //= 2
        done = meta["left"] <= self.goal
        seen = [m["role"] for m in log]
        said = {"role": "environment", "content": f"{meta['left']} {len(seen)}"}
        reward = torch.tensor([1.0 if done else 0.25])
        return ([said], [meta], [None], reward, torch.tensor([done]), None)
    def global_post_process_and_metrics(self, batch): return batch, {}
    def shutdown(self): pass
"""


def test_nemo_rl_class(tmp_path: Path) -> None:
    (tmp_path / "halving.py").write_text(NEMO)
    columns = {"extra_env_info": {"left": 8}}
    first, steps = play(
        f"nemo_rl:{tmp_path}/halving.py:Halving",
        {"cfg": {"goal": 2}},
        Row("0", "go", columns),
        [action("a"), action("b")],
    )
    assert first.messages == [{"role": "user", "content": "go"}]
    assert steps[0] == Step(Observation([{"role": "user", "content": "4 2"}]), 0.25)
    assert steps[1].reward == 1.0 and steps[1].done
    assert columns == {"extra_env_info": {"left": 8}}  # the row is not the episode's to write in


TINKER = """
from types import SimpleNamespace as N
class Count:
    def __init__(self, row, base): self.ids, self.turns = [base, base + 1], 0
    async def initial_observation(self): return self.ids, ["stop"]
    async def step(self, action):
        self.turns += 1
        self.ids = self.ids + action + [7, 7] if self.turns == 1 else [5, 6]
        return N(
            reward=float(sum(action)), episode_done=self.turns == 3,
            next_observation=self.ids, next_stop_condition=[], metrics={"n": self.turns},
        )
"""


class Scripted:
    def __init__(self, turns: list[list[int]]):
        self.turns = turns

    async def generate(
        self, tokens: list[int], params: Sampling, *, key: int, n: int = 1
    ) -> list[Completion]:
        ids = self.turns.pop(0)
        return [Completion(ids, [-1.0] * len(ids), [0] * len(ids), Stop.EOS)]


def test_tinker_class_speaks_tokens(tmp_path: Path) -> None:
    """A prompt that goes on from the row stays in it; one that does not begins the next.

    Trained are the sampled ids alone.
    """
    (tmp_path / "count.py").write_text(TINKER)
    make = EnvMixture([entry_of(f"tinker:{tmp_path}/count.py:Count", {"make": {"base": 10}})])
    renderer: Any = SimpleNamespace(decode=str, template=None, chat=False)
    player = EnvPlayer(
        cast(Engine, Scripted([[1, 2], [3], [4]])),
        renderer,
        ToolTemplate(),
        make,
        EpisodeLimits(100, 5),
        seed=0,
    )
    episode = asyncio.run(player.play(Row("0", "x"), RolloutContext("g"), "g#0", Sampling(8, 1.0)))
    assert episode.failed is None and episode.turns == 3
    assert [t.tokens for t in episode.tracks] == [[10, 11, 1, 2, 7, 7, 3], [5, 6, 4]]
    rows = [t.sample("g#0", group="g", episode="g#0") for t in episode.tracks]
    assert [row.trained.tolist() for row in rows] == [(row.versions >= 0).tolist() for row in rows]
    assert [row.trained.tolist() for row in rows] == [
        [False, False, True, True, False, False, True],
        [False, False, True],
    ]
    assert (
        episode.tracks[0].rewards == {3: 3.0, 6: 3.0}
        and episode.reward == 4.0
        and episode.metrics == {"n": 3.0}
    )


def test_reasoning_gym_attempts() -> None:
    pytest.importorskip("reasoning_gym")
    options = {"attempts": 3, "cost": 0.25, "task": {"min_terms": 2, "max_terms": 2}}
    first, _ = play("reasoning_gym:chain_sum", options, Row("0", "x"), [], seed=9)
    again, _ = play("reasoning_gym:chain_sum", options, Row("1", "y"), [], seed=9)
    other, _ = play("reasoning_gym:chain_sum", options, Row("0", "x"), [], seed=10)
    question = first.messages[0]["content"]
    assert again == first and other != first
    a, sign, b = question.rpartition(": ")[2].split(" =")[0].split()
    answer = int(a) + int(b) if sign == "+" else int(a) - int(b)
    _, steps = play(
        "reasoning_gym:chain_sum",
        options,
        Row("0", "x"),
        [action("nothing"), action(str(answer))],
        seed=9,
    )
    assert (
        not steps[0].done
        and steps[1].done
        and steps[1].reward == 0.75
        and steps[1].metrics == {"solved": 1.0, "attempts": 2}
    )
    _, steps = play(
        "reasoning_gym:chain_sum", options, Row("0", "x"), [action("?", last=True)], seed=9
    )
    assert steps[0].done and steps[0].reward is not None and steps[0].reward < 0.5


def test_chance_is_each_episodes_own() -> None:
    random.seed(123)
    before = random.getstate()
    a = RandomState(1)
    b = RandomState(1)
    drawn: list[list[float]] = [[], []]
    for which in (0, 1, 1, 0, 0, 1):
        with (a, b)[which]:
            drawn[which].append(random.random())
    alone = random.Random(1)
    assert drawn[0] == drawn[1] == [alone.random() for _ in range(3)]
    assert random.getstate() == before


def test_opponents(tmp_path: Path) -> None:
    board = "Moves so far: [1]\nAvailable Moves: '[3]', '[5]', '[8]'\nyour turn"
    assert moves_in(board) == ["[3]", "[5]", "[8]"]
    assert opponent_of("first")(board, random.Random(0)) == "[3]"
    drawn = [opponent_of("random")(board, random.Random(s)) for s in range(60)]
    assert set(drawn) == {"[3]", "[5]", "[8]"} and drawn == [
        opponent_of("random")(board, random.Random(s)) for s in range(60)
    ]
    (tmp_path / "them.py").write_text("def last(seen, rng): return seen.split()[-1]")
    assert opponent_of(f"{tmp_path}/them.py:last")(board, random.Random(0)) == "turn"
    with pytest.raises(ValueError, match="no moves"):
        moves_in("nothing here")
    with pytest.raises(InputError, match="no opponent"):
        opponent_of("clever")


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_is_an_environment(stream: bool) -> None:
    """A program that asks a model through the OpenAI client: what it asks are observations, what
    the model says are its answers.
    """
    openai = pytest.importorskip("openai")

    async def ask(client: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
        made = await client.chat.completions.create(
            model="m",
            messages=messages,
            stream=stream,
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
        if not stream:
            return made.choices[0].message.model_dump(exclude_none=True)
        parts = [c.choices[0].delta async for c in made if c.choices]
        calls = [c.model_dump(exclude={"index"}) for p in parts for c in p.tool_calls or []]
        said = {"role": "assistant", "content": "".join(p.content or "" for p in parts)}
        return {**said, "tool_calls": calls} if calls else said

    async def agent(url: str) -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": [{"type": "text", "text": "begin"}]}
            ]
            messages.append(await ask(client, messages))
            call = messages[-1]["tool_calls"][0]["function"]
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": "id1",
                    "content": f"{call['name']}({call['arguments']})",
                }
            )
            messages.append(await ask(client, messages))
            messages.append({"role": "user", "content": "more"})
            messages.append(await ask(client, messages))
            return f"{messages[-3]['content']}|{messages[-1].get('content', '')}|"

    async def work() -> None:
        turnstile = AgentGate()
        task = run(agent(await turnstile.open()))
        first = await turnstile.turn(task)
        assert (
            first is not None
            and first.messages == [{"role": "user", "content": "begin"}]
            and first.tools is not None
        )
        turnstile.answer(action("thinking", calls=[Call("f", {"x": 1}, "id1")]))
        second = await turnstile.turn(task)
        assert second is not None and [m["content"] for m in second.messages] == ['f({"x": 1})']
        turnstile.over = True  # that was the last turn: further requests get nothing
        turnstile.answer(action("final"))
        assert await turnstile.turn(task) is None
        assert task.result() == "final||"
        await turnstile.close()

    asyncio.run(work())


def test_an_agent_that_rewrites_history_fails() -> None:
    async def work() -> None:
        turnstile = AgentGate()
        never: asyncio.Task[Any] = run(asyncio.sleep(60))
        loop = asyncio.get_running_loop()
        turnstile.asked.put_nowait(
            ({"messages": [{"role": "user", "content": "a"}]}, loop.create_future())
        )
        await turnstile.turn(never)
        turnstile.answer(action("b"))
        turnstile.asked.put_nowait(
            ({"messages": [{"role": "user", "content": "summary"}]}, loop.create_future())
        )
        with pytest.raises(RuntimeError, match="rewrote"):
            await turnstile.turn(never)
        never.cancel()

    asyncio.run(work())


def test_names_that_do_not_exist() -> None:
    with pytest.raises(InputError, match=r"textarena, gem, openenv"):
        entry_of("textarenas", {})
    with pytest.raises(InputError, match="has no option plyer.*player"):
        entry_of("textarena:TicTacToe-v0", {"plyer": 1})
