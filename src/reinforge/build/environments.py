"""The section `env` becomes episodes: which environment, how the model writes tool calls, how long
an episode may be.
"""

from __future__ import annotations

from collections.abc import Callable

from reinforge.build.inputs import RunInputs
from reinforge.build.limits import episode_tokens
from reinforge.config.env import EnvConfig
from reinforge.core.engine import Engine, Sampling
from reinforge.envs.build import EnvMixture, entry_of
from reinforge.envs.calls import tool_template_of
from reinforge.envs.names import BUILTIN
from reinforge.rewards.build import load_function
from reinforge.rollout.dialogue.env_player import EnvPlayer
from reinforge.rollout.dialogue.episode import EpisodeLimits
from reinforge.rollout.dialogue.episodes import EpisodeRollout
from reinforge.rollout.journal import Journal
from reinforge.rollout.scoring import RewardScorer


def make_episodes(
    inputs: RunInputs,
    cfg: EnvConfig,
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
    """Episodes in the environments of the section: `n` for each row."""
    seed = inputs.cfg.run.seed
    limits = EpisodeLimits(
        episode_tokens(inputs.cfg, inputs.context),
        cfg.max_turns,
        cfg.turn_seconds,
        cfg.episode_seconds,
    )
    player = EnvPlayer(
        engine,
        inputs.renderer,
        tool_template_of(cfg.calls, inputs.renderer),
        mixture_of(cfg, seed),
        limits,
        seed,
        purpose,
        journal,
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
        tell=tell,
    )


def mixture_of(cfg: EnvConfig, seed: int) -> EnvMixture:
    """The environments of the section, and which of them a row is played in."""
    where = "env.mix.{}" if cfg.mix else "env"
    entries = [
        entry_of(e.name, e.options, weight=e.weight, where=where.format(i), python=e.python)
        for i, e in enumerate(cfg.entries)
    ]
    for entry, given in zip(entries, cfg.entries, strict=True):
        idle = given.name in BUILTIN or given.name.startswith("trl:")
        if idle and given.python is None:
            # to make one does nothing yet: what is wrong with the options is said here, and ends
            # the run
            entry.make(**entry.options)
    return EnvMixture(entries, seed)
