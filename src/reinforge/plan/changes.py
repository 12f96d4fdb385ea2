"""The changes of a configuration that would help most: each is made, the plan is asked again, and
what it gains is the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.plan.prediction import Expectation, expected, peak

SHOWN = 3
WORTH = 0.03  # share of the time or of the memory below which a change is not told


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is one step away, and what the plan says with it."""

    settings: str  # key=value, as the command line takes them
    fits: bool
    memory_gib: float
    seconds: float
    before: tuple[float, float]  # memory and seconds as it is

    def as_dict(self) -> dict[str, Any]:
        memory, seconds = self.before
        return {
            "change": self.settings,
            "fits": self.fits,
            "memory_gib": [round(memory, 4), round(self.memory_gib, 4)],
            "step_seconds": [float(f"{seconds:.4g}"), float(f"{self.seconds:.4g}")],
        }


def best_changes(plan: Expectation, shape: Any) -> list[Change]:
    """At most SHOWN. Where the run does not fit: what makes it fit and costs least time, then what
    saves most memory. Where it fits: what saves most time and still fits.
    """
    memory, seconds = _asked(plan)
    fits = plan.fits
    counted = {_adapted(plan.cfg): plan.counts}
    found = []
    for settings in _candidates(plan.cfg, fits):
        changed = _changed(plan.cfg, settings)
        if changed is None:
            continue
        again = expected(changed, plan.machine, plan.lengths, shape, counted.get(_adapted(changed)))
        counted[_adapted(changed)] = again.counts
        after = _asked(again)
        found.append(
            Change(
                " ".join(f"{key}={_text(value)}" for key, value in settings.items()),
                again.fits,
                *after,
                (memory, seconds),
            )
        )
    if fits:
        good = [c for c in found if c.fits and c.seconds < (1 - WORTH) * seconds]
        spare = [c for c in found if c.memory_gib < (1 - WORTH) * memory and c not in good]
        ranked = sorted(good, key=lambda c: c.seconds) + sorted(spare, key=lambda c: c.memory_gib)
    else:
        good = [c for c in found if c.memory_gib < (1 - WORTH) * memory]
        ranked = sorted(good, key=lambda c: (not c.fits, c.seconds if c.fits else c.memory_gib))
    return ranked[:SHOWN]


def _adapted(cfg: Config) -> str:
    """What the number of weights depends on, of what is changed here."""
    adapter = cfg.adapter
    return "" if adapter is None else f"{adapter.rank} of {adapter.targets}"


def _asked(plan: Expectation) -> tuple[float, float]:
    found = plan.prediction()
    return peak(found)[1], sum(found["seconds"].values())


def _candidates(cfg: Config, fits: bool) -> Iterator[dict[str, Any]]:
    """Settings that change what a run takes. What changes what is learned comes only where the run
    would not fit otherwise.
    """
    model = cfg.model
    yield {"model.gradient_checkpointing": not model.gradient_checkpointing}
    yield {"model.compile": not model.compile}
    yield {"train.optimizer.offload": not cfg.train.optimizer.offload}
    yield {"train.optimizer.masters": "split"}
    if model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}
    if cfg.train.tokens_per_microbatch != "auto":
        yield {"train.tokens_per_microbatch": "auto"}
        yield {"train.tokens_per_microbatch": max(1, cfg.train.tokens_per_microbatch // 2)}
    yield {"train.precompute_reference": True}
    if cfg.algorithm.rl:
        yield {"train.share_prompts": True}
        yield {"rollout.precision": "fp8"}
        yield {"rollout.cache_precision": "fp8"}
        yield {"rollout.max_batch": 2 * cfg.rollout.max_batch}
        yield {"rollout.max_batch": max(1, cfg.rollout.max_batch // 2)}
    if cfg.critic is not None:
        yield {"critic.shared": True}
    if fits:
        return
    yield {"model.gradient_checkpointing": "host"}
    compact = {"name": "adamw_8bit", "masters": "split", "gradients": "bfloat16"}
    yield {f"train.optimizer.{key}": value for key, value in compact.items()}
    if cfg.adapter is None:
        yield {"adapter.rank": 16}
        yield {"adapter.kind": "qlora", "adapter.rank": 16}
        yield {"adapter.rank": 16, "model.gradient_checkpointing": True}
        yield {"adapter.kind": "qlora", "adapter.rank": 16, "model.gradient_checkpointing": True}
    elif cfg.adapter.kind != "qlora":
        yield {"adapter.kind": "qlora"}
        yield {"adapter.kind": "qlora", "model.gradient_checkpointing": True}
    yield {"model.gradient_checkpointing": True, "train.optimizer.offload": True}
    if cfg.algorithm.rl:
        yield {"rollout.max_new_tokens": max(1, cfg.rollout.max_new_tokens // 2)}
    elif cfg.data.max_length is not None:
        yield {"data.max_length": max(1, cfg.data.max_length // 2)}


def _changed(cfg: Config, settings: dict[str, Any]) -> Config | None:
    """The configuration with these settings; None where it has them, or where they do not go with
    the rest.
    """
    raw = cfg.model_dump(mode="json")
    same = True
    for key, value in settings.items():
        *path, last = key.split(".")
        place = raw
        for part in path:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
        same = same and place.get(last) == value
        place[last] = value
    if same:
        return None
    try:
        return config_from_dict(raw, where="plan --deep")
    except InputError:
        return None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_dicts(changes: Sequence[Change]) -> list[dict[str, Any]]:
    return [change.as_dict() for change in changes]
