"""Imports inside functions: only where they keep a heavy library away from who does not need it.

`reinforge --help`, `plan` and everything light answer without torch, and a CPU has no triton. Each
of the imports below is where a light half calls a heavy one; all others stand at the top of a file.
"""

from __future__ import annotations

from functools import cache

from helpers.source_tree import imports, modules
from reinforge.cli.lazy import LazyGroup
from reinforge.cli.main import ReinforgeCommands
from reinforge.cli.runs import RunsCommands

# what takes seconds to import, or is an extra that need not be installed
HEAVY = {
    "torch",
    "transformers",
    "triton",
    "ray",
    "starlette",
    "uvicorn",
    "lm_eval",
    "optuna",
    "fastapi",
}
OTHER_REASONS = {
    "reinforge.envs.adapters.bridge_child": "a program that finds the package when it runs",
    "reinforge.envs.shipped": "a machine without the sandbox has every other tool",
}


def with_parents(module: str) -> set[str]:
    """What importing a module imports first: the packages that it is in."""
    parts = module.split(".")
    names = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return names & modules().keys()


@cache
def at_the_top(module: str) -> tuple[set[str], set[str]]:
    """What a file imports when it is imported: (modules of ours, heavy libraries)."""
    names = {one.module for one in imports(module) if one.at_module_level}
    ours = {name for name in names if name in modules()}
    libraries = {name.partition(".")[0] for name in names - ours}
    return {parent for name in ours for parent in with_parents(name)}, libraries & HEAVY


@cache
def brought_by(module: str) -> frozenset[str]:
    """The heavy libraries that come with a module, over whatever way."""
    seen: set[str] = set()
    found: set[str] = set()
    waiting = with_parents(module)
    while waiting:
        current = waiting.pop()
        seen.add(current)
        ours, libraries = at_the_top(current)
        found |= libraries
        waiting |= ours - seen
    return frozenset(found)


def test_an_import_inside_a_function_keeps_something_heavy_away() -> None:
    needless = []
    excused = set()
    for module in modules():
        for one in imports(module):
            if not one.in_function or one.module not in modules():
                continue
            if brought_by(one.module) <= brought_by(module):
                excused.add(module)
                if module not in OTHER_REASONS:
                    needless.append(f"{module}:{one.line} imports {one.module}")
    assert not needless, "these belong at the top of the file:\n" + "\n".join(needless)
    assert excused == OTHER_REASONS.keys(), "a reason that nobody needs any more"


def test_the_light_half_is_light() -> None:
    """What every command is declared in, and what `reinforge.train` is."""
    groups: list[type[LazyGroup]] = [ReinforgeCommands, RunsCommands]
    places = {entry.place for group in groups for entry in group.entries.values()}
    declared = {place.partition(":")[0] for place in places}
    light = {*declared, "reinforge.api", "reinforge.build.run", "reinforge.plan.checks"}
    assert not {name: sorted(brought_by(name)) for name in light if brought_by(name)}
