"""How long an episode and a sample may be."""

from __future__ import annotations

from reinforge.config.schema import Config
from reinforge.core.errors import InputError


def episode_tokens(cfg: Config, context: int) -> int:
    """The most tokens that an episode may have."""
    section = cfg.env if cfg.env is not None else cfg.agent
    wanted = section.max_tokens if section is not None else None
    if wanted is not None and wanted > context:
        where = "env.max_tokens" if cfg.env is not None else "agent.max_tokens"
        raise InputError(
            f"{wanted} tokens are more than the model's context of {context}.",
            where=where,
            fix="Lower it.",
        )
    return wanted or context


def response_tokens(cfg: Config, context: int) -> int:
    """The most tokens that a sample may be trained on."""
    if cfg.env is not None:
        turns = cfg.env.max_turns
    elif cfg.agent is not None:
        turns = cfg.agent.max_calls
    else:
        return cfg.rollout.max_new_tokens
    return min(cfg.rollout.max_new_tokens * turns, episode_tokens(cfg, context))
