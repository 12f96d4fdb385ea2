"""What a run will take, before it starts: memory by part and seconds by phase, for the machine at
hand.

`plan` shows it, a run records it as prediction.json, and the report puts what was measured beside
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reinforge.backends import memory_model, roofline
from reinforge.backends.memory_model import GIB, CachePool
from reinforge.backends.roofline import Machine, StepWork
from reinforge.cluster.placement import plan, teacher_role
from reinforge.config.rules.facts import at_once, opposed, trained_models
from reinforge.config.rules.generators import on_all_ranks
from reinforge.config.schema import Config
from reinforge.config.server_devices import stays_awake
from reinforge.core.kv_pool import DeviceShare, left_free, stays
from reinforge.core.model_facts import ModelFacts

if TYPE_CHECKING:
    from reinforge.core.backend import Backend

LEAST_SECONDS = 0.1  # of a step; below them what is not predicted takes more
USABLE = 0.97  # of a GPU's memory; its context and libraries have the rest


def machine_at(device: str) -> Machine:
    """The machine that `model.device` means: a GPU from the table, or this CPU, timed."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return roofline.this_cpu()
    properties = torch.cuda.get_device_properties(
        torch.device("cuda" if device == "auto" else device)
    )
    return roofline.gpu(properties.name, properties.total_memory)


def texts_together(cfg: Config) -> int:
    """Texts of a row that no micro-batch separates: the two answers of a pair, else one."""
    if cfg.algorithm.rl or cfg.algorithm.family not in ("preference", "reward"):
        return 1
    from reinforge.build.algorithm import algorithm_of

    return algorithm_of(cfg.algorithm, cfg.rollout.max_new_tokens).loss.unit


def needs_of(cfg: Config) -> frozenset[str]:
    """The streams that a run annotates, as far as its configuration tells."""
    a = cfg.algorithm
    if a.family == "preference":
        from reinforge.build.algorithm import algorithm_of

        return algorithm_of(a, cfg.rollout.max_new_tokens).needs - (
            {"reference"} if cfg.train.precompute_reference else set()
        )
    found = {
        "reference": bool(a.kl.coefficient),
        "old": a.epochs * a.minibatches > 1,
        "values": a.needs_critic,
    }
    return frozenset(name for name, used in found.items() if used)


