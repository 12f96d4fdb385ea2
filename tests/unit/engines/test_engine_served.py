"""Served engines without servers: weights that move at the same moment as a replica comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from torch import nn

from helpers.toys import run
from reinforge.config.engine import SERVERS, EngineConfig, EngineName
from reinforge.core.constraint import Constraint
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.weights import Weights
from reinforge.engines.served.dialect import OnOutput, SampleOutput, SampleRequest, ServerSetup
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.served.http import ServerClient, ServerFault
from reinforge.engines.served.make import make_dialect


class OneSlot:
    """Servers that hold one set of staged weights, as our plug-in does, and take their time.

    A token's log-prob tells what is served.
    """

    name = "one-slot"
    channels = ("files",)
    unknown_path = "They know all paths."

    def __init__(self) -> None:
        self.slots: dict[str, int | None] = {}
        self.served: dict[str, int] = {}
        self.seconds = 0.0
        self.lost: list[Any] = []  # replicas that die while they stage

    def command(self, setup: ServerSetup, python: str, port: int) -> list[str]:
        raise AssertionError("they run already")

    def environment(self, setup: ServerSetup, key: str) -> dict[str, str]:
        return {}

    async def status(self, http: ServerClient, setup: ServerSetup) -> dict[str, Any]:
        return {}  # nothing to tell is ready too

    async def generate(
        self,
        http: ServerClient,
        requests: Sequence[SampleRequest],
        params: Sampling,
        stops: frozenset[int],
        on_output: OnOutput | None = None,
    ) -> list[SampleOutput]:
        await asyncio.sleep(0.005)
        return [
            SampleOutput(
                [7] * r.max_tokens, [-float(self.served[http.address])] * r.max_tokens, "length"
            )
            for r in requests
        ]

    async def score(self, http: ServerClient, tokens: Sequence[int]) -> list[float]:
        return [0.0] * len(tokens)

    async def stage(self, http: ServerClient, message: Mapping[str, Any]) -> None:
        await asyncio.sleep(self.seconds)
        assert Path(message["folder"], "manifest.json").exists()
        self.slots[http.address] = message["version"]
        while self.lost:
            replica = self.lost.pop()
            replica.stop()
            replica.start()
            await replica.ready()
            self.slots[http.address] = None

    async def commit(
        self, http: ServerClient, version: int, fix_head: bool, keep: bool = False
    ) -> float:
        await asyncio.sleep(self.seconds)
        if self.slots.get(http.address) != version:
            raise ServerFault(
                f"version {version} was to be served, and {self.slots.get(http.address)} is staged"
            )
        self.slots[http.address], self.served[http.address] = None, version
        return 0.0

    async def abort(self, http: ServerClient) -> None: ...
    async def sleep(self, http: ServerClient, level: int) -> None: ...
    async def wake(self, http: ServerClient, level: int) -> None: ...


def made(folder: Path, replicas: int) -> tuple[ServedEngine, OneSlot, Weights]:
    dialect = OneSlot()
    module = nn.Linear(2, 2)
    cfg = EngineConfig(address=[f"http://replica-{i}" for i in range(replicas)])
    engine = ServedEngine(
        ServerSetup("vllm", cfg, "model", folder, "float32", "cpu", 128, 64), dialect
    )
    engine.transfer.pairs = lambda weights: iter([("weight", module.weight.detach())])  # type: ignore[method-assign]
    return engine, dialect, Weights("shared", module=module)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.06, 0.08])
def test_a_replica_that_comes_back_during_an_update(
    tmp_path: Path, replicas: int, delay: float
) -> None:
    """It must not stage the weights of before into the place of the new ones, nor fail who waits
    for it.
    """
    engine, dialect, weights = made(tmp_path, replicas)

    async def work() -> None:
        await engine.update(weights, 1)
        engine.replicas[-1].stop()
        dialect.seconds = 0.05
        asked = asyncio.ensure_future(engine.generate([1], Sampling(3), key=1))
        await asyncio.sleep(delay)
        await engine.update(weights, 2)
        done = [*await asked, *await engine.generate([1], Sampling(3), key=2)]
        assert all(
            done_.logprobs == [-float(v) for v in done_.versions] for done_ in done
        ) and done[1].versions == [2, 2, 2]
        assert [r.failures for r in engine.replicas] == [0] * replicas
        while any(r.version != 2 for r in engine.replicas):
            await engine.generate([1], Sampling(1), key=3)
        assert set(dialect.served.values()) == {2}

    run(asyncio.wait_for(work(), 20))
    engine.close()


def test_a_replica_that_was_lost_after_it_staged_is_not_asked_to_serve_it(tmp_path: Path) -> None:
    engine, dialect, weights = made(tmp_path, 2)

    async def work() -> None:
        await engine.update(weights, 1)
        dialect.lost.append(engine.replicas[0])
        await engine.update(weights, 2)
        assert engine.replicas[1].version == 2
        while engine.replicas[0].version != 2:
            assert (await engine.generate([1], Sampling(1), key=3))[0].versions == [2]
        assert set(dialect.served.values()) == {2}

    run(asyncio.wait_for(work(), 20))
    engine.close()


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (Sampling(4, top_k=3), "knows no top_p, top_k and min_p"),
        (Sampling(4, stop_strings=("x",)), "stops at tokens, not at strings"),
        (Sampling(4, constraint=Constraint("json_object")), "no answers of a given form"),
    ],
)
def test_what_a_server_cannot_do_is_never_asked_of_its_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: Sampling, why: str
) -> None:
    engine, _, weights = made(tmp_path, 1)
    run(engine.update(weights, 1))
    assert run(engine.generate([1], params, key=1))
    facts = replace(
        SERVERS["vllm"], filters=False, stop_strings=False, structured=False, sleeps=False
    )
    monkeypatch.setitem(SERVERS, "vllm", facts)
    with pytest.raises(InputError, match=why):
        run(engine.generate([1], params, key=1))
    awake = replace(engine.setup, device="cuda", cfg=EngineConfig(sleep="all"))
    assert awake.sleep_level == 0
    engine.close()


def test_config_and_engines_know_the_same_servers() -> None:
    assert get_args(EngineName) == ("native", *SERVERS)
    for name in SERVERS:
        dialect = make_dialect(name)
        assert dialect.name == name
        assert ("ipc" in dialect.channels) == SERVERS[name].ipc
        assert dialect.unknown_path
