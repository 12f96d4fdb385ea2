"""From names in a config, or functions in Python, to rewards; and their weighted sum."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any, cast

from pydantic import ValidationError

from reinforge.config.rewards import RewardConfig
from reinforge.core.errors import InputError
from reinforge.rewards.builtin import FUNCTIONS
from reinforge.rewards.code import code_reward
from reinforge.rewards.combine import gates_of
from reinforge.rewards.execution import pool_for, with_execution
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.load import load_function
from reinforge.rewards.math import TARGET, math_reward
from reinforge.rewards.names import BUILTIN
from reinforge.rewards.rule import NormalizationRule

Function = Callable[..., Any]
# by name, as a function, or as the configuration says it; and perhaps its weight
GivenReward = str | Function | Mapping[str, Any] | tuple[str | Function, float]
GivenRewards = GivenReward | Sequence[GivenReward]

OF_ROWS = {"answer", "entry"}  # columns that built-in rewards read, which are no options


def describe_rewards(
    given: GivenRewards, declared: Sequence[RewardConfig] = ()
) -> tuple[list[RewardConfig], dict[str, Function]]:
    """What a Python caller gave, as a config would say it, and the functions behind the names.

    A reward that `declared` has by the same name takes its weight and options from there; a weight
    given beside it counts more.
    """
    items = [item if isinstance(item, tuple | list) else (item, None) for item in _listed(given)]
    known = {d.name.rpartition(":")[2]: d for d in reversed(declared)}
    named = [pair[0] for pair in items if pair]
    taken = {item for item in named if isinstance(item, str)}
    taken |= {str(item.get("name")) for item in named if isinstance(item, Mapping)}
    described: list[RewardConfig] = []
    functions: dict[str, Function] = {}
    for i, pair in enumerate(items):
        item, weight = pair if len(pair) == 2 else (None, None)
        if isinstance(item, Mapping) and weight is None:
            described.append(_section(item, i))
            continue
        if not (isinstance(item, str) or callable(item)) or not (
            weight is None or _is_number(weight)
        ):
            raise InputError(
                f"{pair!r} is no reward.",
                where=f"rewards[{i}]",
                fix=(
                    "Give a name, a function, (function, weight), or a dict as in a configuration."
                ),
            )
        name = base = (
            item if isinstance(item, str) else getattr(item, "__name__", type(item).__name__)
        )
        cfg = known.get(base.rpartition(":")[2])
        if not isinstance(item, str):
            name = next(
                n
                for n in (base, *(f"{base}_{k}" for k in range(2, len(items) + 2)))
                if n not in taken
            )
            taken.add(name)
            functions[name] = item
        weight = weight if weight is not None else cfg.weight if cfg is not None else 1.0
        described.append(
            (cfg or RewardConfig(name=name)).model_copy(update={"name": name, "weight": weight})
        )
    return described, functions


def _listed(given: GivenRewards) -> Sequence[Any]:
    """One reward, or one (reward, weight), may come without a list around it."""
    if isinstance(given, str | Mapping) or callable(given):
        return [given]
    items = list(given)
    return (
        [tuple(items)]
        if isinstance(given, tuple) and len(items) == 2 and _is_number(items[1])
        else items
    )


def _section(given: Mapping[str, Any], place: int) -> RewardConfig:
    """A reward that is given as the configuration has it."""
    try:
        return RewardConfig.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"{first['msg']}: {key}.",
            where=f"rewards[{place}]",
            fix='Write it as in a configuration: {"name": "model", "options": {"path": "..."}}.',
        ) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def build_rewards(
    rewards: Sequence[RewardConfig],
    functions: Mapping[str, Function] | None = None,
    device: str | None = None,
    load: Callable[[Any], Function] | None = None,
) -> list[FunctionReward]:
    """Reward models are loaded to `device`, or by `load`; None: not at all, where only the names
    and options are of interest. `functions` are those that came from Python, by the names that
    `describe_rewards` gave them. Two of one name get a number.
    """
    functions = functions or {}
    built = [
        (
            with_execution(cfg, cfg.name, functions[cfg.name], f"rewards.{i}")
            if cfg.name in functions
            else _from_config(cfg, f"rewards.{i}.name", device, load)
        )
        for i, cfg in enumerate(rewards)
    ]
    seen: dict[str, int] = {}
    for reward in built:
        seen[reward.name] = seen.get(reward.name, 0) + 1
        if seen[reward.name] > 1:
            reward.name = f"{reward.name}_{seen[reward.name]}"
    for cfg, reward in zip(rewards, built, strict=True):
        reward.gate = cfg.gate
        reward.gate_at = cfg.gate_at
        reward.rule = NormalizationRule(cfg.center is not None, cfg.scale is not None, cfg.clip)
    gates_of(built)  # wrong ones are told here, before anything runs
    return built


def _from_config(
    cfg: RewardConfig, where: str, device: str | None, load: Callable[[Any], Function] | None = None
) -> FunctionReward:
    if cfg.name == "model":
        from reinforge.rewards.model import model_reward

        scorer = model_reward(cfg.options, where.replace("name", "options"))
        loaded = scorer if device is None else scorer.load(device) if load is None else load(scorer)
        return FunctionReward(cfg.name, loaded, cfg.weight, pure=True)
    if cfg.name == "process":
        return _process(cfg, where, device, load)
    if cfg.name == "code":
        judged = code_reward(cfg.options, where.replace("name", "options"))
        opened = judged if device is None else judged.open()
        return FunctionReward(cfg.name, opened, cfg.weight, notes=opened.notes)
    if cfg.name == "math":
        return _math(cfg, where)
    if cfg.name in ("judge", "http"):
        from reinforge.rewards.remote import remote_reward

        asked = remote_reward(
            cast(Any, cfg.name), cfg.options, cfg.timeout, where.replace("name", "options")
        )
        return FunctionReward(cfg.name, asked, cfg.weight)
    if cfg.name in FUNCTIONS:
        parameters = inspect.signature(FUNCTIONS[cfg.name]).parameters
        # beside the completions, what comes with a row, and what swallows the rest of it
        known = [
            name
            for name, one in list(parameters.items())[1:]
            if one.kind is not one.VAR_KEYWORD and name not in OF_ROWS
        ]
        unknown = set(cfg.options) - set(known)
        if unknown:
            raise InputError(
                f"{cfg.name} has no option {', '.join(sorted(unknown))}.",
                where=where.replace("name", "options"),
                fix=f"It has: {', '.join(known)}." if known else "It has none.",
            )
        return with_execution(
            cfg, cfg.name, FUNCTIONS[cfg.name], where.removesuffix(".name"), ours=True
        )
    if ":" not in cfg.name:
        near = get_close_matches(cfg.name, BUILTIN, n=1)
        raise InputError(
            f"unknown reward {cfg.name!r}.",
            where=where,
            fix=(f"Did you mean {near[0]}? " if near else "")
            + f"Built in: {', '.join(BUILTIN)}; or write file.py:function, or give the function to"
            " reinforge.train.",
        )
    return with_execution(
        cfg,
        cfg.name.rpartition(":")[2],
        load_function(cfg.name, where),
        where.removesuffix(".name"),
    )


def _process(
    cfg: RewardConfig, where: str, device: str | None, load: Callable[[Any], Function] | None
) -> FunctionReward:
    from reinforge.rewards.process_reward import process_reward

    scorer = process_reward(cfg.options, where.replace("name", "options"))
    if (
        cfg.gate is not None
        or cfg.center is not None
        or cfg.scale is not None
        or cfg.clip is not None
    ):
        raise InputError(
            "the verdicts of single steps are probabilities and are taken as they are.",
            where=where.removesuffix(".name"),
            fix="Remove gate, center, scale and clip; `weight` is there.",
        )
    loaded: Any = (
        scorer if device is None else scorer.load(device) if load is None else load(scorer)
    )
    return FunctionReward(
        cfg.name, loaded, cfg.weight, pure=True, steps=getattr(loaded, "steps", None)
    )


def _math(cfg: RewardConfig, where: str) -> FunctionReward:
    if find_spec("math_verify") is None:
        raise InputError(
            "the reward math needs math-verify, which is not installed.",
            where=where,
            fix="pip install 'reinforge[math]'",
        )
    made = math_reward(
        cfg.options,
        where.replace("name", "options"),
        lambda: pool_for(cfg, TARGET, preload=("math_verify",)),
    )
    return FunctionReward(cfg.name, made, cfg.weight)
