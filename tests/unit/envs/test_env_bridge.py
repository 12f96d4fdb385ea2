"""Environments in another interpreter: here this one, with environments that print, raise, hang,
crash, and keep global state.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from reinforge.config.env import EnvConfig
from reinforge.core.env import Action, Call
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.envs.adapters.bridge import EnvBridge
from reinforge.envs.build import EnvMixture, entry_of
from reinforge.rollout.dialogue.environment import EpisodeEnvironment, EpisodeFailure

ODD = """
import os, random, sys, time
assert "torch" not in sys.modules
from reinforge.core.env import Observation, Step
print("printed while imported")
loaded = os.getpid()

class Odd:
    def __init__(self, scale=1.0):
        self.scale = scale
    async def reset(self, row, seed):
        random.seed(seed)
        print("printed")
        said = f"{row.columns['n']} {random.random():.6f}"
        return Observation([{"role": "user", "content": said}], tools=[{"name": "t"}])
    def step(self, action):
        if action.text == "raise": raise ValueError("a sentence")
        if action.text == "hang": time.sleep(1000)
        if action.text == "crash": os.abort()
        if action.text == "nan": return Step(None, float("nan"), done=True)
        if action.text == "where":
            said = f"{os.getpid()} {os.getppid()} {loaded} {'torch' in sys.modules}"
            return Step(Observation([{"role": "user", "content": said}]))
        total = sum(c.arguments["x"] for c in action.calls)
        truncated, metrics = action.stop == "length", {"seed": action.seed}
        return Step(None, self.scale * total, done=True, truncated=truncated, metrics=metrics)
    def close(self): pass
"""


@pytest.fixture
def odd(tmp_path: Path) -> Any:
    (tmp_path / "odd.py").write_text(ODD)
    entry = entry_of(f"{tmp_path}/odd.py:Odd", {"scale": 2.5}, python=sys.executable)
    assert isinstance(entry.make, EnvBridge)
    yield EnvMixture([entry])
    entry.make.stop()


def play(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def action(text: str = "", **more: Any) -> Action:
    return Action(text, [1], text, **more)


def row(n: int) -> Row:
    return Row(str(n), "prompt", {"n": n})


def test_rows_actions_and_answers_pass_through(odd: EnvMixture) -> None:
    async def work() -> None:
        env = odd(row(7))
        seen = await env.reset(row(7), 3)
        assert seen.messages == [{"role": "user", "content": "7 0.237965"}] and seen.tools == [
            {"name": "t"}
        ]
        calls = (Call("f", {"x": 2}, "a"), Call("f", {"x": 4}, "b"))
        step = await env.step(action(calls=calls, seed=2**62 + 1))
        assert (step.reward, step.done, step.truncated, step.metrics) == (
            15.0,
            True,
            False,
            {"seed": 2**62 + 1},
        )
        await env.close()

    play(work())


def test_a_worker_for_each_episode_and_one_import(odd: EnvMixture) -> None:
    async def work() -> None:
        envs = [odd(row(n)) for n in range(3)]
        first = await asyncio.gather(*(env.reset(row(n), 3) for n, env in enumerate(envs)))
        assert [o.messages[0]["content"] for o in first] == [
            "0 0.237965",
            "1 0.237965",
            "2 0.237965",
        ]
        said = [
            (await env.step(action("where"))).observation.messages[0]["content"].split()
            for env in envs
        ]  # type: ignore[union-attr]
        workers, parents, loaded, torch = zip(*said, strict=True)
        assert (
            len(set(workers)) == 3
            and len(set(parents)) == 1
            and set(loaded) == set(parents)
            and set(torch) == {"False"}
        )
        await asyncio.gather(*(env.close() for env in envs))
        await asyncio.sleep(0.2)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)

    play(work())


def test_what_raises_fails_the_episode_and_says_why(odd: EnvMixture) -> None:
    async def work(text: str) -> EpisodeFailure:
        environment = EpisodeEnvironment(odd, row(1), 0, turn_seconds=30)
        await environment.reset()
        with pytest.raises(EpisodeFailure) as failed:
            await environment.step(action(text))
        await environment.close()
        return failed.value

    assert "ValueError: a sentence" in play(work("raise")).why
    assert "died" in play(work("crash")).why
    # JSON has no nan, and a reward must not be one
    assert "Out of range float values" in play(work("nan")).why
    assert play(work("raise")).kind == "error"  # others go on after a crash


def test_one_that_hangs_is_killed_at_its_deadline(odd: EnvMixture) -> None:
    async def work() -> None:
        environment = EpisodeEnvironment(odd, row(1), 0, turn_seconds=None)
        await environment.reset()
        environment.turn_seconds = 0.3
        pid = environment.env.pid  # type: ignore[union-attr]
        began = time.monotonic()
        with pytest.raises(EpisodeFailure) as failed:
            await environment.step(action("hang"))
        await environment.close()
        assert failed.value.kind == "timeout" and time.monotonic() - began < 2.0
        await asyncio.sleep(0.2)
        assert not os.path.exists(f"/proc/{pid}")

    play(work())


def test_what_cannot_be_loaded_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package")
    bridge = EnvBridge(sys.executable, f"{tmp_path}/broken.py:Env")
    with pytest.raises(InputError, match="no_such_package"):
        bridge.worker()
    with pytest.raises(InputError, match="exit code"):
        EnvBridge("/bin/false", "x:y").worker()
    with pytest.raises(InputError, match="no program"):
        EnvBridge(f"{tmp_path}/broken.py", "x:y")


def test_config() -> None:
    cfg = EnvConfig.model_validate(
        {"name": "gem:game:GuessTheNumber-v0-easy", "python": "py", "options": {"game": {}}}
    )
    [entry] = cfg.entries
    assert (entry.name, entry.python) == ("gem:game:GuessTheNumber-v0-easy", "py")
    with pytest.raises(ValueError, match="move them there"):
        EnvConfig.model_validate({"mix": [{"name": "single"}], "python": "py"})
    with pytest.raises(InputError, match="has no option gaem.*Did you mean game"):
        entry_of("gem:game:GuessTheNumber-v0-easy", {"gaem": {}}, python=sys.executable)
