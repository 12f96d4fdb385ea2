"""The section `teacher` becomes models, or what was kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.algorithms.losses.distillation import DistillationLoss
from reinforge.backends.teachers import IDS, LOGPROBS, Teachers
from reinforge.build.sharded import AnyBackend
from reinforge.build.workshop import Workshop
from reinforge.config.model import ModelConfig
from reinforge.config.teacher import OtherTeacherConfig, TeacherConfig
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Sample
from reinforge.data.chat import Renderer
from reinforge.data.units import Unit
from reinforge.loops.precompute import Streams, with_streams
from reinforge.models.load import load_model, load_tokenizer


def make_teachers(shop: Workshop, rows: Sequence[Row] = ()) -> Teachers | None:
    """The teachers of a run, not yet loaded.

    `rows`: of the data, for a teacher that reads them with another tokenizer.
    """
    cfg = shop.cfg.teacher
    if cfg is None:
        return None
    # every rank loads them onto its own
    device = str(shop.model.device) if shop.ranks is None else shop.cfg.model.device
    listed: list[TeacherConfig | OtherTeacherConfig] = [cfg, *cfg.also]
    configs = [
        ModelConfig(path=t.path, revision=t.revision, dtype=cfg.dtype, device=device)
        for t in listed
    ]
    by_rank = getattr(shop.algorithm.loss, "by_rank", False)
    for key, config in zip(
        ["teacher", *(f"teacher.also.{i}" for i in range(len(cfg.also)))], configs, strict=True
    ):
        if not by_rank:
            _same_tokens(shop, config, f"{key}.path")
    if by_rank and cfg.also:
        raise InputError("uld compares with one teacher.", where="teacher.also", fix="Remove it.")
    twins = _twins(shop, configs[0], rows) if by_rank else None
    return Teachers(
        [partial(load_model, config) for config in configs], [t.weight for t in listed], twins
    )


def _same_tokens(shop: Workshop, config: ModelConfig, where: str) -> None:
    """The same ids for the same texts.

    Added (control) tokens that only one of them has do no harm.
    """
    theirs, ours = (
        _words(tokenizer) for tokenizer in (load_tokenizer(config, where), shop.model.tokenizer)
    )
    other = next(
        (token for token in {**ours, **theirs} if theirs.get(token) != ours.get(token)), None
    )
    if other is not None:
        raise InputError(
            f"{config.path} has other tokens: {other!r} is {theirs.get(other)} there and"
            f" {ours.get(other)} for the student.",
            where=where,
            fix="Use a teacher with the student's tokenizer, or the algorithm uld.",
        )


def _words(tokenizer: Any) -> dict[str, int]:
    added = tokenizer.get_added_vocab()
    return {token: i for token, i in tokenizer.get_vocab().items() if token not in added}


def _twins(shop: Workshop, config: ModelConfig, rows: Sequence[Row]) -> dict[str, Sample]:
    """Every row in the teacher's own tokens."""
    renderer = Renderer(load_tokenizer(config, "teacher.path"), shop.cfg.data)
    return {row.id: renderer.training_row(row) for row in rows}


def keep_best(shop: Workshop, backend: AnyBackend, units: Sequence[Unit]) -> list[Unit]:
    """The units with the teacher's likeliest tokens, from the run's directory or from the teacher,
    who is not needed afterwards.
    """
    cfg = shop.cfg.teacher
    loss = shop.algorithm.loss
    teachers = backend.teachers
    assert (
        cfg is not None
        and teachers is not None
        and isinstance(loss, DistillationLoss)
        and loss.k is not None
    )
    k = min(loss.k, len(shop.policy.head.weight))
    temperature = loss.temperature

    def ask(batch: Batch) -> Streams:
        ids, logprobs = teachers.best(batch.to(backend.model.device), k, temperature)
        return {IDS: ids, LOGPROBS: logprobs}

    name = f"{cfg.path}@{cfg.revision} k={k} T={temperature}"
    found = with_streams(
        units, Path(shop.cfg.run.dir) / "teacher.safetensors", name, backend.budget, ask
    )
    backend.teachers = None
    return found
