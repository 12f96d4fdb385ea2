"""One function that makes a served engine of plain values: what another process, or an actor, is
given. `DIALECTS` are the kinds of servers that there are.
"""

from __future__ import annotations

from collections.abc import Callable

from reinforge.engines.served.dialect import Dialect, ServerSetup
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.served.sglang import Sglang
from reinforge.engines.served.vllm import Vllm
from reinforge.weights.probe import Scorer

# by the name in the config (`rollout.engine`); config/engine.py has the same names in SERVERS
DIALECTS: dict[str, Callable[[], Dialect]] = {
    "vllm": Vllm,
    "sglang": Sglang,
}


def make_served(setup: ServerSetup, score: Scorer | None = None) -> ServedEngine:
    """The engine that a setup describes, its servers starting.

    `score`: the trainer's own log-probs, if the trainer is in this process.
    """
    return ServedEngine(setup, DIALECTS[setup.kind](), score)
