"""Runs whose sampling and training multiply in FP8."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from helpers.tiny_runs import DATA, EVAL, LORA, digest, launch, lines
from helpers.toy_rewards import odd
from helpers.toys import SilentView, make_model
from reinforge.backends.local import LocalBackend
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.train import TrainConfig
from reinforge.core.engine import Sampling
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.models.fp8_layers import Fp8Layers

FP8 = {"max_new_tokens": 8, "kv_gib": 0.01, "precision": "fp8"}


def mismatch(cfg: Any) -> float:
    """The largest of the steps."""
    return max(line["mismatch/mean"] for line in lines(cfg) if "mismatch/mean" in line)


@pytest.mark.parametrize("sections", [{}, LORA])
def test_the_mismatch_stays_small_if_training_multiplies_alike(
    make: Callable[..., Any], sections: dict[str, Any]
) -> None:
    found = {}
    for precision in ("model", "fp8"):
        cfg = make(precision, "grpo", f"train.precision={precision}", rollout=FP8, **sections)
        launch(cfg)
        found[precision] = mismatch(cfg)
    assert found["model"] > 1e-3 and found["fp8"] < 2e-5
    assert found["fp8"] < 0.02 * found["model"]


def test_a_cache_in_fp8_adds_a_little(make: Callable[..., Any]) -> None:
    """On a CPU, where the run says at its start that FP8 is emulated."""
    rollout = {**FP8, "cache_precision": "fp8"}
    cfg = make("run", "grpo", "train.precision=fp8", "model.device=cpu", rollout=rollout)
    view = SilentView()
    train_config(cfg, CallerObjects(data=DATA, rewards=[odd]), view)
    said = "train.precision, rollout.precision: a CPU does not multiply in FP8"
    assert len([told for told in view.messages if told.startswith(said)]) == 1
    assert 1e-5 < mismatch(cfg) < 0.01


def test_a_run_is_resumed_to_the_bit(make: Callable[..., Any]) -> None:
    both = {**FP8, "cache_precision": "fp8"}
    settings = ("train.precision=fp8", "run.checkpoint.every=1")
    whole = make("whole", "grpo", *settings, "train.steps=3", rollout=both)
    launch(whole)
    launch(make("cut", "grpo", *settings, "train.steps=2", rollout=both))
    cut = make("cut", "grpo", *settings, "train.steps=3", rollout=both)
    launch(cut)
    assert digest(cut) == digest(whole)


def test_supervised_training_and_its_evaluation(make: Callable[..., Any]) -> None:
    found = {}
    for precision in ("model", "fp8"):
        cfg = make(precision, "sft", f"train.precision={precision}", eval={"at_start": True})
        launch(cfg, eval_data=EVAL)
        found[precision] = [line["train/loss"] for line in lines(cfg) if "train/loss" in line]
    assert len(found["fp8"]) == 3
    for ours, plain in zip(found["fp8"], found["model"], strict=True):
        assert ours != plain and ours == pytest.approx(plain, rel=0.01)


def test_new_weights_of_the_trainer_reach_the_copies() -> None:
    """A backend that trains in FP8 and an engine on the same module."""
    model = make_model()
    backend = LocalBackend(
        model, TrainConfig(steps=1, learning_rate=0.0, precision="fp8"), total_steps=1
    )
    engine = NativeEngine(model, kv_gib=0.01, precision="fp8")
    layers = Fp8Layers.found(model)
    assert layers is engine.fp8 and layers is not None and layers.source == "fresh"

    async def answer() -> list[int]:
        return (await engine.generate([5, 6, 7], Sampling(20), key=0))[0].tokens

    first = asyncio.run(answer())
    for weight in backend.model.layers.parameters():
        weight.data.mul_(3.0)
    asyncio.run(engine.update(Weights("shared", module=model.module), 1))
    assert asyncio.run(answer()) != first
    assert layers.source == "fresh"
