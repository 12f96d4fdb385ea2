"""What a compatibility table is made of, and how a configuration is held against one.

A table has a column for everything that can be chosen (a backend, an engine, ...) and a row for
every feature that not all of them have. A row decides every column, so that no pair is forgotten.
The error messages and the docs page both come from its cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from reinforge.config.sections import Sections

Predicate: TypeAlias = Callable[[Sections], bool]


class Problem(NamedTuple):
    """What is wrong with a configuration: the key, why, and what to do."""

    key: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}: {self.why}; {self.fix}"


@dataclass(frozen=True)
class Yes:
    """A cell: the two go together. `note` is for the docs page."""

    note: str = ""


@dataclass(frozen=True)
class No:
    """A cell: the two do not go together. Messages name `key`, or else the feature's."""

    why: str
    fix: str
    key: str = ""


Cell: TypeAlias = Yes | No
YES = Yes()


@dataclass(frozen=True)
class Column:
    """Something that a configuration chooses, e.g. the backend fsdp."""

    name: str
    setting: str  # how it is written, for the docs page
    chosen: Predicate


@dataclass(frozen=True)
class Feature:
    """A row: something that a configuration may ask for, and which columns have it."""

    name: str  # for the docs page
    key: str  # the key that asks for it
    used: Predicate
    cells: Mapping[str, Cell]  # column: whether they go together


@dataclass(frozen=True)
class Rule:
    """Something that no column decides: settings that contradict each other."""

    key: str
    broken: Predicate
    why: str
    fix: str


@dataclass(frozen=True)
class Table:
    """Columns and rows, and the rules about the same matter. `check.TABLES` lists all tables."""

    title: str
    about: str
    columns: tuple[Column, ...]
    features: tuple[Feature, ...]
    rules: tuple[Rule, ...] = ()

    def problems(self, config: Sections) -> Iterator[Problem]:
        """What the table refuses in a configuration: first the rules, then row by row."""
        yield from broken(self.rules, config)
        chosen = [column for column in self.columns if column.chosen(config)]
        for feature in self.features:
            if not feature.used(config):
                continue
            for column in chosen:
                cell = feature.cells[column.name]
                if isinstance(cell, No):
                    yield _problem(config, cell.key or feature.key, cell.why, cell.fix)


def broken(rules: Iterable[Rule], config: Sections) -> Iterator[Problem]:
    """The rules that a configuration breaks."""
    for rule in rules:
        if rule.broken(config):
            yield _problem(config, rule.key, rule.why, rule.fix)


def _problem(config: Sections, key: str, why: str, fix: str) -> Problem:
    words = words_of(config)
    return Problem(key, filled(why, words), filled(fix, words))


def words_of(config: Sections) -> dict[str, str]:
    """What `{algorithm}` and the other places in a text stand for in a configuration."""
    algorithm = config.algorithm
    warmup = config.critic.warmup if config.critic is not None else 0
    replay = config.sampling.replay
    return {
        "algorithm": algorithm.name,
        "advantage": algorithm.advantage or algorithm.name,
        "surrogate": str(algorithm.surrogate or algorithm.spec.parts.get("surrogate")),
        "backend": f"the backend {config.train.backend}",
        "engine": config.rollout.engine,
        "ranks": str(config.train.ranks),
        "steps": str(config.train.steps),
        "warmup": str(warmup),
        "share": str(replay.share if replay is not None else 0),
        "prompts": str(config.train.prompts_per_step),
        "staleness": str(config.rollout.staleness),
    }


def filled(text: str, words: Mapping[str, str]) -> str:
    """The text with its places filled in. Other braces, as in `critic: {}`, stay.

    >>> filled("{engine} reads `x: {}`", {"engine": "vllm"})
    'vllm reads `x: {}`'
    """
    for name, word in words.items():
        text = text.replace("{" + name + "}", word)
    return text
