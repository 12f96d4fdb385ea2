"""`model.compile: auto`: whether the layers of a run are compiled.

The choice depends on the configuration, the name of the GPU and the steps that are planned, on
nothing else; it is made once, before the model is loaded, and is in every checkpoint. Compiled
layers add up in another order, so a run that goes on keeps the choice that it began with, whatever
its steps are by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reinforge.backends.roofline import TRAIN_SHARE, Machine, StepWork, mode_of, train_seconds
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.inputs import RunInputs
from reinforge.build.planned_facts import facts_before_loading
from reinforge.build.predict import machine_at, needs_of, step_work
from reinforge.checkpoint import files, store
from reinforge.checkpoint.memory_snapshot import MemorySnapshot
from reinforge.config.rules.compiling import obstacle
from reinforge.config.schema import Config
from reinforge.core.backend import State
from reinforge.core.model_facts import ModelFacts
from reinforge.loops.view import ViewLike
from reinforge.models.load import load_config, pick_device
from reinforge.models.meta_model import count_on_meta

PART = "compile"  # of a checkpoint
# What the first training pass of compiled layers takes longer than the second, with nothing in the
# cache: 13.2 s on an H200 (benchmarks/results/gpu_step_15b.json). Layers are alike and share it, so
# it does not grow with the model.
COMPILE_SECONDS = 15.0
# Predicted savings count with this much less: at 0.5B 1.9 s a step were predicted, 1.4 measured.
MARGIN = 1.5
# Of the time of training: what is less than this is less than predictions are sure of.
LEAST = 0.05


@dataclass(frozen=True)
class CompileChoice:
    """Whether layers are compiled, and why. `with_choice` makes it or finds it in a checkpoint; the
    `Checkpointer` keeps it.
    """

    on: bool
    why: str

    @property
    def told(self) -> str:
        are = "are" if self.on else "are not"
        return f"layers {are} compiled, because {self.why} (model.compile: auto)"

    def state(self) -> State:
        return State({}, {"on": self.on})

    def load(self, state: State) -> None:
        """It was read before the model was loaded."""


def choose(facts: ModelFacts, machine: Machine, work: StepWork, steps: int) -> CompileChoice:
    """By what training saves: generation has kernels of its own, compiled or not."""
    if not machine.known:
        return CompileChoice(False, f"{machine.name} is not in our table, and its speed not known")
    if mode_of(facts, machine) == "fused":
        saved = 1 - TRAIN_SHARE["fused"] / TRAIN_SHARE["compiled"]
        why = f"they have kernels of their own, and it would save {saved:.0%} of training"
        return CompileChoice(False, why)
    eager, compiled = (
        train_seconds(replace(facts, compiled=on), machine, work) for on in (False, True)
    )
    share = 1 - compiled / eager
    if share < LEAST:
        return CompileChoice(False, f"it would save {share:.0%} of training at most")
    saved = steps * (eager - compiled) / MARGIN
    about = f"{saved:,.0f}" if saved >= 10 else f"{saved:.1f}"
    balance = f"{steps:,} steps save about {about} s and compiling takes {COMPILE_SECONDS:g} s"
    return CompileChoice(saved > COMPILE_SECONDS, balance)


def choose_for(
    cfg: Config,
    machine: Machine,
    mean: float,
    steps: int,
    shape: Any = None,
) -> CompileChoice:
    """For a model that is not loaded. `mean`: tokens of a prompt, or of a row where nothing is
    generated; `shape`: the model's configuration, where it is known.
    """
    if machine.kind != "cuda":
        return CompileChoice(False, "the model is on a CPU")
    shape = shape or load_config(cfg.model)
    text = shape.get_text_config()
    if why := obstacle(cfg, text.to_dict(), ModelFacts.of(text).experts):
        return CompileChoice(False, why)
    facts = facts_before_loading(cfg, machine, shape, count_on_meta(shape, cfg.train, cfg.adapter))
    return choose(facts, machine, step_work(cfg, needs_of(cfg), mean), steps)


def recorded(run_dir: Path, memory: MemorySnapshot | None = None) -> CompileChoice | None:
    """The choice that the run in a directory began with; None where nothing was trained yet.

    A checkpoint that says nothing about it is of a run that was not compiled: one that was asked to
    be is not continued with `auto` (loops/config_changes.py).
    """
    if memory is not None and memory.step >= 0:
        extra = memory.load()[1]
    elif (newest := store.latest(run_dir)) is None:
        return None
    else:
        try:
            extra = files.read_state(newest)["extra"]
        except files.DamagedFile:  # whoever restores it says so
            return None
    on = bool(extra.get("parts", {}).get(PART, {}).get("on", False))
    return CompileChoice(on, "this run began so")


def with_choice(
    inputs: RunInputs,
    given: CallerObjects,
    view: ViewLike,
    *,
    lengths: Sequence[int],
    steps: int,
    memory: MemorySnapshot | None,
) -> tuple[RunInputs, dict[str, CompileChoice]]:
    """The inputs with true or false in place of `auto`, and the part of a checkpoint that keeps it;
    both as they are where nothing is left to choose.
    """
    cfg = inputs.cfg
    if cfg.model.compile != "auto":
        return inputs, {}
    on_gpu = cfg.cluster.kind == "ray" or pick_device(cfg.model.device).type == "cuda"
    choice = recorded(Path(cfg.run.dir), memory)
    if choice is None and given.model is not None:
        choice = CompileChoice(False, "the model was given as an object")
    if choice is None and not on_gpu:
        choice = CompileChoice(False, "the model is on a CPU")
    if choice is None:
        mean = sum(lengths) / max(1, len(lengths))
        choice = choose_for(cfg, machine_at(cfg.model.device), mean, steps)
    if on_gpu:
        view.message(choice.told)
    return replace(inputs, cfg=settled(cfg, choice)), {PART: choice}


def settled(cfg: Config, choice: CompileChoice) -> Config:
    """The config as it is carried out."""
    return cfg.model_copy(update={"model": cfg.model.model_copy(update={"compile": choice.on})})
