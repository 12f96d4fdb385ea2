"""Holds a configuration against every table: the one place where it is refused or doubted."""

from __future__ import annotations

from collections.abc import Iterator

from reinforge.config.rules import asynchrony, backends, engines
from reinforge.config.rules.algorithms import ALGORITHMS, unread_keys
from reinforge.config.rules.asynchrony import ASYNCHRONY
from reinforge.config.rules.backends import BACKENDS
from reinforge.config.rules.engines import ENGINES
from reinforge.config.rules.table import Problem, broken
from reinforge.config.sections import Sections

TABLES = (BACKENDS, ENGINES, ASYNCHRONY, ALGORITHMS)


def problems(config: Sections) -> Iterator[Problem]:
    """Why the sections do not go together. `Config` refuses with the first of them."""
    yield from BACKENDS.problems(config)
    yield from ENGINES.problems(config)
    yield from unread_keys(config)
    yield from ALGORITHMS.problems(config)
    yield from ASYNCHRONY.problems(config)


def doubts(config: Sections) -> Iterator[Problem]:
    """What will work and may not be meant. `reinforge plan` warns of it."""
    yield from broken(backends.DOUBTS, config)
    yield from broken(engines.DOUBTS, config)
    yield from broken(asynchrony.DOUBTS, config)
