"""From names in a config, or functions in Python, to rewards; and their weighted sum."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from reinforge.config.schema import RewardConfig
from reinforge.core.errors import InputError
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.verifiable import FUNCTIONS


def load_function(name: str, where: str) -> Callable[..., Any]:
    """`path/to/file.py:function` or `package.module:function`."""
    source, _, attribute = name.rpartition(":")
    if not source:
        raise InputError(f"{name!r} names no function.", where=where, fix="Write file.py:function or package.module:function.")
    if source.endswith(".py"):
        path = Path(source).expanduser()
        if not path.is_file():
            raise InputError(f"no such file: {path}", where=where, fix="Paths are relative to where you run the command.")
        spec = importlib.util.spec_from_file_location(f"reinforge_user_{path.stem}", path.resolve())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise InputError(f"cannot import {source}: {error}", where=where, fix="Install it, or put it on PYTHONPATH.") from error
    if not callable(getattr(module, attribute, None)):
        raise InputError(
            f"{source} has no function {attribute!r}.",
            where=where,
            fix=f"It has: {', '.join(n for n in dir(module) if not n.startswith('_'))[:200]}.",
        )
    return getattr(module, attribute)


def build_rewards(rewards: Sequence[RewardConfig | Callable[..., Any]]) -> list[FunctionReward]:
    """Configs and plain functions alike. Two of one name get a number."""
    built: list[FunctionReward] = []
    for i, item in enumerate(rewards):
        if isinstance(item, RewardConfig):
            built.append(_from_config(item, f"rewards.{i}.name"))
        else:
            built.append(FunctionReward(getattr(item, "__name__", f"reward{i}"), item))
    seen: dict[str, int] = {}
    for reward in built:
        seen[reward.name] = seen.get(reward.name, 0) + 1
        if seen[reward.name] > 1:
            reward.name = f"{reward.name}_{seen[reward.name]}"
    return built


def _from_config(cfg: RewardConfig, where: str) -> FunctionReward:
    if cfg.name in FUNCTIONS:
        reward = FunctionReward(cfg.name, FUNCTIONS[cfg.name], cfg.weight, cfg.options, pure=True)
        unknown = set(cfg.options) - set(inspect.signature(reward.function).parameters)
        if unknown:
            raise InputError(f"{cfg.name} has no option {', '.join(sorted(unknown))}.", where=where.replace("name", "options"),
                             fix=f"It has: {', '.join(list(inspect.signature(reward.function).parameters)[1:])}.")  # fmt: skip
        return reward
    if ":" not in cfg.name:
        near = get_close_matches(cfg.name, FUNCTIONS, n=1)
        raise InputError(f"unknown reward {cfg.name!r}.", where=where,
                         fix=(f"Did you mean {near[0]}? " if near else "") + f"Built in: {', '.join(FUNCTIONS)}; or write file.py:function.")  # fmt: skip
    return FunctionReward(cfg.name.rpartition(":")[2], load_function(cfg.name, where), cfg.weight, cfg.options)


def total(components: dict[str, float | None], weights: dict[str, float]) -> float | None:
    """Σ weight·score over the components that could be scored; None when none could."""
    scored = {name: value for name, value in components.items() if value is not None}
    return sum(weights[name] * value for name, value in scored.items()) if scored else None
