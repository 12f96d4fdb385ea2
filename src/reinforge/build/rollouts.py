"""What plays a prompt: one answer, an episode in an environment, or the run of an agent; for
training and for an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from reinforge.algorithms.parts.shaping import overlong_penalty
from reinforge.build.agents import make_agents
from reinforge.build.constraints import eval_constraint, rollout_constraint
from reinforge.build.environments import make_episodes
from reinforge.build.inputs import EncodedPrompts, RunInputs, eval_new_tokens
from reinforge.build.reward_weights import agent_weights, env_weights
from reinforge.core.engine import Engine, Sampling
from reinforge.rollout.dialogue.episodes import EpisodeRollout
from reinforge.rollout.journal import Journal
from reinforge.rollout.players.single_turn import SingleTurn
from reinforge.rollout.scoring import RewardScorer

Tell = Callable[[str], None]


def training_rollout(
    inputs: RunInputs, prompts: EncodedPrompts, engine: Engine, journal: Journal, tell: Tell
) -> SingleTurn | EpisodeRollout:
    """Plays a group of samples for a row, and writes them into the journal."""
    cfg = inputs.cfg
    buffer = inputs.algorithm.overlong_buffer
    new_tokens = cfg.rollout.max_new_tokens
    shape = partial(overlong_penalty, max_new_tokens=new_tokens, buffer=buffer) if buffer else None
    sampling = Sampling(
        new_tokens,
        cfg.rollout.temperature,
        stop_strings=tuple(cfg.rollout.stop),
        constraint=rollout_constraint(cfg),
    )
    return _rollout(
        inputs,
        prompts,
        engine,
        sampling,
        n=cfg.algorithm.group_size,
        purpose="sample",
        journal=journal,
        shape=shape,
        greedy="baseline" in inputs.algorithm.needs,
        tell=tell,
    )


def eval_rollout(
    inputs: RunInputs, prompts: EncodedPrompts, engine: Engine, tell: Tell
) -> SingleTurn | EpisodeRollout:
    """Plays the samples of a held-out row."""
    cfg = inputs.cfg
    sampling = Sampling(
        eval_new_tokens(cfg),
        cfg.eval.temperature,
        top_p=cfg.eval.top_p,
        stop_strings=tuple(cfg.rollout.stop),
        constraint=eval_constraint(cfg),
    )
    return _rollout(
        inputs,
        prompts,
        engine,
        sampling,
        n=cfg.eval.samples,
        purpose="eval",
        journal=Journal(None),
        shape=None,
        greedy=False,
        tell=tell,
    )


def _rollout(
    inputs: RunInputs,
    prompts: EncodedPrompts,
    engine: Engine,
    sampling: Sampling,
    *,
    n: int,
    purpose: str,
    journal: Journal,
    shape: Callable[[int], float] | None,
    greedy: bool,
    tell: Tell,
) -> SingleTurn | EpisodeRollout:
    cfg = inputs.cfg
    on_error = cfg.rollout.on_reward_error
    if cfg.env is not None or cfg.agent is not None:
        scorer = RewardScorer(
            inputs.rewards,
            journal=journal,
            on_error=on_error,
            shape=shape,
            weights=env_weights(cfg.env) or agent_weights(cfg.agent),
        )
    if cfg.env is not None:
        return make_episodes(
            inputs,
            cfg.env,
            engine,
            scorer,
            sampling,
            n=n,
            purpose=purpose,
            journal=journal,
            greedy=greedy,
            tell=tell,
        )
    if cfg.agent is not None:
        return make_agents(
            inputs,
            cfg.agent,
            engine,
            scorer,
            sampling,
            n=n,
            purpose=purpose,
            journal=journal,
            greedy=greedy,
            tell=tell,
        )
    return SingleTurn(
        engine,
        prompts.ids_of,
        inputs.renderer.decode,
        inputs.rewards,
        sampling,
        n=n,
        seed=cfg.run.seed,
        purpose=purpose,
        journal=journal,
        shape=shape,
        on_error=on_error,
        greedy_baseline=greedy,
        decode_all=inputs.renderer.decode_all,
    )
