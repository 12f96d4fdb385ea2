"""The section `algorithm` becomes an algorithm: names and `file.py:function` become functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reinforge.algorithms.algorithm import Algorithm
from reinforge.algorithms.build import build as build_algorithm
from reinforge.config.algorithm import AlgorithmConfig
from reinforge.rewards.build import load_function


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
    )
