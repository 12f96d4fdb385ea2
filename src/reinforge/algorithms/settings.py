"""From names to functions, and from settings to the functions that take them.

Settings are keyword-only parameters with defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from reinforge.core.errors import InputError


def closest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that was probably meant, if any is near.

    The same letters in another order count most, then likeness, then place.

    >>> closest("gpro", ["gspo", "grpo"]), closest("xyz", ["grpo"])
    ('grpo', None)
    """
    scored = [
        (sorted(c) == sorted(name), SequenceMatcher(None, name, c).ratio(), -i, c)
        for i, c in enumerate(choices)
    ]
    best = max(scored, default=(False, 0.0, 0, ""))
    return best[3] if best[1] >= cutoff else None


def look_up(choices: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in choices:
        near = closest(name, choices)
        hint = f"Did you mean {near}? " if near else ""
        raise InputError(
            f"unknown name {name!r}.", where=where, fix=f"{hint}There are: {', '.join(choices)}."
        )
    return choices[name]


def settings_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The settings that a function takes, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or name_of(
        getattr(function, "func", None) or type(function)
    )


class AlgorithmSettings:
    """The user's settings of an algorithm: each part gets those that it takes, and in the end those
    that none took are refused. `build.py` makes one for each algorithm that it builds.

    `options` (the config's `algorithm.options`) go to every part that has a parameter of that name;
    `own` are settings under keys of their own, `{parameter: (value, key)}`, which count more. A
    user's own key that its part does not take is refused at once.
    """

    def __init__(self, options: Mapping[str, Any]):
        self.options = dict(options)
        self.taken: dict[str, None] = {}  # every name that some part takes, in order

    def bind(
        self,
        choices: Mapping[str, Any],
        value: str | Callable[..., Any],
        where: str,
        own: Mapping[str, tuple[Any, str]] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """The function that `value` is or names, with its settings: own, then options, then
        `defaults` (the row's), then the function's.
        """
        function = value if callable(value) else look_up(choices, value, where)
        takes = settings_of(function)
        self.taken.update(dict.fromkeys(takes))
        given = {name: (x, key) for name, (x, key) in (own or {}).items() if x is not None}
        for name, (_, key) in given.items():
            if name not in takes:
                has = f"It takes: {', '.join(takes)}." if takes else "It has no settings."
                raise InputError(
                    f"{name_of(function)} has no setting {name!r}.",
                    where=key,
                    fix=f"{has} Remove this key.",
                )
        settings = {
            **(defaults or {}),
            **self.options,
            **{name: x for name, (x, _) in given.items()},
        }
        bound = {name: settings[name] for name in takes if name in settings}
        missing = [
            name
            for name, default in takes.items()
            if default is inspect.Parameter.empty and name not in bound
        ]
        if missing:
            raise InputError(
                f"{name_of(function)} needs {', '.join(missing)}.",
                where="algorithm.options",
                fix="Give it there.",
            )
        return partial(function, **bound) if bound else function

    def take(self, names: Iterable[str]) -> dict[str, Any]:
        """The options of these names, for a part that is no function."""
        names = list(names)
        self.taken.update(dict.fromkeys(names))
        return {name: self.options[name] for name in names if name in self.options}

    def refuse_unused(self) -> None:
        for key in self.options:
            if key not in self.taken:
                near = closest(key, self.taken)
                hint = f"Did you mean {near}? " if near else ""
                raise InputError(
                    f"no part of this algorithm has a setting {key!r}.",
                    where=f"algorithm.options.{key}",
                    fix=f"{hint}They take: {', '.join(self.taken)}.",
                )
