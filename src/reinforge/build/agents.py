"""The section `agent` becomes episodes: programs that talk to an OpenAI endpoint, which the model
in training answers.
"""

from __future__ import annotations

from collections.abc import Callable

from reinforge.build.agent_endpoint import AgentEndpoint
from reinforge.build.inputs import RunInputs
from reinforge.build.limits import episode_tokens
from reinforge.build.reward_weights import AGENT
from reinforge.config.agent import AgentConfig
from reinforge.core.engine import Engine, Sampling
from reinforge.envs.calls import tool_template_of
from reinforge.envs.programs import AgentProgram, as_program
from reinforge.rewards.build import load_function
from reinforge.rollout.dialogue.agent_session import AgentModel
from reinforge.rollout.dialogue.agents import AgentPlayer
from reinforge.rollout.dialogue.episode import EpisodeLimits
from reinforge.rollout.dialogue.episodes import EpisodeRollout
from reinforge.rollout.dialogue.lockstep import Lockstep
from reinforge.rollout.journal import Journal
from reinforge.rollout.scoring import RewardScorer


def make_agents(
    inputs: RunInputs,
    cfg: AgentConfig,
    engine: Engine,
    scorer: RewardScorer,
    sampling: Sampling,
    *,
    n: int,
    purpose: str,
    journal: Journal,
    greedy: bool,
    tell: Callable[[str], None],
) -> EpisodeRollout:
    """Episodes of an agent: `n` runs of the program for each row."""
    max_tokens = episode_tokens(inputs.cfg, inputs.context)
    model = AgentModel(
        engine,
        inputs.renderer,
        tool_template_of(cfg.calls, inputs.renderer),
        EpisodeLimits(max_tokens, cfg.max_calls, episode_seconds=cfg.seconds),
        inputs.cfg.run.seed,
        purpose,
        cfg.temperature,
        Lockstep() if cfg.lockstep else None,
    )
    endpoint = AgentEndpoint(inputs.tokenizer, max_tokens)
    player = AgentPlayer(model, program_of(cfg), endpoint, journal, cfg.on_error)
    return EpisodeRollout(
        player,
        scorer,
        sampling,
        n=n,
        concurrent=cfg.concurrent,
        greedy_baseline=greedy,
        tell=tell,
        component=AGENT,
    )


def program_of(cfg: AgentConfig) -> AgentProgram:
    """The program that plays: a command line, or a function."""
    return as_program(cfg.command or load_function(cfg.name or "", "agent.name"))
