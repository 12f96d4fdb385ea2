"""The section `algorithm` becomes an algorithm: names and `file.py:function` become functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reinforge.algorithms.algorithm import Algorithm
from reinforge.algorithms.build import build as build_algorithm
from reinforge.algorithms.losses.distillation import DistillationLoss
from reinforge.algorithms.losses.value import PolicyAndValueLoss, ValueLoss
from reinforge.config.algorithm import AlgorithmConfig, ReferenceConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.rewards.build import load_function

VALUE_COEFFICIENT = 0.5  # of a shared critic's loss, unless told otherwise


def algorithm_of(
    cfg: AlgorithmConfig, max_new_tokens: int, weights: Mapping[str, float] | None = None
) -> Algorithm:
    """The algorithm that the section describes.

    `file.py:function` in place of a part's name is loaded. `weights` of the rewards, for advantages
    that look at each of them by itself.
    """

    def part(value: str | None, key: str) -> Any:
        return load_function(value, f"algorithm.{key}") if value and ":" in value else value

    return build_algorithm(
        cfg.name,
        advantage=part(cfg.advantage, "advantage"),
        surrogate=part(cfg.surrogate, "surrogate"),
        reduce=part(cfg.reduce, "reduce"),
        correction=part(cfg.correction.name, "correction.name"),
        cap=cfg.correction.cap,
        floor=cfg.correction.floor,
        selection=part(cfg.selection, "selection"),
        selected=cfg.selected,
        penalty=cfg.penalty,
        settings=cfg.options,
        weights=weights,
        scale=cfg.scale,
        std=cfg.std,
        eps=cfg.eps,
        advantage_clip=cfg.advantage_clip,
        clip_low=cfg.clip.low,
        clip_high=cfg.clip.high,
        clip_dual=cfg.clip.dual,
        clip_delta=cfg.clip.delta,
        kl_coefficient=cfg.kl.coefficient,
        kl_estimator=part(cfg.kl.estimator, "kl.estimator"),
        kl_placement=cfg.kl.placement,
        kl_importance=cfg.kl.importance,
        kl_clamp=cfg.kl.clamp,
        kl_target=cfg.kl.target,
        kl_horizon=cfg.kl.horizon,
        entropy=cfg.entropy,
        entropy_target=cfg.entropy_target,
        entropy_rate=cfg.entropy_rate,
        entropy_max=cfg.entropy_max,
        nll=cfg.nll,
        old=cfg.old,
        overlong=cfg.overlong,
        overlong_buffer=cfg.overlong_buffer,
        dynamic_sampling=cfg.dynamic_sampling,
        max_new_tokens=max_new_tokens,
        updates=cfg.epochs * cfg.minibatches,
        beta=cfg.beta,
        label_smoothing=cfg.label_smoothing,
        losses=cfg.losses or None,
        attributes=cfg.attributes or None,
    )


def make_algorithm(cfg: Config, weights: Mapping[str, float]) -> Algorithm:
    """The algorithm of a run, with the loss of a critic that shares the policy's trunk."""
    algorithm = algorithm_of(algorithm_section(cfg), cfg.rollout.max_new_tokens, weights)
    algorithm = _taught(algorithm, cfg)
    if not cfg.algorithm.rl:
        return algorithm
    _check_critic(cfg, algorithm)
    if cfg.critic is None or not cfg.critic.shared:
        return algorithm
    value_loss = ValueLoss(cfg.critic.clip)
    coefficient = cfg.critic.coefficient or VALUE_COEFFICIENT
    return replace(algorithm, loss=PolicyAndValueLoss(algorithm.loss, value_loss, coefficient))


def _taught(algorithm: Algorithm, cfg: Config) -> Algorithm:
    """The algorithm told who its teachers are: by which domains, and that those behind a server or
    in actors of their own tell their best tokens and no more.
    """
    loss = algorithm.loss
    teacher = cfg.teacher
    if teacher is None:
        return algorithm
    loss.name_domains(tuple(teacher.domains))
    elsewhere = teacher.served or cfg.cluster.teacher.apart
    if elsewhere and isinstance(loss, DistillationLoss) and loss.k is not None:
        loss.ask_best()
        return replace(algorithm, needs=algorithm.needs | loss.needs)
    return algorithm


def _check_critic(cfg: Config, algorithm: Algorithm) -> None:
    """A critic is there exactly where the advantage reads values."""
    reads = "values" in algorithm.needs
    if reads and cfg.critic is None:
        raise InputError(
            "the advantage needs the values of a critic.",
            where="critic",
            fix="Add `critic: {}`.",
        )
    if cfg.critic is not None and not reads:
        raise InputError(
            "the advantage reads no values, so there is nothing that a critic could be for.",
            where="critic",
            fix=(
                "Remove the section; a function of your own says `function.needs ="
                " frozenset({'values'})`."
            ),
        )


def algorithm_section(cfg: Config) -> AlgorithmConfig:
    """The section `algorithm`; with replay or staleness and no correction, the ratio is taken to
    the policy that sampled (old: engine).
    """
    on_policy = cfg.sampling.replay is None and cfg.rollout.staleness == 0
    if (
        on_policy
        or cfg.algorithm.correction.name != "none"
        or not cfg.algorithm.rl
        or cfg.algorithm.old == "recompute"
    ):
        return cfg.algorithm
    return cfg.algorithm.model_copy(update={"old": "engine"})


def reference_of(cfg: Config, algorithm: Algorithm) -> ReferenceConfig | None:
    """The reference that a run compares with: as the config says, or where that says nothing, as
    the algorithm does (tr_dpo). None: it has none.
    """
    if "reference" not in algorithm.needs | algorithm.loss.needs:
        return None
    asked = cfg.algorithm.kl.reference
    if asked != ReferenceConfig():
        return asked
    return ReferenceConfig(**algorithm.options.reference)
