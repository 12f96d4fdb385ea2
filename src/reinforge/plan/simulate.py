"""`reinforge plan CONFIG --cluster`: step time and best layout for 8 to 1024 GPUs, from a run's
measured phases or the roofline.

The model is cluster/scaling.py. Without a run the shares of the hardware's peak are assumed; with
one (`--from RUN`), its seconds per phase are divided by what the model says for the devices that it
had, and the ratios applied to every other number of GPUs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from reinforge.backends.roofline import GPUS, StepWork, known_gpu
from reinforge.build.predict import needs_of
from reinforge.cluster.scaling import (
    SYNC_SECONDS,
    ClusterLayout,
    CompletionLengths,
    GpuCluster,
    PhaseRatios,
    StepEstimate,
    best,
    layouts,
    machine,
    replica,
    simulate,
)
from reinforge.config.saved_adapter import as_saved
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.model_facts import ModelFacts
from reinforge.watch.runs import read_json, read_lines

PROMPT_TOKENS = 256.0  # where neither a run nor the rows tell it
GPU = "H100"


@dataclass(frozen=True)
class MeasuredRun:
    """What a run's files tell: medians over its steps, the first left out (it compiles and warms
    up).
    """

    devices: int  # that train
    engines: int  # that have devices of their own
    machine: str
    generate: float
    train: float
    fixed: float
    length: float
    longest: float
    prompt: float


def gpu_counts(text: str) -> list[int]:
    """
    >>> gpu_counts("8..64"), gpu_counts("8,24"), gpu_counts("16")
    ([8, 16, 32, 64], [8, 24], [16])
    """
    fix = "Give a list or a span: 8,24,64 or 8..1024."
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        low = int(span[1])
        high = int(span[2])
        if low > high:
            raise InputError(f"the span {text} ends before it begins.", where="--gpus", fix=fix)
        parts = [str(low * 2**i) for i in range(32) if low * 2**i <= high] if low else ["0"]
    else:
        parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise InputError(f"{part!r} is not a number of GPUs.", where="--gpus", fix=fix)
    return [int(part) for part in parts]


def facts_of(cfg: Config) -> ModelFacts:
    """The model's shape, from its config.json where it is a directory: transformers is not imported
    for that.
    """
    path = Path(cfg.model.path) / "config.json"
    if path.exists():
        raw = json.loads(path.read_text(encoding="utf-8"))
        shape: Any = SimpleNamespace(**{**raw, **raw.get("text_config", {})})
    else:
        from reinforge.models.load import load_config

        shape = load_config(cfg.model).get_text_config()
    adapter = None if cfg.adapter is None else as_saved(cfg.adapter)
    targets = tuple(adapter.targets) if adapter and not isinstance(adapter.targets, str) else None
    return ModelFacts.of(
        shape,
        itemsize=4 if cfg.model.dtype == "float32" else 2,
        rank=adapter.rank if adapter else None,
        targets=targets,
        checkpointing=bool(cfg.model.gradient_checkpointing),
        on_host=cfg.model.gradient_checkpointing == "host",
        compiled=cfg.model.compile is True,
        fused=not cfg.model.exact,
    )


def measured_of(run: Path) -> MeasuredRun:
    """Reads metrics.jsonl and prediction.json of a run on GPUs."""
    if not (run / "metrics.jsonl").exists():
        raise InputError(
            f"{run} is no run directory.",
            where="--from",
            fix="Give the directory of a run that has done some steps.",
        )
    prediction: Mapping[str, Any] = read_json(run / "prediction.json") or {}
    if prediction.get("machine", {}).get("kind") != "cuda":
        raise InputError(
            f"{run} was not measured on a GPU: its times say nothing about one.",
            where="--from",
            fix="Leave it out.",
        )
    if (read_json(run / "config.json") or {}).get("rollout", {}).get("staleness"):
        raise InputError(
            f"{run} generated while it trained: how long either takes alone cannot be told.",
            where="--from",
            fix="Give a run with rollout.staleness=0.",
        )
    lines = [
        line
        for line in read_lines(run / "metrics.jsonl")
        if "time/train" in line and "time/generate" in line
    ]
    lines = lines[1:] or lines
    if not lines:
        raise InputError(
            f"{run} has no step with generation and training.",
            where="--from",
            fix="Give a run of an RL algorithm.",
        )

    def middle(*names: str) -> float:
        return median(sum(float(line.get(name) or 0.0) for name in names) for line in lines)

    rates = prediction.get("rates", {})
    return MeasuredRun(
        int(rates.get("devices", 1)),
        int(rates.get("engines", 0)),
        prediction["machine"]["name"],
        middle("time/generate"),
        middle("time/train", "time/annotate"),
        middle("time/prepare", "time/other"),
        middle("response/length"),
        middle("response/max_length"),
        float(prediction["assumed"]["prompt_tokens"]),
    )


def spread(mean: float, longest: float, cap: int, samples: int) -> CompletionLengths:
    """The distribution of lengths whose longest of `samples` is the one that was seen."""
    low = 0.02
    high = 2.5
    for _ in range(30):
        sigma = (low + high) / 2
        low, high = (
            (sigma, high)
            if CompletionLengths(mean, cap, sigma).longest(samples) < longest
            else (low, sigma)
        )
    return CompletionLengths(mean, cap, sigma)


@dataclass(frozen=True)
class ClusterForecast:
    """All layouts of every number of GPUs, and what was assumed."""

    steps: dict[int, list[StepEstimate]]
    assumed: dict[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """One line per number of GPUs: seconds of the best of each kind with the engines' GPUs, and
        the layout to take.
        """
        found = []
        for gpus, steps in self.steps.items():
            pick = best(steps)
            row: dict[str, Any] = {"GPUs": gpus}
            for kind in ("colocated", "split", "async 1", "async 2", "async 4"):
                own = [step for step in steps if step.layout.name == kind]
                fastest = min(own, key=lambda step: step.seconds, default=None)
                row[kind] = (
                    None
                    if fastest is None
                    else f"{fastest.seconds:.1f}"
                    + (f" ({fastest.layout.engines})" if fastest.layout.engines else "")
                )
            row |= {
                "best": pick.layout.name,
                "GPUs that generate": pick.layout.engines or gpus,
                "step s": round(pick.seconds, 1),
            }
            row |= {"tokens/s/GPU": round(pick.tokens_per_gpu), "MFU": f"{pick.mfu:.0%}"}
            found.append(
                {
                    **row,
                    "not training": f"{max(0.0, pick.idle_train):.0%}",
                    "not generating": f"{max(0.0, pick.idle_generate):.0%}",
                }
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        def shown(step: StepEstimate) -> dict[str, Any]:
            return {
                "layout": step.layout.name,
                "engines": step.layout.engines,
                "staleness": step.layout.staleness,
                "seconds": step.seconds,
                "generate": step.generate,
                "train": step.train,
                "sync": step.sync,
                "tokens_per_second_per_gpu": step.tokens_per_gpu,
                "mfu": step.mfu,
            }

        return {
            "assumed": self.assumed,
            "clusters": {
                n: {"best": shown(best(s)), "layouts": [shown(x) for x in s]}
                for n, s in self.steps.items()
            },
        }


def plan_cluster(
    cfg: Config,
    gpus: Sequence[int],
    *,
    gpu: str | None = None,
    run: Path | None = None,
    length: float | None = None,
    prompt: float | None = None,
    node: int = 8,
) -> ClusterForecast:
    """Every layout for every number of GPUs.

    `length`: mean tokens of a completion, and `prompt`: of a prompt, where no run tells it.
    """
    if not cfg.algorithm.rl:
        raise InputError(
            f"{cfg.algorithm.name} generates nothing: there is no layout to choose.",
            where="plan --cluster",
            fix="Use `reinforge plan CONFIG`.",
        )
    seen = measured_of(run) if run is not None else None
    kind = gpu or (seen.machine if seen else GPU)
    if known_gpu(kind) is None:
        raise InputError(
            f"there is no GPU {kind!r} in our table.",
            where="--gpu",
            fix=f"There are: {', '.join(GPUS)}.",
        )
    facts = facts_of(cfg)
    cap = cfg.rollout.max_new_tokens
    samples = cfg.train.prompts_per_step * cfg.algorithm.group_size
    mean = length or (seen.length if seen else cap / 2)
    lengths = (
        spread(mean, seen.longest, cap, samples)
        if seen and length is None
        else CompletionLengths(min(mean, cap * 0.95), cap)
    )
    needs = needs_of(cfg)
    work = StepWork(
        samples,
        seen.prompt if seen else prompt or PROMPT_TOKENS,
        mean,
        cfg.algorithm.group_size,
        cfg.rollout.max_batch,
        cfg.algorithm.epochs,
        len(needs & {"old", "reference"}),
        "values" in needs,
        cfg.train.share_prompts,
    )
    of_step: dict[str, Any] = {"updates": cfg.algorithm.minibatches}
    if cfg.train.tokens_per_microbatch != "auto":
        of_step["microbatch"] = cfg.train.tokens_per_microbatch
    ratios = PhaseRatios()
    if seen is not None:
        there = GpuCluster(machine(seen.machine), seen.devices + seen.engines, node)
        base = simulate(
            facts, there, work, lengths, ClusterLayout(seen.engines, tensor=1), **of_step
        )
        ratios = PhaseRatios(seen.generate / base.generate, seen.train / base.train, seen.fixed)
    hardware = machine(kind)
    tensor = replica(facts, hardware)
    steps = {
        n: [
            simulate(
                facts,
                GpuCluster(hardware, n, node),
                work,
                lengths,
                layout,
                ratios=ratios,
                **of_step,
            )
            for layout in layouts(GpuCluster(hardware, n, node), tensor)
        ]
        for n in gpus
        if n >= tensor
    }
    if not steps:
        raise InputError(
            f"one copy of the model needs {tensor} GPUs of this kind.",
            where="--gpus",
            fix="Ask for more of them, or a larger one.",
        )
    of_prompts = "of the run" if seen else "median of the rows" if prompt else "a guess"
    half = "" if seen or length else f"; `plan` alone counts {cap}, --length sets it"
    assumed = {
        "GPU": kind,
        "samples": f"{samples} in a step",
        "prompt tokens": f"{work.prompt_tokens:.0f}, {of_prompts}",
        "completion tokens": (
            f"{mean:.0f} on average, at most {cap}, spread {lengths.sigma:.2f}{half}"
        ),
        "one engine": f"{tensor} GPU{'s' if tensor > 1 else ''} for a copy of the model",
        "times": (
            f"of {run}: {ratios.generate:.2f} of the estimate to generate,"
            f" {ratios.train:.2f} to train"
            if run
            else "estimated from the GPU's peaks, with servers that generate; --from RUN measures"
        ),
        "in each step": (
            f"the network ({node} GPUs a node), {SYNC_SECONDS:g} s to hand weights over,"
            f" {ratios.fixed:.1f} s for rewards and the rest"
        ),
    }
    return ClusterForecast(steps, assumed)


# what the columns of `ClusterForecast.rows` are
COLUMNS = {
    "colocated, split, async": (
        "seconds of a step of the best such layout, in brackets the GPUs that generate; colocated:"
        " all do both in turn; split: some generate while the others wait; async N: both at once,"
        " on data at most N steps old"
    ),
    "best": "the layout to take: of those within 3% the freshest data, then the simplest",
    "not training, not generating": (
        "share of a step in which the GPUs that train, or generate, do not (colocated: they do the"
        " other)"
    ),
}
