"""The section `sampling` becomes objects: what chooses rows, what remembers them, and the source that uses both."""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.algorithms.table import Algorithm
from reinforge.config.algorithm import AlgorithmConfig
from reinforge.config.schema import Config
from reinforge.core.backend import Part
from reinforge.core.env import Rollout
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data.cursor import Cursor
from reinforge.rollout.choose import Chooser, Policy, Teachable
from reinforge.rollout.curriculum import Declared, Learned, Ramp, difficulties
from reinforge.rollout.journal import Journal
from reinforge.rollout.passrate import Bands, PassRates
from reinforge.rollout.replay import Replay
from reinforge.rollout.source import Source


def replayable(cfg: Config) -> AlgorithmConfig:
    """The section `algorithm`; with replay and no correction, the ratio is taken to the policy that sampled (old: engine)."""
    if cfg.sampling.replay is None or cfg.algorithm.correction.name != "none":
        return cfg.algorithm
    return cfg.algorithm.model_copy(update={"old": "engine"})


def make_source(cfg: Config, algorithm: Algorithm, rows: Sequence[Row], cursor: Cursor, rollout: Rollout, journal: Journal,
                best: float, lengths: Sequence[int] = ()) -> tuple[Source, dict[str, Part]]:  # fmt: skip
    """The source, and those of its parts that belong in a checkpoint. `best` is the largest possible total reward, `lengths` are of the rows."""
    sampling, parts = cfg.sampling, dict[str, Part]()
    rates = replay = None
    if sampling.tracks:
        bands = Bands(sampling.retire_above, sampling.hopeless_below, sampling.min_attempts)
        rates = PassRates([row.id for row in rows], decay=sampling.decay, success_at=sampling.success_at, best=best, bands=bands)
        parts["passrates"] = rates
    if sampling.replay is not None:
        if cfg.algorithm.correction.name == "none" and algorithm.options.surrogate == "reinforce":
            raise InputError(f"replayed groups are off-policy, and {algorithm.name} has no ratio.", where="sampling.replay",
                             fix="Set algorithm.correction.name, e.g. to tis, or choose a surrogate with a ratio (ppo_clip).")  # fmt: skip
        r = sampling.replay
        replay = Replay(rows, size=r.size, share=r.share, max_staleness=r.max_staleness, max_uses=r.max_uses)
        parts["replay"] = replay
    source = Source(
        rows, cursor, rollout, cfg.train.prompts_per_step, dynamic=algorithm.dynamic_sampling, max_refills=cfg.algorithm.max_refills,
        chooser=Chooser(cursor, cfg.run.seed, policies(cfg, rows, rates, lengths)), over_provision=sampling.over_provision, journal=journal,
        passrates=rates, replay=replay,
    )  # fmt: skip
    return source, parts


def policies(cfg: Config, rows: Sequence[Row], rates: PassRates | None, lengths: Sequence[int] = ()) -> list[Policy]:
    """What decides, besides the cursor, which rows a step takes. `lengths`: tokens of each."""
    found: list[Policy] = []
    curriculum = cfg.sampling.curriculum
    if curriculum is not None:
        ramp = Ramp(curriculum.start, curriculum.end, curriculum.steps, least=cfg.train.prompts_per_step)
        if curriculum.length:
            found.append(Declared([float(n) for n in lengths], ramp))
        elif curriculum.column is not None:
            found.append(Declared(difficulties(rows, curriculum.column), ramp))
        else:
            assert rates is not None
            found.append(Learned(rates, ramp))
    if cfg.sampling.prefer == "teachable":
        assert rates is not None
        found.append(Teachable(rates, cfg.sampling.recheck))
    return found
