"""What a run is expected to take, as a part of the report of `plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.backends.memory_model import GIB
from reinforge.backends.roofline import Machine
from reinforge.build.compile_choice import choose_for, recorded, settled
from reinforge.build.planned_facts import facts_before_loading
from reinforge.build.predict import (
    USABLE,
    machine_at,
    predict,
    texts_together,
)
from reinforge.build.teachers import teacher_model
from reinforge.config.schema import Config
from reinforge.core.kv_pool import TOO_LARGE, too_large
from reinforge.core.model_facts import ModelFacts
from reinforge.models.load import load_config
from reinforge.models.meta_model import count_on_meta
from reinforge.models.weight_kinds import WeightCounts
from reinforge.plan.options import PlanOptions, stated_gpu
from reinforge.plan.preflight import PlanReport

CACHE_FIX = "Raise it or leave it out, lower rollout.max_new_tokens, or use a larger GPU."


@dataclass(frozen=True)
class Expectation:
    """What is known of a run before it starts. `plan` makes one from the configuration, and more
    for settings that are one change away.
    """

    cfg: Config
    facts: ModelFacts
    counts: WeightCounts
    machine: Machine
    # mean and longest prompt, or row (both answers of a pair) where nothing is generated
    lengths: tuple[float, int]
    teachers: tuple[ModelFacts, ...] = ()  # those with actors of their own

    def prediction(self) -> dict[str, Any]:
        return predict(
            self.cfg,
            self.facts,
            self.machine,
            self.lengths,
            devices=self.facts.shards or 1,
            teachers=self.teachers,
        )

    @property
    def usable_gib(self) -> float:
        return USABLE * self.machine.memory / GIB

    @property
    def fits(self) -> bool:
        """What is taken is there, and the cache holds one sequence: the engine refuses to begin one
        that it could not end.
        """
        found = self.prediction()
        return peak(found)[1] <= self.usable_gib and holds_one(found)


def expected(
    cfg: Config,
    machine: Machine,
    lengths: tuple[float, int],
    shape: Any = None,
    counts: WeightCounts | None = None,
) -> Expectation:
    """From the model's configuration alone: weights are counted on a model without numbers.
    `shape`, `counts`: the configuration and the weights, where they are known.
    """
    shape = shape or load_config(cfg.model)
    counts = counts or count_on_meta(shape, cfg.train, cfg.adapter)
    facts = facts_before_loading(cfg, machine, shape, counts)
    return Expectation(cfg, facts, counts, machine, lengths, _teacher_shapes(cfg, machine))


def _teacher_shapes(cfg: Config, machine: Machine) -> tuple[ModelFacts, ...]:
    """Of the teachers with actors of their own, from their configurations."""
    section = cfg.teacher
    if section is None or not cfg.cluster.teacher.apart:
        return ()
    itemsize = 4 if machine.kind == "cpu" or section.dtype == "float32" else 2
    models = [teacher_model(one, section, cfg.model.device) for one in section.loaded()]
    return tuple(
        ModelFacts.of(load_config(model, "teacher.path").get_text_config(), itemsize=itemsize)
        for model in models
    )


def predict_plan(cfg: Config, report: PlanReport, options: PlanOptions) -> Expectation | None:
    """Adds the prediction to the report of `plan`, and says where it will not fit: a warning, and
    an error where the GPU was named.
    """
    counted = report.summary.get("prompt_tokens") or report.summary.get("row_tokens")
    if counted is None:
        return None
    machine = stated_gpu(options.gpu) if options.gpu else machine_at(cfg.model.device)
    if cfg.model.device.startswith("cuda") and machine.kind != "cuda":
        report.warn(
            "model.device",
            "there is no GPU here that torch can use; memory and time are predicted for this CPU.",
            "Set model.device=auto or cpu if the run is to be on this machine, or name the GPU with"
            " --gpu.",
        )
    together = texts_together(cfg)
    longest = min(counted["max"], counted["limit"])
    lengths = (together * counted["median"], together * longest)
    shape = load_config(cfg.model)
    cfg = _with_compile_choice(cfg, report, machine, lengths[0], shape)
    found = expected(cfg, machine, lengths, shape)
    prediction = found.prediction()
    report.summary["weights"] = found.counts.kinds
    report.summary["prediction"] = prediction
    phase, most = peak(prediction)
    note = report.refuse if options.gpu else report.warn
    if options.deep:  # which proves it, and says what would help
        return found
    if (problem := too_large(cfg.rollout.kv_gib, machine.memory)) is not None:
        note("rollout.kv_gib", problem, TOO_LARGE)
    elif most > found.usable_gib:
        note(
            "memory",
            f"{phase} is expected to take {most:.1f} GiB, and {machine.name} has"
            f" {machine.memory / GIB:.1f}.",
            less_memory(cfg, prediction["memory_gib"][phase]),
        )
    elif not holds_one(prediction):
        note("rollout.kv_gib", no_cache(prediction), CACHE_FIX)
    return found


def _with_compile_choice(
    cfg: Config, report: PlanReport, machine: Machine, mean: float, shape: Any
) -> Config:
    """With what the run will do in place of `model.compile: auto`, which is told of a GPU."""
    if cfg.model.compile != "auto":
        return cfg
    steps = cfg.train.steps or report.summary.get("steps") or 1
    choice = recorded(Path(cfg.run.dir)) or choose_for(cfg, machine, mean, steps, shape)
    if machine.kind == "cuda":
        report.summary["compile"] = choice.told
    return settled(cfg, choice)


def less_memory(cfg: Config, parts: dict[str, float]) -> str:
    """What would take less memory than the `parts` of a phase, of what is not done already."""
    ways = {
        "lower engine.memory": "server" in parts,
        "leave generation to servers (rollout.engine=vllm), which need no whole copy on rank 0": (
            parts.get("copy", 0) > parts["peak"] / 2
        ),
        "set rollout.overlap=false": cfg.rollout.overlap,
        "train an adapter (adapter.rank=16)": cfg.adapter is None,
        "set model.gradient_checkpointing=true": not cfg.model.gradient_checkpointing,
        "set model.gradient_checkpointing=host": (
            cfg.model.gradient_checkpointing is True
            and cfg.train.backend in ("local", "fsdp")
            and parts.get("activations", 0) > parts["peak"] / 3
        ),
        "set train.optimizer.offload=true": not cfg.train.optimizer.offload,
        "cut the weights over several GPUs (train.backend=fsdp)": cfg.train.backend == "local",
    }
    told = "; ".join([*(way for way, is_left in ways.items() if is_left), "use a smaller model"])
    return f"Do one or more of these: {told}."


def holds_one(prediction: dict[str, Any]) -> bool:
    """Whether the engine's cache has room for one sequence of full length."""
    cache = prediction.get("kv_cache")
    return cache is None or bool(cache["tokens"] >= cache["longest"])


def no_cache(prediction: dict[str, Any]) -> str:
    """What is said where it has not."""
    cache = prediction["kv_cache"]
    return f"the cache holds {cache['tokens']:,} tokens, and a sequence has {cache['longest']:,}."


def peak(prediction: dict[str, Any]) -> tuple[str, float]:
    """The phase that takes most memory, and its GiB."""
    phases = prediction["memory_gib"]
    phase = max(phases, key=lambda name: float(phases[name]["peak"]))
    return phase, float(phases[phase]["peak"])
