"""From names in a config to environments: one, or several of which each row gets one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

from reinforge.core.env import Env
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.core.seeds import seed_of
from reinforge.envs.adapters.bridge import EnvBridge
from reinforge.envs.names import BUILTIN, FOREIGN
from reinforge.rewards.load import load_function, with_given_now


@dataclass(frozen=True)
class EnvMixtureEntry:
    """One environment of a mixture."""

    name: str
    make: Callable[..., Env]  # a class, or any callable that returns a fresh environment
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EnvMixture:
    """A `MakeEnv`: the row's column `env` names the environment; a row without one gets one by the
    weights, always the same.
    """

    entries: Sequence[EnvMixtureEntry]
    seed: int = 0
    column: str = "env"

    def __call__(self, row: Row) -> Env:
        entry = self.choose(row)
        return entry.make(**entry.options)

    def choose(self, row: Row) -> EnvMixtureEntry:
        wanted = row.columns.get(self.column)
        if wanted is not None:
            found = next((e for e in self.entries if e.name == wanted), None)
            if found is None:
                raise InputError(
                    f"asks for the environment {wanted!r}.",
                    where=f"row {row.id}",
                    fix=f"There are: {', '.join(e.name for e in self.entries)}.",
                )
            return found
        if len(self.entries) == 1:
            return self.entries[0]
        point = (
            (seed_of(self.seed, "env", row.id) >> 10) / 2**53 * sum(e.weight for e in self.entries)
        )
        for entry in self.entries:
            point -= entry.weight
            if point < 0:
                return entry
        return self.entries[-1]


def entry_of(
    name: str,
    options: Mapping[str, Any],
    *,
    weight: float = 1.0,
    where: str = "env",
    python: str | None = None,
) -> EnvMixtureEntry:
    """`name`: built in, `library:its name`, `file.py:Class` or `package.module:Class`; a function
    that returns an environment will do too. `python`: another interpreter that runs it.
    """
    library, _, known_as = name.partition(":")
    given = (known_as,) if known_as and library in FOREIGN else ()
    target = FOREIGN[library] if given else BUILTIN.get(name, name)
    if ":" not in target:
        near = get_close_matches(name, BUILTIN, n=1)
        raise InputError(
            f"there is no environment {name!r}.",
            where=f"{where}.name",
            fix=(f"Did you mean {near[0]}? " if near else "")
            + f"Built in: {', '.join(BUILTIN)}; of others: {', '.join(FOREIGN)}, each with a colon"
            " and its name; your own: file.py:Class.",
        )
    if given or python is None:
        made = load_function(target, f"{where}.name")
        make = partial(made, *given) if given else made
        check_options(make, options, name, f"{where}.options")
    if python is not None:
        return EnvMixtureEntry(
            name.rpartition(":")[2], EnvBridge(python, target, given, options, where), weight
        )
    return EnvMixtureEntry(name.rpartition(":")[2], with_given_now(make), weight, options)


def check_options(
    make: Callable[..., Any], options: Mapping[str, Any], name: str, where: str
) -> None:
    parameters = inspect.signature(make).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = sorted(set(options) - set(parameters))
    if unknown:
        near = get_close_matches(unknown[0], parameters, n=1)
        raise InputError(
            f"{name} has no option {', '.join(unknown)}.",
            where=where,
            fix=(f"Did you mean {near[0]}? " if near else "")
            + f"It has: {', '.join(parameters) or 'none'}.",
        )
    missing = [
        n
        for n, p in parameters.items()
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and n not in options
    ]
    if missing:
        raise InputError(
            f"{name} needs the option {', '.join(missing)}.", where=where, fix="Give it."
        )
