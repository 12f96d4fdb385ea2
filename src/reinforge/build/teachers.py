"""The section `teacher` becomes models, which are loaded when they are first asked."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from reinforge.backends.teachers import Teachers
from reinforge.build.inputs import RunInputs
from reinforge.build.ranks import ranks_of
from reinforge.config.model import ModelConfig
from reinforge.config.teacher import OtherTeacherConfig, TeacherConfig
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Sample
from reinforge.data.chat import Renderer
from reinforge.models.load import load_model, load_tokenizer
from reinforge.models.packed import PackedModel


def make_teachers(
    inputs: RunInputs, policy: PackedModel, rows: Iterable[Row] = ()
) -> Teachers | None:
    """The teachers of a run, not yet loaded.

    `rows`: of the data, for a teacher that reads them with another tokenizer.
    """
    cfg = inputs.cfg.teacher
    if cfg is None:
        return None
    # every rank loads them onto its own
    device = str(policy.device) if ranks_of(inputs.cfg) is None else inputs.cfg.model.device
    listed: list[TeacherConfig | OtherTeacherConfig] = [cfg, *cfg.also]
    configs = [
        ModelConfig(path=t.path, revision=t.revision, dtype=cfg.dtype, device=device)
        for t in listed
    ]
    keys = ["teacher", *(f"teacher.also.{i}" for i in range(len(cfg.also)))]
    by_rank = inputs.algorithm.loss.by_rank
    if by_rank and cfg.also:
        raise InputError("uld compares with one teacher.", where="teacher.also", fix="Remove it.")
    twins = None
    if by_rank:
        twins = _in_teachers_tokens(inputs, configs[0], rows)
    else:
        for key, config in zip(keys, configs, strict=True):
            _check_same_tokens(inputs.tokenizer, config, f"{key}.path")
    return Teachers(
        [partial(load_model, config) for config in configs], [t.weight for t in listed], twins
    )


def _check_same_tokens(tokenizer: Any, config: ModelConfig, where: str) -> None:
    """The same ids for the same texts.

    Added (control) tokens that only one of them has do no harm.
    """
    theirs = _words(load_tokenizer(config, where))
    ours = _words(tokenizer)
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


def _in_teachers_tokens(
    inputs: RunInputs, config: ModelConfig, rows: Iterable[Row]
) -> dict[str, Sample]:
    """Every row in the teacher's own tokens, by row id."""
    renderer = Renderer(load_tokenizer(config, "teacher.path"), inputs.cfg.data)
    return {row.id: renderer.training_row(row) for row in rows}
