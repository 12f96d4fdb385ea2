"""What is computed of all rows before the first step and kept in the run's directory: the
reference's log-probs, and a teacher's likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reinforge.algorithms.losses.distillation import DistillationLoss
from reinforge.algorithms.losses.unpaired import MISMATCHED, UnpairedLoss
from reinforge.build.inputs import RunInputs
from reinforge.config.schema import Config
from reinforge.core.backend import TEACHER_IDS, TEACHER_LOGPROBS, Backend
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.data.units import Unit
from reinforge.loops.precompute import Streams, with_streams
from reinforge.models.packed import PackedModel

Split = tuple[Sequence[Unit], Sequence[Unit]]  # to train on, and held out


def precompute_reference(inputs: RunInputs, backend: Backend, units: Split) -> Split:
    """The units with the reference's log-probs.

    The weights are still those of the model that was loaded, also in a run that is to be continued:
    its checkpoint is read later. KTO's mismatched answers are chosen here, once for the whole run.
    """
    cfg = inputs.cfg
    loss: Any = inputs.algorithm.loss
    if "reference" not in inputs.algorithm.needs:
        raise InputError(
            f"{inputs.algorithm.name} has no reference.",
            where="train.precompute_reference",
            fix="Remove it.",
        )
    stream = "reference" if backend.has_reference else "old"
    name = f"{cfg.model.path}@{cfg.model.revision}"
    if cfg.adapter is not None and cfg.adapter.path:
        name += f" with {cfg.adapter.path}"

    def ask(batch: Batch) -> Streams:
        backend.annotate([batch], frozenset({stream}))
        return {"reference": batch.streams[stream]}

    train, held_out = units
    every = [*train, *held_out]
    mismatched: list[Unit] = []
    if isinstance(loss, UnpairedLoss):
        for part in units:
            companions = loss.companions([sample for unit in part for sample in unit])
            mismatched += [[sample] for sample in companions]
    found = with_streams(
        [*every, *mismatched],
        Path(cfg.run.dir) / "reference.safetensors",
        name,
        backend.budget,
        ask,
        share=backend.share,
    )
    if mismatched:
        loss.fixed = {
            sample.uid.removesuffix(MISMATCHED): sample for (sample,) in found[len(every) :]
        }
    return found[: len(train)], found[len(train) : len(every)]


def kept_tokens(cfg: Config) -> Path:
    """Where a teacher's likeliest tokens are kept."""
    return Path(cfg.run.dir) / "teacher.safetensors"


def precompute_teacher(
    inputs: RunInputs, policy: PackedModel, backend: Backend, units: Split
) -> Split:
    """The units with the teacher's likeliest tokens, from the run's directory or from the teacher,
    who is not needed afterwards. Where the teacher is the backend knows.
    """
    cfg = inputs.cfg.teacher
    loss = inputs.algorithm.loss
    assert cfg is not None
    assert isinstance(loss, DistillationLoss) and loss.k is not None
    k = min(loss.k, policy.config.vocab_size)
    temperature = loss.temperature

    def ask(batch: Batch) -> Streams:
        backend.annotate([batch], frozenset({TEACHER_IDS, TEACHER_LOGPROBS}))
        return {name: batch.streams[name] for name in (TEACHER_IDS, TEACHER_LOGPROBS)}

    name = f"{cfg.path}@{cfg.revision}"
    if cfg.server is not None:
        name = f"{cfg.server.model} of a server"
    train, held_out = units
    found = with_streams(
        [*train, *held_out],
        kept_tokens(inputs.cfg),
        f"{name} k={k} T={temperature}",
        backend.budget,
        ask,
    )
    backend.forget_teachers()
    return found[: len(train)], found[len(train) :]
