"""A served engine of plain values: what another process, or an actor, is given."""

from __future__ import annotations

from importlib import import_module

from reinforge.config.engine import SERVERS
from reinforge.core.gpu_room import Release, nothing_to_release
from reinforge.engines.served.dialect import Dialect, ServerSetup
from reinforge.engines.served.engine import ServedEngine
from reinforge.weights.probe import Scorer


def make_dialect(server: str) -> Dialect:
    """How to speak to this kind of server, a name in `SERVERS`."""
    module, _, name = SERVERS[server].dialect.partition(":")
    found: Dialect = getattr(import_module(module), name)()
    return found


def make_served(
    setup: ServerSetup, score: Scorer | None = None, release: Release = nothing_to_release
) -> ServedEngine:
    """The engine that a setup describes, its servers starting.

    `score`: the trainer's own log-probs, if the trainer is in this process. `release`: makes all
    trainers on the servers' GPUs give back the memory that they do not use.
    """
    return ServedEngine(setup, make_dialect(setup.kind), score, release)
