"""The contract of engines that need nothing but torch. Those on ranks, in actors and in vLLM are in
tests/scale/test_engine_contract.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.engine_contract import EngineCase, EngineContract, Middle
from helpers.fake_engine import FakeEngine
from helpers.native_engines import break_native, native_idle
from helpers.stub_servers import STUBS, Stub, StubServers, told
from helpers.toys import VOCABULARY, ToyTokenizer, make_model
from reinforge.core.engine import Completion, Sampling
from reinforge.core.weights import Weights
from reinforge.engines.beside import EngineBeside, WeightCopy
from reinforge.engines.native import NativeEngine
from reinforge.engines.native.blocks import BlockPool
from reinforge.engines.resumable import ResumableRequests
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.with_opponent import EngineWithOpponent


def native(_: None, **settings: Any) -> NativeEngine:
    return NativeEngine(make_model(), kv_gib=0.01, **settings)


def small(_: None, **settings: Any) -> NativeEngine:
    """Waiting, forks cut in two, and one sequence at a time are its everyday life."""
    engine = NativeEngine(make_model(), max_batch=3, **settings)
    engine.blocks = 8
    engine.pool = BlockPool(8, 16)
    return engine


def beside(_: None, **settings: Any) -> EngineBeside:
    """With a copy of what a trainer changes."""
    trained, copy = make_model(), make_model()
    return EngineBeside(NativeEngine(copy, kv_gib=0.01, **settings), WeightCopy(copy, trained))


def with_opponent(_: None, **settings: Any) -> EngineWithOpponent:
    """Two that generate with one module, as a policy and its mixture with the reference do."""
    model = make_model()
    first, second = (NativeEngine(model, kv_gib=0.01, **settings) for _ in range(2))
    return EngineWithOpponent(first, second)


def fake(_: None, **settings: Any) -> FakeEngine:
    return FakeEngine(vocabulary=VOCABULARY, decode=ToyTokenizer().decode, **settings)


def break_fake(engine: FakeEngine) -> Callable[[], None]:
    def broken(prompt: Any, index: int) -> list[int]:
        raise RuntimeError("device lost")

    engine.script = broken
    return lambda: setattr(engine, "script", None)


class AGroupEach:
    """Resumable engines as a source of rollouts uses them: each answers for one group, and what it
    was asked once it does not generate again. Every request here is a group of its own.
    """

    stats = None
    streaming = None
    measured: dict[str, float] = {}

    def __init__(self, inner: NativeEngine):
        self.inner = inner
        self.requests = ResumableRequests(inner)
        self.groups = map(str, itertools.count())
        self.one = self.requests.engine_of("shared")
        self.update = self.one.update
        self.sleep = self.one.sleep
        self.state = self.one.state
        self.load = self.one.load
        self.close = self.one.close

    async def generate(
        self, tokens: list[int], params: Sampling, *, key: int, n: int = 1
    ) -> list[Completion]:
        engine = self.requests.engine_of(next(self.groups))
        return await engine.generate(tokens, params, key=key, n=n)


class TestInThisProcess(EngineContract):
    cases = (
        EngineCase(
            name="native",
            implementation="NativeEngine",
            make=native,
            weights=lambda _, e: Weights("shared", module=e.model.module),
            idle=native_idle,
            breaks=break_native,
        ),
        EngineCase(
            name="native, small",
            implementation="NativeEngine",
            make=small,
            weights=lambda _, e: Weights("shared", module=e.model.module),
            idle=native_idle,
            breaks=break_native,
            cannot={"test_its_state_is_for_another_of_its_kind": "its pool is put in by the test"},
        ),
        EngineCase(
            name="native, beside training",
            implementation="EngineBeside",
            make=beside,
            weights=lambda _, e: Weights("shared", module=e.weights.module),
            idle=lambda e: native_idle(e.engine),
            breaks=lambda e: break_native(e.engine),
        ),
        EngineCase(
            name="with an opponent",
            implementation="EngineWithOpponent",
            make=with_opponent,
            weights=lambda _, e: Weights("shared", module=e.first.model.module),
            idle=lambda e: native_idle(e.first) and native_idle(e.second),
            breaks=lambda e: break_native(e.first),
        ),
        EngineCase(
            name="resumable",
            implementation="ResumableEngine",
            make=lambda _, **settings: AGroupEach(native(None, **settings)),
            weights=lambda _, e: Weights("shared", module=e.inner.model.module),
            idle=lambda e: native_idle(e.inner),
            breaks=lambda e: break_native(e.inner),
        ),
        EngineCase(
            name="fake",
            implementation="FakeEngine",
            make=fake,
            weights=lambda _, e: Weights("full"),
            idle=lambda e: e.running == 0,
            breaks=break_fake,
        ),
    )


# ---- servers ----


@asynccontextmanager
async def held_at_a_server(engine: ServedEngine) -> AsyncIterator[Middle]:
    hold = Path(engine.setup.cfg.env["STUB_HOLD"])

    async def middle() -> None:
        while engine.replicas[0].load < 2 or (await told(engine))["held"] < 2:
            await asyncio.sleep(0.02)

    await engine.generate([3], Sampling(1), key=0)  # it is up
    hold.touch()
    yield middle
    hold.unlink()


def served(stub: Stub) -> EngineCase:
    """Servers of one kind. What was started has them by their kind."""
    cannot = {
        "test_errors_reach_every_caller_and_nobody_hangs": (
            "a server that breaks is started again, and asked again"
        ),
        "test_an_update_to_the_same_values_changes_no_draw": (
            "a server goes on after an update with draws of another stream"
        ),
    }
    if not stub.facts.stop_strings:
        cannot["test_stop_strings"] = "it stops at tokens only"

    def make(started: dict[str, StubServers], stop_tokens: Sequence[int] = ()) -> ServedEngine:
        return started[stub.kind].engine(stop_tokens=stop_tokens)

    return EngineCase(
        name=stub.kind,
        implementation="ServedEngine",
        make=make,
        weights=lambda started, _: started[stub.kind].weights,
        idle=lambda e: not any(r.load for r in e.replicas),
        held=held_at_a_server,
        cannot=cannot,
    )


class TestServed(EngineContract):
    cases = tuple(served(stub) for stub in STUBS)

    @pytest.fixture(scope="class")
    def started(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StubServers]]:
        yield {stub.kind: StubServers(stub, tmp_path_factory.mktemp(stub.kind)) for stub in STUBS}
