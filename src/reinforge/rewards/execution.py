"""Where a reward runs: in a killable process, unless it is ours and fast, awaits, or cannot be
found by another process.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reinforge.config.rewards import RewardConfig
from reinforge.core.errors import InputError
from reinforge.rewards.adapt import adapt, kind_of
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.load import importable
from reinforge.rewards.pool import PoolSpec, RewardPool, pool_of

MOST_WORKERS = 4
# built-ins that run a library's code on completions, and what they import
CALLS_OTHERS = {"reasoning_gym": ("reasoning_gym",)}
# built-ins whose time no rule bounds: a completion can make a harmless-looking pattern take for
# ever
BACKTRACKS = {"regex"}


def with_execution(
    cfg: RewardConfig, name: str, function: Callable[..., Any], where: str, *, ours: bool = False
) -> FunctionReward:
    """The reward with its process, if it gets one.

    `ours`: a built-in, fast and repeatable unless it backtracks or calls others' code. Those are
    asked one completion at a time: one that hangs does not take its group with it. Others' code
    gets a process that is thrown away: some scorers `eval` answers.
    """
    kind = cfg.kind or (None if ours else kind_of(function))
    foreign = CALLS_OTHERS.get(name, ()) if ours else ()
    target = None if cfg.in_process else _target(cfg.name, function)
    alone = bool(foreign) or (ours and name in BACKTRACKS)
    by_default = not alone if ours else not _wants_a_process(function, target)
    here = by_default if cfg.in_process is None else cfg.in_process
    reward = FunctionReward(
        name,
        adapt(function, kind),
        cfg.weight,
        cfg.options,
        pure=ours and here and not foreign,
        timeout=cfg.timeout,
        each=alone,
    )
    if not here:
        if target is None:
            raise InputError(
                f"{name} is a closure, or stands in the main script: no other process can find it.",
                where=f"{where}.in_process",
                fix="Move it to the top level of a module, or leave in_process out.",
            )
        reward.pool = pool_for(cfg, target, kind, fresh=bool(foreign), preload=foreign)
    elif not ours and cfg.in_process is None and target is None and not _awaits(function):
        reward.unfindable = not _interactive()
    return reward


def note_unfindable(rewards: Sequence[FunctionReward]) -> str | None:
    """What to know of rewards that run here because no other process finds them, in one line."""
    names = [reward.name for reward in rewards if reward.unfindable]
    if not names:
        return None
    return (
        "rewards that no other process can find (closures, lambdas, objects, functions of the main"
        f" script) run in this one: {', '.join(names)}. If one hangs it cannot be killed, only left"
        " behind. Put it into a module to change that."
    )


def _interactive() -> bool:
    """In a notebook or at a prompt all functions are such, and it need not be said."""
    return hasattr(sys, "ps1")


def pool_for(
    cfg: RewardConfig,
    target: str,
    kind: str | None = None,
    *,
    fresh: bool = False,
    preload: tuple[str, ...] = (),
) -> RewardPool:
    workers = cfg.workers or min(MOST_WORKERS, os.cpu_count() or 1)
    return pool_of(
        PoolSpec(
            target,
            kind,
            workers,
            cfg.timeout,
            cfg.memory_gib,
            cfg.fresh or fresh,
            preload,
            _stamp(target),
        )
    )


def _wants_a_process(function: Callable[..., Any], target: str | None) -> bool:
    return target is not None and not target.startswith("reinforge.") and not _awaits(function)


def _awaits(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def _target(name: str, function: Callable[..., Any]) -> str | None:
    """What another process loads: the file that the config names, or where the function says it
    lives.
    """
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        return f"{Path(source).expanduser().resolve()}:{attribute}"
    return importable(function) or (name if source else None)


def _stamp(target: str) -> tuple[int, ...]:
    """Changes when the source does."""
    source = target.rpartition(":")[0]
    path = source if source.endswith(".py") else getattr(sys.modules.get(source), "__file__", None)
    if path is None or not os.path.exists(path):
        return ()
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size
