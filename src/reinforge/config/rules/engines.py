"""Which engine generates what: `rollout.engine` and its servers."""

from __future__ import annotations

from reinforge.config.engine import SERVERS, EngineConfig
from reinforge.config.rules.table import YES, Cell, Column, Feature, No, Rule, Table


def _cells(*, native: Cell, started: Cell | dict[str, Cell], running: Cell) -> dict[str, Cell]:
    """A row. `started`: servers that the run starts, one cell for all of them or one for each."""
    of_servers = started if isinstance(started, dict) else dict.fromkeys(SERVERS, started)
    return {"native": native, **of_servers, "running servers": running}


def _handles(server: str) -> Cell:
    """Whether a server takes weights as handles of GPU memory."""
    if SERVERS[server].ipc:
        return YES
    return No(f"{server} reads weights from files here", "use memory or disk")


def _column(engine: str) -> Column:
    return Column(engine, f"`rollout.engine: {engine}`", lambda c: c.rollout.engine == engine)


NO_SERVER = No(
    "the native engine has no server",
    f"remove the section, or set rollout.engine to {' or '.join(SERVERS)}",
    key="engine",
)
OWN_ARITHMETIC = No(
    "{engine} computes log-probs in its own way", "set rollout.engine=native, or leave it out"
)
NO_RANKS = No(
    "it is for the native engine on the ranks of train.backend fsdp, deepspeed or megatron",
    "leave it out",
)

FEATURES = (
    Feature(
        "The section `engine`",
        "engine",
        lambda c: c.engine != EngineConfig(),
        _cells(native=NO_SERVER, started=YES, running=YES),
    ),
    Feature(
        "Bit-identical log-probs",
        "model.exact",
        lambda c: c.model.exact,
        _cells(native=YES, started=OWN_ARITHMETIC, running=OWN_ARITHMETIC),
    ),
    Feature(
        "Weights by handles of GPU memory (ipc)",
        "engine.channel",
        lambda c: c.engine.channel == "ipc",
        _cells(
            native=NO_SERVER,
            started={server: _handles(server) for server in SERVERS},
            running=No("handles of GPU memory are for servers that we start", "use memory or disk"),
        ),
    ),
    Feature(
        "Every rank generates",
        "rollout.all_ranks",
        lambda c: c.rollout.all_ranks,
        _cells(native=YES, started=NO_RANKS, running=NO_RANKS),
    ),
)

ENGINES = Table(
    "Engines",
    "Who generates: the trainer's own module, servers that the run starts, or servers that run"
    " already.",
    (
        _column("native"),
        *map(_column, SERVERS),
        Column("running servers", "`engine.address`", lambda c: bool(c.engine.address)),
    ),
    FEATURES,
)

# what works and is pointless; `plan` warns of it
DOUBTS = (
    Rule(
        "algorithm.correction.name",
        lambda c: (
            c.model.exact and c.algorithm.correction.name != "none" and c.sampling.replay is None
        ),
        "model.exact leaves no mismatch: every weight will be 1",
        "leave one of them out",
    ),
    Rule(
        "algorithm.old",
        lambda c: c.model.exact and c.algorithm.old == "recompute",
        "model.exact: the pass will find what sampling reported, to the bit",
        "use engine: it costs nothing",
    ),
)