def predict(
    cfg: Config,
    facts: ModelFacts,
    machine: Machine,
    lengths: tuple[float, int],
    *,
    budget: int | None = None,
    needs: frozenset[str] | None = None,
    devices: int = 1,
    teachers: Sequence[ModelFacts] = (),
) -> dict[str, Any]:
    """`lengths`: mean and longest prompt, or row where nothing is generated (both answers of a
    pair, which no micro-batch separates).

    Completions count with rollout.max_new_tokens: shorter ones take less. `budget`: tokens per
    micro-batch where they are known already. `teachers`: those with actors of their own, where
    their shapes are known. `devices`: that train; memory is that of one of them, the first, which
    also generates.
    """
    needs = needs_of(cfg) if needs is None else needs
    copies = _copies(cfg, needs)
    rl = cfg.algorithm.rl
    mean = lengths[0]
    longest = lengths[1] + (cfg.rollout.max_new_tokens if rl else 0)
    work = step_work(cfg, needs, mean)
    samples = work.samples
    copied = _generating_copy(cfg, facts)
    free = int(USABLE * machine.memory) - memory_model.weight_bytes(facts) - copied
    if budget is None:
        asked = cfg.train.tokens_per_microbatch
        reserved = left_free(machine.memory, cfg.rollout.overlap)
        auto = (
            memory_model.CPU_BUDGET
            if machine.kind == "cpu"
            else memory_model.budget(facts, free, **copies, reserved=reserved)
        )
        budget = auto if asked == "auto" else asked
    together = cfg.train.sequence_parallel  # ranks that each compute a slice of a pack
    groups = max(1, devices // (together * cfg.train.tensor_parallel))
    tokens = math.ceil(work.tokens / cfg.algorithm.minibatches / groups)
    packed = math.ceil(max(longest, min(budget, tokens)) / together)
    parts = {"train": memory_model.training(facts, packed, machine.kind, **copies)}
    if rl:
        parts["generate"] = memory_model.generation(
            facts, 0, min(samples, cfg.rollout.max_batch), machine.kind, **copies
        )
        parts["generate"]["fp8"] = memory_model.fp8_bytes(facts) if work.fp8 else 0
    followers = (cfg.train.ema is not None) + (
        copies["reference"] and cfg.algorithm.kl.reference.kind != "frozen"
    )
    for found in parts.values():
        found["averages"] = followers * memory_model.FLOAT * facts.learning() // (facts.shards or 1)
        found["copy"] = copied
    cache = None
    if rl and cfg.rollout.engine == "native":
        cache = _cache(cfg, facts, machine, longest, packed, parts)
        parts["generate"]["kv"] = cache.bytes
        if cache.stays:
            parts["train"] |= {"kv": cache.bytes, "fp8": parts["generate"]["fp8"]}
        if cfg.rollout.overlap:
            generating = parts["generate"]
            parts["train"] |= {"prefill": generating["prefill"], "decoding": generating["head"]}
    elif rl:
        _add_server(cfg, machine, parts)
    if machine.kind == "cuda":
        left = int(USABLE * machine.memory) - memory_model.total(parts["train"])
        logits = memory_model.kept_logits(facts, packed, left)
        parts["train"] |= memory_model.training(
            facts, packed, machine.kind, logits=logits, **copies
        )
    faster = 1 if machine.kind == "cpu" else devices  # ranks share the cores of a CPU
    shares = faster if on_all_ranks(cfg, devices, machine.kind) else 1
    # a decode step of few rows takes nearly as long as one of many
    share = replace(work, samples=math.ceil(samples / shares))
    seconds = {
        "train": roofline.train_seconds(facts, machine, work) / faster,
        "generate": roofline.generate_seconds(facts, machine, share),
    }
    # useful ones: nothing computed twice
    flops = (3 - (facts.rank is not None)) * roofline.forward_flops(
        facts, 1, mean + work.new_tokens
    )
    return {
        "rates": {
            "devices": devices,
            "engines": cfg.cluster.engines if cfg.cluster.layout == "split" else 0,
            "peak_flops": machine.flops,
            "flops_per_token": flops,
        },
        "machine": {
            "name": machine.name,
            "kind": machine.kind,
            "memory_gib": round(machine.memory / GIB, 1),
            "known": machine.known,
        },
        "memory_gib": {phase: _gib(found) for phase, found in parts.items()},
        **_actors(cfg, facts, machine, packed, needs, devices, teachers),
        **({} if cache is None else {"kv_cache": cache.summary()}),
        "seconds": {phase: float(f"{seconds[phase]:.4g}") for phase in parts},
        "assumed": {
            "samples": samples,
            "prompt_tokens": round(mean, 1),
            "new_tokens": work.new_tokens,
            "tokens_per_microbatch": budget,
            **({"overlap": True} if cfg.rollout.overlap else {}),
        },
    }


def _copies(cfg: Config, needs: frozenset[str]) -> dict[str, bool]:
    """The models beside the policy, on its device."""
    apart = apart_from_policy(cfg)
    own_critic = "values" in needs and not (cfg.critic is not None and cfg.critic.shared)
    return {
        "reference": "reference" in needs and "reference" not in apart,
        "critic": own_critic and "critic" not in apart,
    }


def step_work(cfg: Config, needs: frozenset[str], mean: float) -> StepWork:
    """The work of a step whose prompts, or rows where nothing is generated, have `mean` tokens."""
    rl = cfg.algorithm.rl
    group = cfg.algorithm.group_size if rl else 1
    return StepWork(
        cfg.train.prompts_per_step * group,
        mean,
        cfg.rollout.max_new_tokens if rl else 0,
        group,
        cfg.rollout.max_batch,
        cfg.algorithm.epochs,
        len(needs & ({"old", "reference"} - apart_from_policy(cfg))),
        _copies(cfg, needs)["critic"],
        rl and cfg.train.share_prompts,
        fp8=cfg.rollout.precision == "fp8",
        fp8_cache=cfg.rollout.cache_precision == "fp8",
        fp8_products=cfg.train.precision == "fp8",
    )


def apart_from_policy(cfg: Config) -> frozenset[str]:
    """The roles that are not in the policy's processes: actors of their own."""
    cluster = cfg.cluster
    split = cluster.kind == "ray" and cluster.layout == "split"
    found = {
        "critic": split or cluster.critic.apart,
        "reference": cluster.reference.apart,
        "teacher": cluster.teacher.apart,
    }
    return frozenset(role for role, apart in found.items() if apart)


def _actors(
    cfg: Config,
    facts: ModelFacts,
    machine: Machine,
    tokens: int,
    needs: frozenset[str],
    devices: int,
    teachers: Sequence[ModelFacts],
) -> dict[str, Any]:
    """Under Ray: how many actors each role has, what all of them ask for, and the memory of one
    actor of a reference or teacher that has its own.
    """
    if cfg.cluster.kind != "ray":
        return {}
    apart = apart_from_policy(cfg)
    reference = "reference" in apart & needs
    made = plan(
        cfg.cluster,
        ranks=cfg.train.ranks or devices,
        critic="values" in needs and not (cfg.critic is not None and cfg.critic.shared),
        rewards=sum(reward.name == "model" for reward in cfg.rewards),
        gpu=machine.kind != "cpu",
        reference=reference,
        teachers=len(cfg.teacher.loaded()) if cfg.teacher and "teacher" in apart else 0,
    )
    models = [("reference", facts, cfg.cluster.reference.ranks)] if reference else []
    for number, shape in enumerate(teachers):
        models.append((teacher_role(number), shape, cfg.cluster.teacher.ranks))
    return {
        "actors": {
            "roles": {role: len(places) for role, places in made.places.items()},
            "needed": made.needed,
            "memory_gib": {
                role: _gib(memory_model.frozen(shape, tokens, machine.kind, ranks))
                for role, shape, ranks in models
            },
        }
    }


def _generating_copy(cfg: Config, facts: ModelFacts) -> int:
    """Bytes of the whole model beside the shards, or of a copy beside the weights, where the native
    engine generates with it.
    """
    if cfg.rollout.overlap:
        return memory_model.copy_bytes(facts)
    native = cfg.algorithm.rl and cfg.rollout.engine == "native"
    if facts.shards is None or not native or cfg.cluster.layout == "split":
        return 0
    return memory_model.weight_bytes(replace(facts, shards=None))


@dataclass(frozen=True, slots=True)
class _CachePrediction:
    """The native engine's cache, as `predict` expects it."""

    pool: CachePool
    longest: int  # tokens of a sequence
    rows: int  # sequences decoded at once
    stays: bool  # while training

    @property
    def bytes(self) -> int:
        return self.pool.bytes

    def summary(self) -> dict[str, Any]:
        return {
            "gib": float(f"{self.bytes / GIB:.4g}"),
            "tokens": self.pool.tokens,
            **({"slots": self.pool.slots} if self.pool.slots else {}),
            "longest": self.longest,
            "rows": self.rows,
            "stays": self.stays,
        }


def _cache(
    cfg: Config,
    facts: ModelFacts,
    machine: Machine,
    longest: int,
    packed: int,
    parts: dict[str, dict[str, int]],
) -> _CachePrediction:
    """What the engine takes beside `parts` of generation, and whether that and training fit.
    `packed`: tokens of a micro-batch.
    """
    fp8 = cfg.rollout.cache_precision == "fp8"
    usable = int(USABLE * machine.memory)
    work = ("head", "prefill", "kv")
    held = sum(size for name, size in parts["generate"].items() if name not in work)
    overlap = cfg.rollout.overlap
    if overlap:
        held += memory_model.passing_bytes(facts, packed, trained_models(cfg))
    pool = memory_model.kv_pool(
        facts,
        None if machine.kind == "cpu" else usable - held,
        cfg.rollout.max_batch,
        longest,
        at_once=at_once(cfg),
        share=DeviceShare(engines=2 if opposed(cfg) else 1),
        kv_gib=cfg.rollout.kv_gib,
        fp8=fp8,
    )
    beside = usable - memory_model.total(parts["train"])
    return _CachePrediction(
        pool,
        longest=longest,
        rows=at_once(cfg),
        stays=machine.kind == "cpu"
        or overlap
        or stays(pool.bytes + parts["generate"]["fp8"], machine.memory, beside),
    )


def _add_server(cfg: Config, machine: Machine, parts: dict[str, dict[str, int]]) -> None:
    """The share of a server on the GPU of the one process that trains: it generates, and training
    keeps what it has.
    """
    for work in ("head", "prefill", "kv"):
        parts["generate"].pop(work)
    beside = machine.kind == "cuda" and not cfg.engine.devices and not cfg.engine.address
    if beside and cfg.train.backend == "local":
        share = int(cfg.engine.memory * machine.memory)
        parts["generate"]["server"] = share
        if stays_awake(cfg):
            parts["train"]["server"] = share


def _gib(parts: dict[str, int]) -> dict[str, float]:
    return {
        name: float(f"{value / GIB:.4g}")
        for name, value in {**parts, "peak": memory_model.total(parts)}.items()
        if value
    }


def predict_run(
    cfg: Config, backend: Backend, lengths: Sequence[int], needs: frozenset[str]
) -> dict[str, Any]:
    """The prediction of a run whose model is loaded: parameters are counted, the micro-batch is
    known.
    """
    facts = backend.facts()
    machine = machine_at(str(backend.device))
    return predict(
        cfg,
        facts,
        machine,
        (sum(lengths) / max(1, len(lengths)), max(lengths, default=1)),
        budget=backend.budget,
        needs=needs,
        devices=backend.devices,
    )


def shown(prediction: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, text) lines for people."""
    machine = prediction["machine"]
    assumed = prediction["assumed"]
    devices = prediction["rates"]["devices"]
    rank = f", one of {devices}" if devices > 1 else ""
    lines = []
    for phase, parts in prediction["memory_gib"].items():
        rest = sorted(((v, k) for k, v in parts.items() if k != "peak"), reverse=True)
        listed = ", ".join(
            f"{name} {_short(value)}" for value, name in rest if value >= 0.005 * parts["peak"]
        )
        packed = (
            f" (micro-batches of {assumed['tokens_per_microbatch']:,} tokens)"
            if phase == "train"
            else ""
        )
        lines.append(
            (
                f"memory to {phase}",
                (
                    f"{_short(parts['peak'])} of {machine['memory_gib']:g} GiB on"
                    f" {machine['name']}{rank}: {listed}{packed}"
                ),
            )
        )
    if "kv_cache" in prediction:
        lines.append(("KV cache", _cache_line(prediction["kv_cache"])))
    if "actors" in prediction:
        lines += _actor_lines(prediction["actors"])
    gpu = machine["kind"] == "cuda"
    network = ", without the network between ranks" if gpu and devices > 1 else ""
    guess = "" if machine["known"] else "; this GPU is not in our table, so that is a guess"
    busy = "on an idle GPU" if gpu else "as busy as this CPU is now"
    times = ", ".join(
        f"{phase} {_short(seconds)} s" for phase, seconds in prediction["seconds"].items()
    )
    together = " (at the same time, so each will take longer)" if assumed.get("overlap") else ""
    if sum(prediction["seconds"].values()) < LEAST_SECONDS:
        busy += "; of so small a model a step costs more beside its products, which is not in it"
    return [
        *lines,
        (
            "time of a step",
            f"about {times}{together} for completions of full length, {busy}{network}{guess}",
        ),
    ]


def _actor_lines(actors: dict[str, Any]) -> list[tuple[str, str]]:
    roles = ", ".join(f"{count} {role}" for role, count in actors["roles"].items())
    needed = ", ".join(f"{count:g} {name}" for name, count in actors["needed"].items())
    lines = [("actors", f"{roles}; {needed}")]
    for role, parts in actors["memory_gib"].items():
        listed = ", ".join(
            f"{name} {_short(value)}" for name, value in parts.items() if name != "peak"
        )
        lines.append((f"memory of {role}", f"{_short(parts['peak'])} GiB an actor: {listed}"))
    return lines


def _cache_line(cache: dict[str, Any]) -> str:
    slots = cache.get("slots")
    whole = min(cache["rows"], cache["tokens"] // cache["longest"], slots or cache["rows"])
    held = "" if slots is None else f" and the states of {slots:,} sequences"
    waiting = "" if whole == cache["rows"] else " (more while they are short)"
    fate = "stays while training" if cache["stays"] else "is given back while training"
    return (
        f"{_size(cache['gib'])} hold {cache['tokens']:,} tokens{held}: {whole:,} of"
        f" {cache['rows']:,} sequences of {cache['longest']:,} tokens at once{waiting};"
        f" it {fate}"
    )


def _size(gib: float) -> str:
    return f"{_short(gib)} GiB" if gib >= 0.1 else f"{_short(1024 * gib)} MiB"


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
