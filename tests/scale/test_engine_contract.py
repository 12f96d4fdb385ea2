"""The contract of engines on ranks and in actors. That of vLLM is in test_vllm_engine.py, beside
the server that it needs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

from helpers.engine_contract import EngineCase, EngineContract, Middle
from helpers.native_engines import break_native, native_idle
from helpers.toys import make_model, train_config
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.local import LocalBackend
from reinforge.cluster.data_parallel import DataParallelEngine, RankEngine
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.models.causal import CausalModel


def native(stop_tokens: Sequence[int] = ()) -> NativeEngine:
    return NativeEngine(make_model(), kv_gib=0.01, stop_tokens=stop_tokens)


# ---- on ranks ----


def data_parallel(ranks: Ranks, **settings: Any) -> DataParallelEngine:
    return DataParallelEngine(ranks, native(**settings), partial(native, **settings))


def rank_idle(rank: RankEngine) -> bool:
    return native_idle(rank.engine)


class TestDataParallel(EngineContract):
    cases = (
        EngineCase(
            name="data parallel",
            implementation="DataParallelEngine",
            make=data_parallel,
            weights=lambda _, e: Weights("shared", module=e.own.model.module),
            idle=lambda e: not e._waiting and all(e.ranks.call(e.id, rank_idle)),
            patience=30.0,
            cannot={
                "test_an_update_in_the_middle_of_a_completion": (
                    "a round is answered with the weights that it began with"
                ),
                "test_errors_reach_every_caller_and_nobody_hangs": (
                    "a rank that fails ends the run: tests/e2e/test_fsdp_ranks.py"
                ),
            },
        ),
    )

    @pytest.fixture(scope="class")
    def started(self) -> Iterator[Ranks]:
        with Ranks.open(2, "cpu") as opened:
            yield opened


# ---- in an actor ----


class Actors:
    """One actor that trains and one that generates."""

    def __init__(self, cluster: Any):
        from reinforge.cluster.backend import RemoteBackend

        self.cluster = cluster
        self.backend = RemoteBackend(cluster.workers("policy"), "policy", _backend, shares=False)
        cluster.workers("engine", 0).make("model", _model)
        self.numbers = itertools.count()

    def make(self, stop_tokens: Sequence[int] = ()) -> Any:
        from reinforge.cluster.engine import RemoteEngine

        name = f"engine-{next(self.numbers)}"
        workers = [partial(self.cluster.workers, "engine", 0)]
        return RemoteEngine(self.cluster, workers, name, _engine, tuple(stop_tokens), shares=False)


def _backend(_: dict[str, Any]) -> LocalBackend:
    return LocalBackend(make_model(), train_config(), total_steps=9)


def _model(_: dict[str, Any]) -> CausalModel:
    return make_model()


def _engine(objects: dict[str, Any], stop_tokens: tuple[int, ...]) -> NativeEngine:
    return NativeEngine(objects["model"], kv_gib=0.01, stop_tokens=stop_tokens)


def there(engine: Any, function: Callable[[NativeEngine], Any]) -> Any:
    """What the function says of the engine in its actor."""
    return engine.replicas[0].workers.apply(engine.name, function)


def broken_there(engine: NativeEngine) -> None:
    engine.repair = break_native(engine)  # type: ignore[attr-defined]


def repaired_there(engine: NativeEngine) -> None:
    engine.repair()  # type: ignore[attr-defined]


def slow_there(engine: NativeEngine) -> None:
    """A pass takes so long that an update finds a request in the middle of its answer."""
    hidden = engine.model.hidden
    engine.passes = 0  # type: ignore[attr-defined]

    def slow(*args: Any, **named: Any) -> Any:
        time.sleep(0.05)
        engine.passes += 1  # type: ignore[attr-defined]
        return hidden(*args, **named)

    engine.model.hidden = slow  # type: ignore[method-assign]


def fast_there(engine: NativeEngine) -> None:
    del engine.model.hidden


def passes_there(engine: NativeEngine) -> int:
    passes: int = engine.passes  # type: ignore[attr-defined]
    return passes


@asynccontextmanager
async def held_in_an_actor(engine: Any) -> AsyncIterator[Middle]:
    there(engine, slow_there)

    async def middle() -> None:
        before = there(engine, passes_there)
        while there(engine, passes_there) < before + 3:
            await asyncio.sleep(0.01)

    yield middle
    there(engine, fast_there)


def break_actor(engine: Any) -> Callable[[], None]:
    there(engine, broken_there)
    return lambda: there(engine, repaired_there)


@pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'reinforge[ray]'")
class TestInAnActor(EngineContract):
    cases = (
        EngineCase(
            name="actor",
            implementation="RemoteEngine",
            make=lambda actors, **settings: actors.make(**settings),
            weights=lambda actors, _: actors.backend.weights(),
            idle=lambda e: there(e, native_idle),
            breaks=break_actor,
            held=held_in_an_actor,
            patience=30.0,
        ),
    )

    @pytest.fixture(scope="class")
    def started(self) -> Iterator[Actors]:
        from reinforge.cluster.ray_cluster import RayCluster
        from reinforge.config.cluster import ClusterConfig

        cfg = ClusterConfig(kind="ray", layout="split", engines=1, object_store_gib=0.3)
        with RayCluster.open(cfg, "cpu", ranks=1, critic=False, rewards=0) as cluster:
            yield Actors(cluster)
