"""Which engine generates what: `rollout.engine` and its servers."""

from __future__ import annotations

from reinforge.config.engine import EngineConfig
from reinforge.config.rules.table import YES, Cell, Column, Feature, No, Rule, Table


def _cells(*, native: Cell, vllm: Cell, sglang: Cell, running: Cell) -> dict[str, Cell]:
    return {"native": native, "vllm": vllm, "sglang": sglang, "running servers": running}


NO_SERVER = No(
    "the native engine has no server",
    "remove the section, or set rollout.engine to vllm or sglang",
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
        _cells(native=NO_SERVER, vllm=YES, sglang=YES, running=YES),
    ),
    Feature(
        "Bit-identical log-probs",
        "model.exact",
        lambda c: c.model.exact,
        _cells(native=YES, vllm=OWN_ARITHMETIC, sglang=OWN_ARITHMETIC, running=OWN_ARITHMETIC),
    ),
    Feature(
        "Weights by handles of GPU memory (ipc)",
        "engine.channel",
        lambda c: c.engine.channel == "ipc",
        _cells(
            native=NO_SERVER,
            vllm=YES,
            sglang=No("sglang reads weights from files here", "use memory or disk"),
            running=No("handles of GPU memory are for servers that we start", "use memory or disk"),
        ),
    ),
    Feature(
        "Every rank generates",
        "rollout.all_ranks",
        lambda c: c.rollout.all_ranks,
        _cells(native=YES, vllm=NO_RANKS, sglang=NO_RANKS, running=NO_RANKS),
    ),
)

ENGINES = Table(
    "Engines",
    "Who generates: the trainer's own module, servers that the run starts, or servers that run"
    " already.",
    (
        Column("native", "`rollout.engine: native`", lambda c: c.rollout.engine == "native"),
        Column("vllm", "`rollout.engine: vllm`", lambda c: c.rollout.engine == "vllm"),
        Column("sglang", "`rollout.engine: sglang`", lambda c: c.rollout.engine == "sglang"),
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
