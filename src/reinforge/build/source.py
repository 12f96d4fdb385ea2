"""The section `sampling` becomes objects: what chooses rows, what remembers them, and the source
that uses both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reinforge.algorithms.algorithm import Algorithm
from reinforge.config.schema import Config
from reinforge.core.backend import Stateful
from reinforge.core.engine import Engine
from reinforge.core.env import Rollout
from reinforge.core.errors import InputError
from reinforge.core.redact import redact_settings
from reinforge.core.sample import Row
from reinforge.data.cursor import Cursor
from reinforge.engines.resumable import ResumableRequests
from reinforge.rollout.buffer import Due, RolloutBuffer
from reinforge.rollout.journal import Journal
from reinforge.rollout.kept import FOLDER, KeptRolloutBuffer, KeptRollouts
from reinforge.rollout.partial import PartialSource
from reinforge.rollout.rows.curriculum import (
    DeclaredDifficulty,
    LearnedDifficulty,
    QuantileRamp,
    difficulties,
)
from reinforge.rollout.rows.pass_rates import PassRateBands, PassRates
from reinforge.rollout.rows.replay import ReplayBuffer
from reinforge.rollout.rows.sampler import (
    GivenWeighting,
    RowSampler,
    RowWeighting,
    TeachableWeighting,
)
from reinforge.rollout.scoring import RewardScorer
from reinforge.rollout.source import GroupSource
from reinforge.watch.logs import read_json


def make_source(
    cfg: Config,
    algorithm: Algorithm,
    rows: Sequence[Row],
    cursor: Cursor,
    rollout: Rollout,
    journal: Journal,
    best: float,
    lengths: Sequence[int] = (),
    requests: ResumableRequests | None = None,
    sampler: Callable[[Row, int], float] | None = None,
) -> tuple[GroupSource, dict[str, Stateful]]:
    """The source, and those of its parts that belong in a checkpoint.

    `best` is the largest possible total reward, `lengths` are of the rows. With `requests`
    a source of partial rollouts: what a step does not wait for goes on in the next one.
    `sampler`: a function of the caller's that says how likely a row is taken.
    """
    sampling = cfg.sampling
    parts = dict[str, Stateful]()
    rates = replay = None
    if sampling.tracks:
        bands = PassRateBands(sampling.retire_above, sampling.hopeless_below, sampling.min_attempts)
        rates = PassRates(
            [row.id for row in rows],
            decay=sampling.decay,
            success_at=sampling.success_at,
            best=best,
            bands=bands,
        )
        parts["passrates"] = rates
    if sampling.replay is not None:
        r = sampling.replay
        replay = ReplayBuffer(
            rows, size=r.size, share=r.share, max_staleness=r.max_staleness, max_uses=r.max_uses
        )
        parts["replay"] = replay
    weightings = row_weightings(cfg, rows, rates, lengths, sampler)
    shared: dict[str, Any] = {
        "row_sampler": RowSampler(cursor, cfg.run.seed, weightings),
        "over_provision": sampling.over_provision,
        "journal": journal,
        "passrates": rates,
        "components": algorithm.compared,
    }
    if requests is not None:
        partial = PartialSource(
            rows,
            cursor,
            rollout,
            cfg.train.prompts_per_step,
            **shared,
            requests=requests,
            staleness=cfg.rollout.staleness,
        )
        return partial, {**parts, "partial": partial}
    source = GroupSource(
        rows,
        cursor,
        rollout,
        cfg.train.prompts_per_step,
        dynamic=algorithm.dynamic_sampling,
        max_refills=cfg.algorithm.max_refills,
        **shared,
        replay=replay,
    )
    return source, parts


def resumable_requests(cfg: Config, engine: Engine) -> ResumableRequests | None:
    """With `rollout.partial`, the requests of groups that a step does not wait for."""
    if not cfg.rollout.partial:
        return None
    streaming = engine.streaming
    if streaming is None:
        raise InputError(
            "this engine does not tell tokens as they come, so what is cut would be lost.",
            where="rollout.partial",
            fix="Use the native engine, vLLM or SGLang, or leave it out.",
        )
    return ResumableRequests(streaming)


def make_buffer(
    cfg: Config, source: GroupSource, steps: int, scorer: RewardScorer
) -> tuple[RolloutBuffer, dict[str, Stateful]]:
    """What runs the source, ahead of training where it may, and its part of a checkpoint.
    `scorer`: of what is played.

    What is carried over uses the bound up by itself.
    """
    if cfg.rollout.kept is not None:
        return _kept_buffer(cfg, source, Path(cfg.rollout.kept), scorer), {}
    staleness = 0 if cfg.rollout.partial else cfg.rollout.staleness
    buffer = RolloutBuffer(
        source,
        staleness,
        steps,
        due=_due(cfg),
    )
    parts: dict[str, Stateful] = {}
    if staleness:
        parts["ahead"] = buffer
    return buffer, parts


def _due(cfg: Config) -> Due:
    """When what a step begins must be generated."""
    if cfg.rollout.engine != "native" or cfg.cluster.layout == "split":
        return "whenever"
    return "update" if cfg.rollout.overlap else "training"


def _kept_buffer(
    cfg: Config, source: GroupSource, kept: Path, scorer: RewardScorer
) -> KeptRolloutBuffer:
    """Rewards count as they were kept, unless this run has other ones."""
    if not (kept / FOLDER).is_dir():
        raise InputError(
            f"{kept} has no kept rollouts.",
            where="rollout.kept",
            fix="Give the directory of a run that had run.keep_rollouts: true.",
        )
    ours = cfg.model_dump(mode="json")["rewards"]
    theirs = read_json(kept / "config.json").get("rewards")
    if redact_settings(ours) == theirs:
        return KeptRolloutBuffer(source, KeptRollouts(kept), None)
    if cfg.env is not None or cfg.agent is not None:
        raise InputError(
            "the rewards of episodes cannot be computed again from kept rollouts.",
            where="rewards",
            fix="Leave the rewards as they were, and change other settings.",
        )
    return KeptRolloutBuffer(source, KeptRollouts(kept), scorer)


def row_weightings(
    cfg: Config,
    rows: Sequence[Row],
    rates: PassRates | None,
    lengths: Sequence[int] = (),
    sampler: Callable[[Row, int], float] | None = None,
) -> list[RowWeighting]:
    """What decides, besides the cursor, which rows a step takes. `lengths`: tokens of each.
    `sampler`: a function of the caller's.
    """
    found: list[RowWeighting] = []
    if sampler is not None:
        found.append(GivenWeighting(rows, sampler))
    curriculum = cfg.sampling.curriculum
    if curriculum is not None:
        ramp = QuantileRamp(
            curriculum.start, curriculum.end, curriculum.steps, least=cfg.train.prompts_per_step
        )
        if curriculum.length:
            found.append(DeclaredDifficulty([float(n) for n in lengths], ramp))
        elif curriculum.column is not None:
            found.append(DeclaredDifficulty(difficulties(rows, curriculum.column), ramp))
        else:
            assert rates is not None
            found.append(LearnedDifficulty(rates, ramp))
    if cfg.sampling.prefer == "teachable":
        assert rates is not None
        found.append(TeachableWeighting(rates, cfg.sampling.recheck))
    return found
