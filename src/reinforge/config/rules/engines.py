"""Which engine generates what: `rollout.engine` and its servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from reinforge.config.engine import SERVERS, EngineConfig, ServerFacts
from reinforge.config.rules.facts import opposed, samples
from reinforge.config.rules.table import YES, Cell, Column, Feature, No, Rule, Table
from reinforge.config.sections import Sections

Servers = Mapping[str, ServerFacts]

OWN_ARITHMETIC = No(
    "{engine} computes log-probs in its own way", "set rollout.engine=native, or leave it out"
)
NO_HANDLES = No("{engine} reads weights from files here", "use memory or disk")
NO_HANDLES_THERE = No("it is for servers that we start", "use memory or disk")
NO_TRANSFERS = No("{engine} has no API for it that we know", "use memory or disk")
NO_KEEPING = No("{engine} is interrupted by new weights", "leave it out")
NO_STRINGS = No("{engine} stops at tokens only", "leave it out, or use another engine")
NO_FILTERS = No("{engine} knows no top_p", "leave it out, or use another engine")
NO_STRUCTURE = No("{engine} knows no such forms", "leave it out, or use another engine")
OTHER_GRAMMARS = No(
    "the trainer would have to repeat what the grammar of {engine} allowed at every token",
    "set rollout.engine=native, or set it under eval",
)
OTHER_EXPERTS = No(
    "{engine} is not asked where its tokens went", "set rollout.engine=native, or leave it out"
)
NO_SLEEP = No("{engine} cannot give memory back", "set engine.sleep=never, or leave it out")
NO_KEY = No("{engine} asks for no key", "leave it out")
NO_DRAFTS = No(
    "{engine} drafts in a way of its own", "leave it out, and tell the server with engine.args"
)
OTHER_NUMBERS = No(
    "{engine} quantises in a way of its own", "leave it out, and tell the server with engine.args"
)
NO_RANKS = No(
    "it is for the native engine on the ranks of train.backend fsdp, deepspeed or megatron",
    "leave it out",
)
OVERLAPS = No("with staleness {engine} generates while a step trains anyway", "leave it out")


def one_of(names: Sequence[str]) -> str:
    """A list as English has it.

    >>> one_of(["vllm", "sglang", "third"])
    'vllm, sglang or third'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _column(engine: str) -> Column:
    return Column(engine, f"`rollout.engine: {engine}`", lambda c: c.rollout.engine == engine)


