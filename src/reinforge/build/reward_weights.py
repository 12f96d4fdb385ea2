"""The names and weights of all that is added up to a sample's reward."""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.config.agent import AgentConfig
from reinforge.config.env import EnvConfig
from reinforge.config.schema import Config
from reinforge.rewards.function import FunctionReward
from reinforge.rollout.dialogue.episodes import COMPARE, ENV

AGENT = "agent"  # the name of the reward that an agent returns


def env_weights(cfg: EnvConfig | None) -> dict[str, float]:
    """The reward components that an environment adds."""
    if cfg is None:
        return {}
    weights = {ENV: cfg.weight}
    if cfg.compare:
        weights[COMPARE] = 1.0
    return weights


def agent_weights(cfg: AgentConfig | None) -> dict[str, float]:
    """The reward component that an agent returns."""
    return {} if cfg is None else {AGENT: cfg.weight}


def reward_weights(cfg: Config, rewards: Sequence[FunctionReward]) -> dict[str, float]:
    """The weights of everything that scores a sample, by name."""
    weights = {**env_weights(cfg.env), **agent_weights(cfg.agent)}
    for reward in rewards:
        weights[reward.name] = reward.weight
    return weights
