"""Adapters against the libraries themselves.

A library that is installed here is used here; one that has an interpreter of its own is used
through it: set REINFORGE_PYTHON_GEM, _OPENENV, _VERIFIERS, _TEXTARENA or _GYMNASIUM to its path.
Otherwise its tests are skipped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import ROOT
from reinforge.core.env import Action, Env, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.envs.adapters.bridge import EnvBridge
from reinforge.envs.build import EnvMixtureEntry, entry_of

RECIPES = ROOT / "recipes" / "envs"


@pytest.fixture
def made() -> Iterator[list[EnvMixtureEntry]]:
    entries: list[EnvMixtureEntry] = []
    yield entries
    for entry in entries:
        if isinstance(entry.make, EnvBridge):
            entry.make.stop()


def entry(
    made: list[EnvMixtureEntry], name: str, options: dict[str, Any] | None = None
) -> EnvMixtureEntry:
    library = name.partition(":")[0]
    python = os.environ.get(f"REINFORGE_PYTHON_{library.upper()}")
    if python is None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    made.append(entry_of(name, options or {}, python=python))
    return made[-1]


def action(text: str, seed: int = 0) -> Action:
    return Action(text, [1], text, seed=seed)


async def called(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def begin(
    entry: EnvMixtureEntry, seed: int, row: Row | None = None
) -> tuple[Env, Observation]:
    env = entry.make(**entry.options)
    return env, await called(env.reset(row or Row("0", "ignored"), seed))


async def episode(
    entry: EnvMixtureEntry, texts: list[str], seed: int, row: Row | None = None
) -> list[Step]:
    env, _ = await begin(entry, seed, row)
    steps: list[Step] = []
    for text in texts:
        steps.append(await called(env.step(action(text))))
        if steps[-1].done:
            break
    await called(env.close())
    return steps


def heard(step: Step) -> str:
    assert step.observation is not None
    return str(step.observation.messages[0]["content"])


def search(low: int, high: int, wrap: str, up: str) -> Any:
    """Plays a guessing game by halving."""

    async def work(entry: EnvMixtureEntry, seed: int) -> tuple[list[int], Step]:
        env, _ = await begin(entry, seed)
        a = low
        b = high
        guesses = []
        while True:
            guesses.append((a + b) // 2)
            step = await called(env.step(action(wrap.format(guesses[-1]))))
            if step.done:
                await called(env.close())
                return guesses, step
            a, b = (guesses[-1] + 1, b) if up in heard(step) else (a, guesses[-1] - 1)

    return work


# ---- TextArena ----


def test_textarena_guess_the_number(made: list[EnvMixtureEntry]) -> None:
    game = entry(made, "textarena:GuessTheNumber-v0")

    async def work() -> None:
        env, first = await begin(game, 3)
        text = first.messages[0]["content"]
        assert "between 1 and 20 within 10 turns" in text and len(first.messages) == 1
        step = await called(env.step(action("I guess [1]")))
        # what is new, and not what was said before
        assert heard(step) == "The target number is higher."
        await called(env.close())
        play = search(1, 20, "[{}]", "higher")
        results = await asyncio.gather(
            *(play(game, 3) for _ in range(4)), *(play(game, s) for s in range(4, 9))
        )
        # the seed decides the number, also when many play at once
        assert len({tuple(g) for g, _ in results[:4]}) == 1
        assert len({tuple(g) for g, _ in results}) > 2
        assert all(step.reward == 1.0 and step.metrics["won"] == 1.0 for _, step in results)

    asyncio.run(work())


def test_textarena_invalid_moves_end_the_game(made: list[EnvMixtureEntry]) -> None:
    game = entry(made, "textarena:GuessTheNumber-v0", {"brackets": True})
    steps = asyncio.run(episode(game, ["1", "nonsense", "nonsense", "nonsense"], 3))
    assert [s.done for s in steps] == [False, False, True]
    assert (
        "invalid move" in heard(steps[1])
        and steps[2].metrics["invalid"] == 1.0
        and 0.0 <= (steps[2].reward or 0.0) < 1.0
    )


def test_textarena_two_players(made: list[EnvMixtureEntry]) -> None:
    """The first free cell against us: X takes 0, 1 while O takes 8, 7, 6 and wins."""
    game = entry(made, "textarena:TicTacToe-v0", {"opponent": "first"})
    steps = asyncio.run(episode(game, ["[8]", "[7]", "[6]"], 0))
    assert "[Player 1] [0]" in heard(steps[0]) and heard(steps[0]).count("Current Board") == 1
    assert steps[-1].reward == 1.0 and steps[-1].metrics == {
        "won": 1.0,
        "invalid": 0.0,
        "opponent_invalid": 0.0,
    }
    lost = asyncio.run(episode(game, ["[8]", "[7]", "[3]"], 0))  # ... and 0, 1, 2
    assert lost[-1].done and lost[-1].reward == -1.0


def test_textarena_second_seat_and_random_opponent(made: list[EnvMixtureEntry]) -> None:
    game = entry(made, "textarena:TicTacToe-v0", {"player": 1, "opponent": "random"})

    async def opening(seed: int) -> str:
        env, first = await begin(game, seed)
        await called(env.close())
        text = first.messages[0]["content"]
        assert "You are Player 1" in text
        return re.search(r"\[Player 0\] \[(\d)\]", text).group(1)  # type: ignore[union-attr]

    async def work() -> list[str]:
        return [await opening(s) for s in (0, 0, 1, 2, 3, 4, 5)]

    moves = asyncio.run(work())
    assert moves[0] == moves[1] and len(set(moves)) > 2


def test_textarena_refuses(made: list[EnvMixtureEntry]) -> None:
    for name, options, said in (
        ("NoSuchGame-v0", {}, "no game"),
        ("TicTacToe-v0", {"player": 2}, "no seat 2"),
        ("TicTacToe-v0", {"players": 3}, "take 3"),
    ):
        with pytest.raises((InputError, RuntimeError), match=said):
            asyncio.run(begin(entry(made, f"textarena:{name}", options), 0))


# ---- GEM ----


def test_gem_guess_the_number(made: list[EnvMixtureEntry]) -> None:
    game = entry(made, "gem:game:GuessTheNumber-v0-easy")

    async def work() -> None:
        _, first = await begin(game, 5)
        assert "between 1 and 10 (inclusive) within 4 turns" in first.messages[0]["content"]
        play = search(1, 10, "\\boxed{{{}}}", "is higher than")
        results = await asyncio.gather(
            *(play(game, 5) for _ in range(4)), *(play(game, s) for s in range(6, 11))
        )
        assert (
            len({tuple(g) for g, _ in results[:4]}) == 1 and len({tuple(g) for g, _ in results}) > 2
        )
        assert all(step.reward == 1.0 for _, step in results)

    asyncio.run(work())
    steps = asyncio.run(
        episode(
            entry(made, "gem:game:GuessTheNumber-v0-easy", {"boxed": True}),
            [" 10 ", "\\boxed{1}"],
            7,
        )
    )
    assert "you guessed 10" in heard(steps[0]) and "you guessed 1," in heard(steps[1])
    [wrong] = asyncio.run(episode(game, ["no box"], 5))
    # GEM's price of a format error
    assert wrong.done and not wrong.truncated and wrong.reward is not None and wrong.reward < 0


def test_gem_refuses(made: list[EnvMixtureEntry]) -> None:
    with pytest.raises(InputError, match="GuessTheNumber-v0-easy"):
        asyncio.run(begin(entry(made, "gem:game:GuessTheNumber-v0"), 0))


# ---- Gymnasium ----


def test_gymnasium_frozen_lake(made: list[EnvMixtureEntry]) -> None:
    words = ["left", "down", "right", "up"]
    lake = entry(
        made,
        "gymnasium:FrozenLake-v1",
        {"actions": words, "make": {"is_slippery": False}, "intro": "Reach G.", "invalid": -0.5},
    )
    env_first = asyncio.run(begin(lake, 0))[1]
    assert env_first.messages[0]["content"] == "Reach G.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    steps = asyncio.run(
        episode(lake, ["hm", "go Down", "down", "right", "not left, right", "down", "right"], 0)
    )
    assert steps[0].reward == -0.5 and "left, down, right, up" in heard(steps[0])
    assert heard(steps[1]) == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert (
        steps[-1].done
        and not steps[-1].truncated
        and steps[-1].reward == 1.0
        and steps[-1].metrics["invalid"] == 1.0
    )
    assert sum(s.reward or 0.0 for s in steps[1:]) == 1.0
    [*_, hole] = asyncio.run(episode(lake, ["down", "right"], 0))
    assert hole.done and hole.reward == 0.0


def test_gymnasium_numbers_seeds_and_limits(made: list[EnvMixtureEntry]) -> None:
    jack = entry(made, "gymnasium:Blackjack-v1")
    first = [asyncio.run(begin(jack, s))[1].messages[0]["content"] for s in (4, 4, 5, 6, 7, 8)]
    assert first[0] == first[1] and len(set(first)) > 2
    [stuck] = asyncio.run(episode(jack, ["I stick: 0"], 4))
    assert stuck.done and stuck.reward in (-1.0, 0.0, 1.0)
    short = entry(
        made, "gymnasium:FrozenLake-v1", {"make": {"is_slippery": False, "max_episode_steps": 2}}
    )
    steps = asyncio.run(episode(short, ["0", "0"], 0))
    assert steps[-1].done and steps[-1].truncated
    with pytest.raises((InputError, RuntimeError), match="not said in words"):
        asyncio.run(begin(entry(made, "gymnasium:Pendulum-v1"), 0))


# ---- OpenEnv ----


def test_openenv_server_and_websocket(made: list[EnvMixtureEntry]) -> None:
    guess = entry(made, f"openenv:{RECIPES}/guess_server.py:app")

    async def one(seed: int) -> tuple[list[str], Step]:
        env, first = await begin(guess, seed)
        assert first.messages == [{"role": "user", "content": "Guess a number between 1 and 8."}]
        words = []
        for text in ("4", "2", "6"):
            step = await called(env.step(action(text)))
            if step.done:
                break
            words.append(heard(step))
            assert step.reward == 0.0
        await called(env.close())
        return words, step

    async def work() -> None:
        # each has a number of its own
        results = await asyncio.gather(*(one(11) for _ in range(3)), *(one(s) for s in range(12)))
        assert len({tuple(w) for w, _ in results[:3]}) == 1
        assert {s.reward for _, s in results} == {0.0, 1.0} and {w[0] for w, _ in results if w} == {
            "higher",
            "lower",
        }

    asyncio.run(work())


# ---- verifiers ----


def test_verifiers_taskset_and_harness(made: list[EnvMixtureEntry]) -> None:
    digits = entry(made, "verifiers:digits-v1", {"path": str(RECIPES), "max_turns": 1})

    async def one(text: str) -> Step:
        env, first = await begin(digits, 0, Row("0", "ignored", {"task": 3}))
        assert first.messages == [{"role": "user", "content": "Write the digit 3."}]
        step = await called(env.step(Action(text, [1], text, last=True)))
        await called(env.close())
        return step

    async def work() -> list[Step]:
        return [await one(text) for text in ("It is 3.", "It is 4.")]

    right, wrong = asyncio.run(work())
    assert (right.reward, right.done, right.metrics["right"]) == (1.0, True, 1.0)
    assert (wrong.reward, wrong.done) == (0.0, True)


# ---- tinker-cookbook ----


def test_tinker_cookbook_types(tmp_path: Path) -> None:
    pytest.importorskip("tinker_cookbook.rl.types")
    (tmp_path / "echo.py").write_text("""
import tinker
from tinker_cookbook.rl.types import Env, StepResult
class Echo(Env):
    def __init__(self, row, seed): self.ids = [seed, 2, 3]
    async def initial_observation(self): return tinker.ModelInput.from_ints(self.ids), [0]
    async def step(self, action, *, extra=None):
        self.ids = [*self.ids, *action, 9]
        return StepResult(
            reward=0.5, episode_done=len(self.ids) > 7,
            next_observation=tinker.ModelInput.from_ints(self.ids),
            next_stop_condition=[0], metrics={"m": 1},
        )
""")
    echo = entry_of(f"tinker:{tmp_path}/echo.py:Echo", {})

    async def work() -> None:
        env, first = await begin(echo, 7)
        assert first.tokens == [7, 2, 3]
        one = await called(env.step(Action("", [4, 5])))
        assert one.observation is None or one.observation.tokens == [7, 2, 3, 4, 5, 9]
        assert (one.reward, one.metrics) == (0.5, {"m": 1.0})
        two = await called(env.step(Action("", [6])))
        assert two.done

    asyncio.run(work())


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(InputError, match="textarena is not installed.*env.python"):
        asyncio.run(begin(entry_of("textarena:TicTacToe-v0", {}), 0))