def _features(servers: Servers) -> tuple[Feature, ...]:
    """The rows. What only some servers can do follows from their `ServerFacts`."""

    def cells(*, native: Cell, started: Cell | dict[str, Cell], running: Cell) -> dict[str, Cell]:
        """A row. `started`: servers that the run starts, one cell for all or one for each."""
        of_servers = started if isinstance(started, dict) else dict.fromkeys(servers, started)
        return {"native": native, **of_servers, "running servers": running}

    def where(can: Callable[[ServerFacts], bool], otherwise: No) -> dict[str, Cell]:
        return {name: YES if can(facts) else otherwise for name, facts in servers.items()}

    no_server = No(
        "the native engine has no server",
        f"remove the section, or set rollout.engine to {one_of(list(servers))}",
        key="engine",
    )
    return (
        Feature(
            "The section `engine`",
            "engine",
            lambda c: c.engine != EngineConfig(),
            cells(native=no_server, started=YES, running=YES),
        ),
        Feature(
            "Bit-identical log-probs",
            "model.exact",
            lambda c: c.model.exact,
            cells(native=YES, started=OWN_ARITHMETIC, running=OWN_ARITHMETIC),
        ),
        Feature(
            "Weights by handles of GPU memory (ipc)",
            "engine.channel",
            lambda c: c.engine.channel == "ipc",
            cells(
                native=no_server,
                started=where(lambda facts: facts.ipc, NO_HANDLES),
                running=NO_HANDLES_THERE,
            ),
        ),
        Feature(
            "Weights by the server's own transfer API",
            "engine.channel",
            lambda c: c.engine.channel == "api",
            cells(
                native=no_server,
                started=where(lambda facts: facts.transfers, NO_TRANSFERS),
                running=NO_HANDLES_THERE,
            ),
        ),
        Feature(
            "Completions that go on under new weights",
            "engine.running",
            lambda c: c.engine.running == "keep",
            cells(
                native=no_server,
                started=where(lambda facts: facts.keeps, NO_KEEPING),
                running=YES,
            ),
        ),
        Feature(
            "Stop strings",
            "rollout.stop",
            lambda c: bool(c.rollout.stop),
            cells(
                native=YES,
                started=where(lambda facts: facts.stop_strings, NO_STRINGS),
                running=YES,
            ),
        ),
        Feature(
            "Evaluation with top_p",
            "eval.top_p",
            lambda c: c.eval.top_p < 1,
            cells(native=YES, started=where(lambda facts: facts.filters, NO_FILTERS), running=YES),
        ),
        Feature(
            "Answers of a given form in an evaluation",
            "eval.structured",
            lambda c: c.eval.structured is not None,
            cells(
                native=YES,
                started=where(lambda facts: facts.structured, NO_STRUCTURE),
                running=YES,
            ),
        ),
        Feature(
            "Answers of a given form in training",
            "rollout.structured",
            lambda c: c.rollout.structured is not None,
            cells(native=YES, started=OTHER_GRAMMARS, running=OTHER_GRAMMARS),
        ),
        Feature(
            "The experts of the sampled tokens (router replay)",
            "train.router_replay",
            lambda c: c.train.router_replay != "off",
            cells(
                native=YES,
                started=where(lambda facts: facts.routes, OTHER_EXPERTS),
                running=OTHER_EXPERTS,
            ),
        ),
        Feature(
            "A server that sleeps",
            "engine.sleep",
            lambda c: c.engine.sleep in ("cache", "all"),
            cells(
                native=no_server, started=where(lambda facts: facts.sleeps, NO_SLEEP), running=YES
            ),
        ),
        Feature(
            "The key of a server that runs already",
            "engine.key_env",
            lambda c: c.engine.key_env is not None,
            cells(native=no_server, started=where(lambda facts: facts.key, NO_KEY), running=YES),
        ),
        Feature(
            "Every rank generates",
            "rollout.all_ranks",
            lambda c: c.rollout.all_ranks is True,
            cells(native=YES, started=NO_RANKS, running=NO_RANKS),
        ),
        Feature(
            "Generating while a step trains, with a copy of the weights",
            "rollout.overlap",
            lambda c: c.rollout.overlap,
            cells(native=YES, started=OVERLAPS, running=OVERLAPS),
        ),
        Feature(
            "Lossless speculative decoding",
            "rollout.speculation.when",
            lambda c: c.rollout.speculation.when != "never",
            cells(native=YES, started=NO_DRAFTS, running=NO_DRAFTS),
        ),
        Feature(
            "Products in FP8",
            "rollout.precision",
            lambda c: c.rollout.precision == "fp8",
            cells(native=YES, started=OTHER_NUMBERS, running=OTHER_NUMBERS),
        ),
        Feature(
            "A KV cache in FP8",
            "rollout.cache_precision",
            lambda c: c.rollout.cache_precision == "fp8",
            cells(native=YES, started=OTHER_NUMBERS, running=OTHER_NUMBERS),
        ),
    )


def _fp8_products(config: Sections) -> bool:
    return config.rollout.precision == "fp8"


