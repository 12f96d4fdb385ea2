"""The section `teacher` becomes models, which are loaded when they are first asked, and clients of
servers, which are asked at once whether they can be teachers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from reinforge.algorithms.losses.distillation import DistillationLoss
from reinforge.backends.teachers import DomainTeachers, LocalTeacher, TeacherModel, Teachers
from reinforge.build.inputs import RunInputs
from reinforge.build.precompute import kept_tokens
from reinforge.build.ranks import ranks_of
from reinforge.config.model import ModelConfig
from reinforge.config.teacher import OneTeacherConfig, TeacherConfig
from reinforge.core.backend import TEACHER_LOGPROBS
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Sample
from reinforge.core.token_text import token_text
from reinforge.data.chat import Renderer
from reinforge.engines.served_teacher import ServedTeacher
from reinforge.models.load import load_model, load_tokenizer
from reinforge.models.packed import PackedModel

PROBE_TEXT = "def f(x):\n    return 3.14159 * x**2  # The area, naïve: 1,000 km² 你好\n"
PROBED_ROWS = 4


def make_teachers(
    inputs: RunInputs, policy: PackedModel, rows: Iterable[Row] = (), longest: int = 0
) -> Teachers | None:
    """The teachers of a run, not yet loaded. Servers are asked whether they can be teachers.

    `rows`: of the data, for a teacher that reads them with another tokenizer. `longest`: tokens of
    the longest text, where that is known.
    """
    cfg = inputs.cfg.teacher
    if cfg is None:
        return None
    # every rank loads them onto its own
    device = str(policy.device) if ranks_of(inputs.cfg) is None else inputs.cfg.model.device
    loss = inputs.algorithm.loss
    k = 0
    temperature = 1.0
    if TEACHER_LOGPROBS in loss.needs or cfg.precompute:
        assert isinstance(loss, DistillationLoss) and loss.k is not None
        k = min(loss.k, policy.config.vocab_size)
        temperature = loss.temperature
    make = partial(_make_teacher, inputs, device, k, longest, policy.config.vocab_size)
    if cfg.domains:
        apart = [Teachers([make(key, one)], [1.0]) for key, one in cfg.teachers()]
        return DomainTeachers(apart, k, temperature)
    members = [make(key, one) for key, one in cfg.teachers()]
    twins = _in_teachers_tokens(inputs, cfg, device, rows) if loss.by_rank else None
    weights = [cfg.weight, *(other.weight for other in cfg.also)]
    return Teachers(members, weights, twins, k, temperature)


def _make_teacher(
    inputs: RunInputs,
    device: str,
    k: int,
    longest: int,
    vocabulary: int,
    key: str,
    one: OneTeacherConfig,
) -> TeacherModel:
    section = inputs.cfg.teacher
    assert section is not None
    if one.server is not None:
        served = ServedTeacher(one.server, key, vocabulary)
        # what was kept of it in an earlier start of the run is all that is needed
        if not (section.precompute and kept_tokens(inputs.cfg).exists()):
            served.check(inputs.tokenizer, k, _probe_texts(inputs), longest)
        return served
    config = teacher_model(one, section, device)
    if not inputs.algorithm.loss.by_rank:
        _check_same_tokens(inputs.tokenizer, config, f"{key}.path")
    teacher = LocalTeacher(partial(load_model, config))
    if inputs.cfg.rollout.overlap:
        teacher.load()  # which sets torch's precision for all threads, while one generates
    return teacher


def _probe_texts(inputs: RunInputs) -> list[str]:
    """Texts that a teacher must split as the student does: ours, and some of the data."""
    found = [PROBE_TEXT]
    for row in inputs.train_rows[:PROBED_ROWS]:
        prompt = token_text(inputs.tokenizer, inputs.renderer.prompt(row), special=False)
        answer = row.columns.get("completion")
        found.append(prompt + answer if isinstance(answer, str) else prompt)
    return found


def teacher_model(one: OneTeacherConfig, section: TeacherConfig, device: str) -> ModelConfig:
    """The section `model` of a teacher that is loaded."""
    assert one.path is not None, "the rules of the config refuse it"
    return ModelConfig(path=one.path, revision=one.revision, dtype=section.dtype, device=device)


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
    inputs: RunInputs, section: TeacherConfig, device: str, rows: Iterable[Row]
) -> dict[str, Sample]:
    """Every row in the teacher's own tokens, by row id."""
    config = teacher_model(section, section, device)
    renderer = Renderer(load_tokenizer(config, "teacher.path"), inputs.cfg.data)
    return {row.id: renderer.training_row(row) for row in rows}
