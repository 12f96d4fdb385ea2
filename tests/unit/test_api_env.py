"""Environments, tools and epochs that a Python program gives by name: `reinforge.train(env=...,
tools=..., epochs=...)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import reinforge
from reinforge.core.env import Action, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.models.tiny import make_tiny_model

SMALL: dict[str, Any] = dict(
    group_size=4, prompts_per_step=2, max_new_tokens=4, overrides=["rollout.kv_gib=0.01"]
)
ROWS = [{"prompt": f"{i}: ", "wanted": i} for i in range(4)]


class TwoTurns:
    """Says "Go on." once. The first turn is worth 0.25, the last one 1."""

    pure = True

    async def reset(self, row: Row, seed: int) -> Observation:
        return Observation([{"role": "user", "content": str(row.prompt)}])

    async def step(self, action: Action) -> Step:
        if action.turn == 0:
            return Step(Observation([{"role": "user", "content": "Go on."}]), reward=0.25)
        return Step(None, reward=1.0, done=True)

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose chat template has a place for tools."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    return str(make_tiny_model(folder, width=32, layers=2, heads=4, kv_heads=2, chat=True))


def doubled(number: int) -> int:
    """Doubles a number."""
    return 2 * number


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_class_of_ours(chatty: str, tmp_path: Path) -> None:
    """Four rows of two a step: two epochs are four steps. Every episode has two turns."""
    result = reinforge.train(
        model=chatty, data=ROWS, env=TwoTurns, epochs=2, dir=tmp_path / "run", **SMALL
    )
    assert result.steps == 4 and result.metrics["epoch"] == pytest.approx(2.0)
    assert result.metrics["env/turns"] == 2.0 and result.metrics["env/return"] == 1.25
    assert result.metrics["reward/env"] == 1.0


def test_a_class_with_methods_as_tools_is_found_in_every_episode(
    chatty: str, tmp_path: Path
) -> None:
    """It lives in this function only, so that nothing but the caller's object can be meant."""
    seen: list[tuple[int, str]] = []

    class Wanted:
        def reset(self, wanted: int, **columns: Any) -> str:
            self.wanted = wanted
            return "And?"

        def get_reward(self) -> float:
            seen.append((self.wanted, type(self).__name__))
            return float(self.wanted)

        def ask(self, word: str) -> str:
            """Asks."""
            return word

    arguments: dict[str, Any] = dict(model=chatty, data=ROWS, dir=tmp_path / "run", **SMALL)
    result = reinforge.train(**arguments, env=Wanted, steps=2)
    assert len(seen) == 16 and {wanted for wanted, _ in seen} == {0, 1, 2, 3}
    assert result.metrics["env/failed"] == 0
    config = result.run_dir / "config.json"
    with pytest.raises(InputError, match=r"env\.name: Wanted was given as a Python object"):
        reinforge.train(config, data=ROWS, overrides=["train.steps=3"])


def test_tools_are_functions_and_names(chatty: str, tmp_path: Path) -> None:
    def local(word: str) -> str:
        """Says it again."""
        return word

    trainer = reinforge.Trainer(
        model=chatty,
        data=ROWS,
        rewards=length,
        tools=[doubled, local, "calculator"],
        steps=1,
        dir=tmp_path / "run",
        **SMALL,
    )
    assert trainer.config.env is not None
    named = trainer.config.env.options["tools"]
    assert named == [f"{__name__}:doubled", "python:local", "calculator"]
    result = trainer.run()
    assert result.metrics["env/failed"] == 0 and result.metrics["reward/length"] > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"steps": 1, "epochs": 1}, "steps and epochs both say how long"),
        ({"env": TwoTurns, "tools": [doubled]}, r"tools: tools are called in an environment of"),
        ({"tools": doubled}, r"tools: is one tool, not a list"),
        ({"tools": "calculator"}, r"tools: is one tool, not a list"),
        ({"env": Row}, r"env: Row has no method reset"),
        ({"num_train_epochs": 3}, r"It is called epochs here"),
        ({"environment_factory": TwoTurns}, r"It is called env here"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        reinforge.Trainer(model="some/model", data=ROWS, dir=tmp_path / "run", **given)


def test_beside_a_config_they_would_say_nothing(tmp_path: Path) -> None:
    config = {
        "model": {"path": "some/model"},
        "algorithm": {"name": "grpo"},
        "data": {"source": "arithmetic:chain"},
        "rewards": [{"name": "exact_number"}],
        "train": {"steps": 1},
        "run": {"dir": str(tmp_path / "run")},
    }
    with pytest.raises(InputError, match="epochs, env would be ignored beside a config"):
        reinforge.Trainer(config, epochs=2, env=TwoTurns)