RULES = (
    Rule(
        "engine.channel",
        lambda c: c.cluster.layout == "split" and c.engine.channel in ("ipc", "api"),
        "in a split layout weights arrive in the host memory of the engine's actor",
        "use auto, memory or disk",
    ),
    Rule(
        "rollout.precision",
        lambda c: _fp8_products(c) and c.model.exact,
        "products in FP8 are added up in another order for another number of rows, so log-probs"
        " cannot be exact",
        "leave it out, or set model.exact to false",
    ),
    Rule(
        "rollout.precision",
        lambda c: _fp8_products(c) and c.adapter is not None and c.adapter.kind == "qlora",
        "a base in 4 bits is not multiplied in FP8",
        "leave it out, or set adapter.kind=lora",
    ),
    Rule(
        "rollout.precision",
        lambda c: _fp8_products(c) and opposed(c),
        "{algorithm} samples from two models, and only one of them would be in FP8",
        "leave it out",
    ),
    Rule(
        "rollout.overlap",
        lambda c: c.rollout.overlap and opposed(c),
        "{algorithm} samples from two models, and only one of them would have a copy",
        "leave it out",
    ),
    Rule(
        "rollout.overlap",
        lambda c: c.rollout.overlap and c.adapter is not None and c.adapter.kind == "qlora",
        "a base in 4 bits is made on the GPU, and there would be two",
        "leave it out, or set adapter.kind=lora",
    ),
    Rule(
        "rollout.cache_precision",
        lambda c: c.rollout.cache_precision == "fp8" and c.model.exact,
        "training attends to keys and values that were not rounded to FP8, so log-probs cannot be"
        " exact",
        "leave it out, or set model.exact to false",
    ),
)


def engine_table(servers: Servers) -> Table:
    """A column for the native engine, one for each kind of server, and one for servers that run
    already; for those the column of their kind counts too.
    """
    return Table(
        "Engines",
        "Who generates: the trainer's own module, servers that the run starts, or servers that run"
        " already.",
        (
            _column("native"),
            *map(_column, servers),
            Column("running servers", "`engine.address`", lambda c: bool(c.engine.address)),
        ),
        _features(servers),
        RULES,
    )


ENGINES = engine_table(SERVERS)


def _open(config: Sections) -> bool:
    """Whether a server is started that answers everybody."""
    server = config.rollout.engine
    return server in SERVERS and not SERVERS[server].key and not config.engine.address


def _trained_as_sampled(config: Sections) -> bool:
    """Whether everything is trained once, with the very weights that sampled it."""
    algorithm = config.algorithm
    older = config.rollout.staleness or config.sampling.replay or config.rollout.kept
    return not older and algorithm.epochs * algorithm.minibatches == 1


OPEN_SERVER = Rule(
    "rollout.engine",
    _open,
    "{engine} asks for no key: everybody on its host can ask it, and give it other weights",
    "run it where nobody else has an account, or use another engine",
)
# what works and is pointless, or more than is wanted; `plan` warns of it
DOUBTS = (
    Rule(
        "rollout.precision",
        lambda c: (
            samples(c) and c.rollout.engine == "native" and c.rollout.precision != c.train.precision
        ),
        "sampling and training multiply in different precisions, which makes their log-probs"
        " differ more (the metric mismatch/mean)",
        "set train.precision to the same, or correct for it with algorithm.correction",
    ),
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
    Rule(
        "train.router_replay",
        lambda c: c.model.exact and c.train.router_replay != "off" and _trained_as_sampled(c),
        "model.exact: every token goes to the experts that it was sampled with, replay or not",
        "leave one of them out",
    ),
    Rule(
        "rollout.speculation.when",
        lambda c: c.rollout.speculation.when != "never" and c.rollout.structured is not None,
        "answers of a given form are decoded without drafts, so none will be guessed",
        "leave one of them out",
    ),
    Rule(
        "engine.sleep",
        lambda c: c.engine.sleep in ("cache", "all") and c.rollout.staleness > 0,
        "with rollout.staleness {engine} generates while the policy trains, and never sleeps",
        "leave one of them out",
    ),
    OPEN_SERVER,
)
