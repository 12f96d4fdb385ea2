"""Every policy-gradient algorithm in a real run of the tiny model: what it asks for is there, and
before the first update all ratios are 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from helpers.tiny_runs import launch, lines
from reinforge.algorithms.catalogue import TABLE
from reinforge.config.schema import Config

NAMES = [name for name, row in TABLE.items() if row.family == "policy_gradient"]
MODIFIERS = {
    "icepop": ("algorithm.correction.name=icepop",),
    "delta": ("algorithm.clip.delta=4",),
    "top_entropy": ("algorithm.selection=top_entropy", "algorithm.options={top_entropy: 0.5}"),
    "off_policy_mask": ("algorithm.selection=off_policy_mask", "algorithm.options={drift: 0.1}"),
    "kl_in_reward": (
        "algorithm.kl.placement=reward",
        "algorithm.kl.coefficient=0.1",
        "algorithm.scale=none",
    ),
    "engine": ("algorithm.old=engine",),
}


@pytest.mark.parametrize("name", [*NAMES, *(f"grpo+{m}" for m in MODIFIERS)])
def test_two_updates(make: Callable[..., Config], name: str) -> None:
    algorithm, _, modifier = name.partition("+")
    sections = {"critic": {}} if TABLE[algorithm].parts["advantage"] == "gae" else {}
    cfg = make(
        "run",
        algorithm,
        "train.steps=1",
        "train.learning_rate=0",
        "algorithm.epochs=2",
        *MODIFIERS.get(modifier, ()),
        **sections,
    )
    launch(cfg)
    metrics = lines(cfg)[0]
    assert (
        metrics["train/grad_norm"] > 1e-4
        and metrics["train/skipped"] == metrics["train/empty"] == 0
        and math.isfinite(metrics["policy/loss"])
    )
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-4) and metrics[
        "policy/ratio/max"
    ] == pytest.approx(1, abs=1e-4)
    assert metrics.get("policy/clip_fraction", 0.0) == 0 and metrics["mismatch/max"] < 1e-4
    if TABLE[algorithm].parts.get("selection") or modifier in ("top_entropy", "off_policy_mask"):
        share = metrics["policy/selected"]
        assert (
            0.49 < share < 0.56
            if modifier == "top_entropy"
            else share == 0
            if modifier == "off_policy_mask"
            else 0 <= share < 0.2
        )
    if algorithm == "reinforce_pp" or modifier == "kl_in_reward":
        assert metrics["policy/kl"] == pytest.approx(0, abs=1e-5)
