"""The sections `rollout.structured` and `eval.structured` become what engines are asked for."""

from __future__ import annotations

from reinforge.config.schema import Config
from reinforge.core.constraint import Constraint


def rollout_constraint(cfg: Config) -> Constraint | None:
    """What every answer that is trained must match; None: anything."""
    section = cfg.rollout.structured
    return None if section is None else section.constraint("rollout.structured")


def eval_constraint(cfg: Config) -> Constraint | None:
    """What every answer of an evaluation must match: that of training, where it has none."""
    section = cfg.eval.structured
    return rollout_constraint(cfg) if section is None else section.constraint("eval.structured")
