"""The section `env` becomes a rollout: which environment, how the model writes tool calls, how long
an episode may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from reinforge.algorithms.parts.shaping import overlong_penalty
from reinforge.build.agents import AGENT, make_agents
from reinforge.config.env import EnvConfig
from reinforge.config.schema import Config
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.envs.build import Mixture, entry_of
from reinforge.envs.calls import talk_of
from reinforge.envs.names import BUILTIN
from reinforge.rewards.build import load_function
from reinforge.rollout.dialogue.env_player import EnvPlayer
from reinforge.rollout.dialogue.episode import EpisodeLimits
from reinforge.rollout.dialogue.episodes import COMPARE, ENV, EpisodeRollout
from reinforge.rollout.journal import Journal
from reinforge.rollout.players.single_turn import SingleTurn
from reinforge.rollout.scoring import RewardScorer

if TYPE_CHECKING:
    from reinforge.build.workshop import Workshop

Encoded = Mapping[str, list[int]]  # prompt ids by row id


def env_weights(cfg: EnvConfig | None) -> dict[str, float]:
    """The reward components that an environment adds."""
    return {} if cfg is None else {ENV: cfg.weight, **({COMPARE: 1.0} if cfg.compare else {})}


def training_rollout(
    shop: Workshop, encoded: Encoded, journal: Journal
) -> SingleTurn | EpisodeRollout:
    cfg = shop.cfg
    buffer = shop.algorithm.overlong_buffer
    new_tokens = cfg.rollout.max_new_tokens
    sampling = Sampling(new_tokens, cfg.rollout.temperature, stop_strings=tuple(cfg.rollout.stop))
    shape = partial(overlong_penalty, max_new_tokens=new_tokens, buffer=buffer) if buffer else None
    n = cfg.algorithm.group_size
    greedy = "baseline" in shop.algorithm.needs
    if cfg.env is not None:
        scorer = RewardScorer(
            shop.rewards,
            journal=journal,
            on_error=cfg.rollout.on_reward_error,
            shape=shape,
            weights=env_weights(cfg.env),
        )
        return make_episodes(
            shop, cfg.env, scorer, sampling, n=n, purpose="sample", journal=journal, greedy=greedy
        )
    if cfg.agent is not None:
        scorer = RewardScorer(
            shop.rewards,
            journal=journal,
            on_error=cfg.rollout.on_reward_error,
            shape=shape,
            weights={AGENT: cfg.agent.weight},
        )
        tokens = episode_tokens(cfg, shop.context)
        return make_agents(
            shop,
            cfg.agent,
            scorer,
            sampling,
            tokens,
            n=n,
            purpose="sample",
            journal=journal,
            greedy=greedy,
        )
    return SingleTurn(
        shop.engine,
        lambda row: encoded[row.id],
        shop.renderer.decode,
        shop.rewards,
        sampling,
        n=n,
        seed=cfg.run.seed,
        journal=journal,
        shape=shape,
        on_error=cfg.rollout.on_reward_error,
        greedy_baseline=greedy,
    )


def eval_rollout(shop: Workshop, encoded: Encoded, new_tokens: int) -> SingleTurn | EpisodeRollout:
    cfg = shop.cfg
    sampling = Sampling(
        new_tokens, cfg.eval.temperature, top_p=cfg.eval.top_p, stop_strings=tuple(cfg.rollout.stop)
    )
    if cfg.env is not None:
        scorer = RewardScorer(
            shop.rewards, on_error=cfg.rollout.on_reward_error, weights=env_weights(cfg.env)
        )
        return make_episodes(shop, cfg.env, scorer, sampling, n=cfg.eval.samples, purpose="eval")
    if cfg.agent is not None:
        scorer = RewardScorer(
            shop.rewards, on_error=cfg.rollout.on_reward_error, weights={AGENT: cfg.agent.weight}
        )
        return make_agents(
            shop,
            cfg.agent,
            scorer,
            sampling,
            episode_tokens(cfg, shop.context),
            n=cfg.eval.samples,
            purpose="eval",
        )
    return SingleTurn(
        shop.engine,
        lambda row: encoded[row.id],
        shop.renderer.decode,
        shop.rewards,
        sampling,
        n=cfg.eval.samples,
        seed=cfg.run.seed,
        purpose="eval",
        on_error=cfg.rollout.on_reward_error,
    )


def make_episodes(
    shop: Workshop,
    cfg: EnvConfig,
    scorer: RewardScorer,
    sampling: Sampling,
    *,
    n: int,
    purpose: str,
    journal: Journal | None = None,
    greedy: bool = False,
) -> EpisodeRollout:
    limits = EpisodeLimits(
        episode_tokens(shop.cfg, shop.context), cfg.max_turns, cfg.turn_seconds, cfg.episode_seconds
    )
    player = EnvPlayer(
        shop.engine,
        shop.renderer,
        talk_of(cfg.calls, shop.renderer),
        mixture_of(cfg, shop.cfg.run.seed),
        limits,
        shop.cfg.run.seed,
        purpose,
        journal or Journal(None),
        cfg.on_error,
    )
    compare = load_function(cfg.compare, "env.compare") if cfg.compare else None
    return EpisodeRollout(
        player,
        scorer,
        sampling,
        n=n,
        concurrent=cfg.concurrent,
        compare=compare,
        greedy_baseline=greedy,
        tell=shop.view.message,
    )


def mixture_of(cfg: EnvConfig, seed: int) -> Mixture:
    where = "env.mix.{}" if cfg.mix else "env"
    entries = [
        entry_of(e.name, e.options, weight=e.weight, where=where.format(i), python=e.python)
        for i, e in enumerate(cfg.entries)
    ]
    for entry, given in zip(entries, cfg.entries, strict=True):
        if given.name in BUILTIN and given.python is None:
            # ours do nothing before reset: what is wrong with the options is said here, and ends
            # the run
            entry.make(**entry.options)
    return Mixture(entries, seed)


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
    turns = (
        cfg.env.max_turns
        if cfg.env is not None
        else cfg.agent.max_calls
        if cfg.agent is not None
        else None
    )
    return (
        cfg.rollout.max_new_tokens
        if turns is None
        else min(cfg.rollout.max_new_tokens * turns, episode_tokens(cfg, context))
    )
