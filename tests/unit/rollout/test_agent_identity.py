"""An environment and an agent program that play the same game put the same ids before the model,
turn by turn, and train the same rows.

The agent is the recipe's own, through the endpoint and openai's client; the engine writes every
answer byte by byte, as no encoder would, so that any text that is encoded again gives other ids.
"""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest

from helpers.dialogues import CHATML, UNDECIDED, Saying, make_episodes, make_renderer, spelled
from helpers.paths import ROOT
from helpers.toys import run
from reinforge.build.agent_endpoint import AgentEndpoint
from reinforge.core.engine import Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.sample import Group, Row
from reinforge.data.chat import Renderer
from reinforge.envs.calls import tool_template_of
from reinforge.envs.programs import as_program
from reinforge.envs.shipped import shipped
from reinforge.envs.toolbox import CalculatorEnv
from reinforge.models.tiny import CHAT
from reinforge.rollout.dialogue.agent_session import AgentModel
from reinforge.rollout.dialogue.agents import AgentPlayer
from reinforge.rollout.dialogue.episode import EpisodeLimits
from reinforge.rollout.dialogue.episodes import EpisodeRollout
from reinforge.rollout.scoring import RewardScorer

ROW = Row("r0", "12*34=", {"answer": "408"})
ROOM = EpisodeLimits(4000, 3)


def call(expression: str) -> str:
    return (
        "<tool_call>"
        + json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        + "</tool_call>"
    )


# lines of the model, and the reward
SCRIPTS: dict[str, tuple[list[str], float]] = {
    "a call and an answer": ([call("12*34"), "408"], 1.0),
    "an answer that is made up": (["409"], 0.0),
    "words around the call": (["Let me see.\n" + call(" 12 * 34 "), " It is 408.\n"], 1.0),
    "two calls in a turn": ([call("12*30") + "\n" + call("12*4"), "408"], 1.0),
    "three turns": ([call("12*34"), call("408-0"), "408"], 1.0),
    "calls until the end": ([call("1*1"), call("2*2"), call("3*3")], 0.0),
    "spaced JSON": (
        [
            '<tool_call>\n{"arguments":{"expression":"12*34"},  "name":"calculator"}\n</tool_call>',
            "408",
        ],
        1.0,
    ),
    "an empty answer": ([""], 0.0),
}


@pytest.fixture
def recipe() -> ModuleType:
    path = ROOT / "recipes" / "agents" / "calculator_agent.py"
    spec = importlib.util.spec_from_file_location("calculator_agent", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Spoken(Saying):
    """Which turn it is, is read off how often it spoke: any template will do."""

    def _line(self, prompt: Any, index: int) -> list[int]:
        line = self.lines[min(len(self.said), len(self.lines) - 1)]  # type: ignore[arg-type, index]
        return [*spelled(self.renderer, str(line), end=False), self.renderer.stop_tokens[-1]]


def through_agent(engine: Spoken, renderer: Renderer, agent: Any, new_tokens: int) -> Group:
    model = AgentModel(engine, renderer, tool_template_of("auto", renderer), ROOM, seed=0)
    player = AgentPlayer(
        model, as_program(agent), AgentEndpoint(renderer.tokenizer, ROOM.max_tokens)
    )
    return run(
        EpisodeRollout(
            player,
            RewardScorer([], weights={"agent": 1.0}),
            Sampling(new_tokens),
            n=1,
            component="agent",
        )(ROW, RolloutContext("g"))
    )


@pytest.mark.parametrize("template", [CHAT, CHATML, UNDECIDED], ids=["tiny", "chatml", "undecided"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_both_ask_the_model_with_the_same_ids(
    template: str, script: str, recipe: ModuleType
) -> None:
    renderer, (lines, reward) = make_renderer(template), SCRIPTS[script]
    if template != CHAT:  # these write the whole schema, and it is the agent's own
        tool = shipped("calculator", {})
        assert tool is not None
        recipe.TOOLS[:] = [tool.schema]
    mine = Spoken(renderer, lines)
    theirs = Spoken(renderer, lines)
    played = run(
        make_episodes(mine, renderer, lambda row: CalculatorEnv(), limits=ROOM)(
            ROW, RolloutContext("g")
        )
    )
    heard = through_agent(theirs, renderer, recipe.agent, 200)
    assert len(mine.said) == len(theirs.said) == len(lines)
    for turn, (a, b) in enumerate(zip(mine.said, theirs.said, strict=True)):
        assert a == b, (
            f"turn {turn}: {renderer.tokenizer.decode(a[0])!r} and"
            f" {renderer.tokenizer.decode(b[0])!r}"
        )
    [ours], [agents] = played.samples, heard.samples
    assert (
        ours.tokens.tolist() == agents.tokens.tolist()
        and ours.trained.tolist() == agents.trained.tolist()
    )
    assert int(ours.trained.sum()) == sum(len(said) for _, said in mine.said), (
        "all that was sampled is trained, and nothing else"
    )
    assert ours.logprobs.tolist() == agents.logprobs.tolist()
    assert ours.reward == agents.reward == reward
    assert ours.episode == agents.episode == "g#0" and ours.group == agents.group == "g"


def test_an_answer_that_is_cut_is_cut_in_both(recipe: ModuleType) -> None:
    renderer = make_renderer(CHAT)
    mine = Spoken(renderer, [call("12*34"), "408"])
    theirs = Spoken(renderer, [call("12*34"), "408"])
    played = run(
        make_episodes(mine, renderer, lambda row: CalculatorEnv(), limits=ROOM, new_tokens=7)(
            ROW, RolloutContext("g")
        )
    )
    heard = through_agent(theirs, renderer, recipe.agent, 7)
    assert mine.said[0] == theirs.said[0] and len(mine.said[0][1]) == 7
    [agents] = heard.samples
    assert (
        agents.reward == 0.0
        and agents.tokens.tolist() == played.samples[0].tokens.tolist()[: len(agents.tokens)]
    )
