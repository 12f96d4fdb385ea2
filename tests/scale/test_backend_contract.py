"""The contract of backends around DeepSpeed's ZeRO, in Megatron's layers, and in an actor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from helpers.backend_contract import BackendCase, BackendContract, Load, OnTwoRanks, on_ranks
from reinforge.backends.local import LocalBackend
from reinforge.config.train import TrainConfig


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"pip install 'reinforge[{package}]'"
    )


def with_deepspeed(*args: Any) -> Any:
    from reinforge.backends.deepspeed.backend import DeepSpeedBackend

    return on_ranks(DeepSpeedBackend, *args)


def with_megatron(*args: Any) -> Any:
    from reinforge.backends.megatron.backend import MegatronBackend

    return on_ranks(MegatronBackend, *args)


def in_an_actor(started: Any, load: Load, cfg: TrainConfig, settings: dict[str, Any]) -> Any:
    from reinforge.cluster.backend import RemoteBackend

    workers, numbers = started
    name = f"policy-{next(numbers)}"
    return RemoteBackend(workers, name, _backend, load, cfg, settings, shares=True)


def _backend(
    _: dict[str, Any], load: Load, cfg: TrainConfig, settings: dict[str, Any]
) -> LocalBackend:
    return LocalBackend(load(), cfg, **settings)


def zero(stage: int, **cannot: str) -> BackendCase:
    return BackendCase(
        f"stage {stage}",
        "deepspeed",
        with_deepspeed,
        {"backend": "deepspeed", "deepspeed": {"stage": stage}},
        cannot=cannot,
    )


@needs("deepspeed")
class TestDeepSpeed(OnTwoRanks):
    cases = (zero(1, bfloat16="below, since it takes long"), zero(2), zero(3))


@pytest.mark.long
@needs("deepspeed")
class TestDeepSpeedWhole(OnTwoRanks):
    cases = (zero(0, bfloat16="gradients would be added up in bfloat16"), zero(1))


@needs("megatron")
class TestMegatron(OnTwoRanks):
    cases = tuple(
        BackendCase(
            name,
            "megatron",
            with_megatron,
            {"backend": "megatron", "tensor_parallel": tensor},
            models=("biased", "normed", "unbounded"),
            cannot={"experts": "its layers here are dense"},
        )
        for name, tensor in (("two groups of one", 1), ("one group of two", 2))
    )


@needs("ray")
class TestInAnActor(BackendContract):
    cases = (
        BackendCase(
            "actor",
            "ray",
            in_an_actor,
            cannot={
                "test_an_engine_gets_the_weights_that_train": (
                    "they stay in the actor: an engine there has them, and others are sent them"
                )
            },
        ),
    )

    @pytest.fixture(scope="class")
    def started(self) -> Iterator[Any]:
        from reinforge.cluster.ray_cluster import RayCluster
        from reinforge.config.cluster import ClusterConfig

        cfg = ClusterConfig(kind="ray", object_store_gib=0.3)
        with RayCluster.open(cfg, "cpu", ranks=1, critic=False, rewards=0) as cluster:
            yield cluster.workers("policy"), itertools.count()
