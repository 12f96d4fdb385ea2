"""Models that are never trained and have actors of their own: which a run has, and what they are
made from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from reinforge.backends.local import LocalBackend
from reinforge.backends.teachers import LocalTeacher, Teachers
from reinforge.build.algorithm import algorithm_of, algorithm_section, reference_of
from reinforge.build.engines import answer_form
from reinforge.build.inputs import ModelInputs
from reinforge.build.policy import compiles, host_memory, load_policy
from reinforge.build.ranks import backend_on_ranks, ranks_of
from reinforge.build.teachers import teacher_model
from reinforge.config.cluster import FrozenRoleConfig
from reinforge.config.model import ModelConfig
from reinforge.config.optimizer import OptimizerConfig
from reinforge.config.schema import Config
from reinforge.config.teacher import OneTeacherConfig
from reinforge.core.backend import Backend
from reinforge.core.errors import InputError
from reinforge.models.adapters import begins_as_base
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_model


def reference_apart(cfg: Config) -> bool:
    """Whether the run has a reference with actors of its own. One that is asked for and not there
    is an error: its devices would wait for nothing.
    """
    if not cfg.cluster.reference.apart:
        return False
    algorithm = algorithm_of(algorithm_section(cfg), cfg.rollout.max_new_tokens)
    if reference_of(cfg, algorithm) is None:
        raise InputError(
            f"{cfg.algorithm.name} compares with no reference here, so there is none to place.",
            where="cluster.reference",
            fix="Remove it, or set algorithm.kl.coefficient.",
        )
    return True


def teachers_apart(cfg: Config) -> list[OneTeacherConfig]:
    """The teachers with actors of their own: all that are no servers, where that is asked for."""
    return cfg.teacher.loaded() if cfg.teacher is not None and cfg.cluster.teacher.apart else []


def inside_frozen(inputs: ModelInputs, role: FrozenRoleConfig) -> ModelInputs:
    """The inputs in the actors of such a model: it is whole in one process or cut by FSDP2, and
    nothing of the section `train` is left that only training reads.
    """
    train = inputs.cfg.train.model_copy(
        update={
            "backend": "fsdp" if role.ranks > 1 else "local",
            "ranks": role.ranks if role.ranks > 1 else None,
            "sequence_parallel": 1,
            "tensor_parallel": 1,
            "offload_weights": False,
            "optimizer": OptimizerConfig(),
            "freeze": [],
            "only": [],
            "ema": None,
            "neftune": None,
            "router_aux_loss": None,
            "router_z_loss": 0.0,
            "router_bias_rate": 0.0,
            "router_replay": "off",
        }
    )
    return replace(inputs, cfg=inputs.cfg.model_copy(update={"train": train}), trains=False)


# ---- in an actor ----


def make_reference(inputs: ModelInputs, temperature: float) -> Backend:
    """The policy that the run starts from, as a backend that is only asked for log-probs."""
    cfg = inputs.cfg
    return _frozen_backend(cfg, cfg.model, partial(_load_reference, inputs), temperature)


def make_teacher(
    inputs: ModelInputs, one: OneTeacherConfig, temperature: float, best_of: tuple[int, float]
) -> Backend:
    """A teacher, likewise. `best_of`: how many of its likeliest tokens are wanted, and at which
    temperature.
    """
    cfg = inputs.cfg
    assert cfg.teacher is not None
    model = teacher_model(one, cfg.teacher, cfg.model.device)
    # the student's products may be in FP8
    train = cfg.train.model_copy(update={"precision": "model"})
    cfg = cfg.model_copy(update={"train": train})
    return _frozen_backend(cfg, model, partial(_load_teacher, model), temperature, best_of)


def _frozen_backend(
    cfg: Config,
    section: ModelConfig,
    load: Callable[[bool], CausalModel],
    temperature: float,
    best_of: tuple[int, float] = (0, 1.0),
) -> Backend:
    """Of the model that `section` describes; `load(True)` loads it into host memory."""
    ranks = ranks_of(cfg)
    settings: dict[str, Any] = {"total_steps": 1, "temperature": temperature}
    if ranks is not None:
        return backend_on_ranks(cfg.train.backend)(
            ranks, partial(load, True), cfg.train, compiled=compiles(section), **settings
        )
    model = load(False)
    k, at = best_of
    itself = Teachers([LocalTeacher(lambda: model)], [1.0], k=k, temperature=at)
    return LocalBackend(model, cfg.train, teachers=itself, **settings)


def _load_reference(inputs: ModelInputs, in_host_memory: bool) -> CausalModel:
    """With an adapter that is new the adapter goes off for good."""
    model = load_policy(inputs.cfg, scores=False, in_host_memory=in_host_memory)
    assert isinstance(model, CausalModel)
    if begins_as_base(model.module):
        cast(Any, model.module.base_model).disable_adapter_layers()
    if not in_host_memory:
        model.form = answer_form(inputs, model)
    model.module.requires_grad_(False)
    return model


def _load_teacher(section: ModelConfig, in_host_memory: bool) -> CausalModel:
    model = load_model(host_memory(section) if in_host_memory else section)
    model.module.requires_grad_(False)
    return model
