"""Served engines over several servers: routing, deaths, starts that fail. The servers are the first
of the stubs; what is the same for a single server of every kind is in test_dialects.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.stub_servers import STUBS, StubServers, told, until
from helpers.toys import run
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.engines.served.make import make_served

PROMPT = [5, 9, 33]
FREE = Sampling(12, ignore_eos=True)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[StubServers]:
    made = StubServers(STUBS[0], tmp_path)
    yield made
    made.close()


def test_least_loaded_first_and_everybody_is_updated(servers: StubServers) -> None:
    engine = servers.engine(replicas=2)
    servers.hold.touch()

    async def work() -> None:
        await engine.update(servers.weights, 1)
        tasks = [
            asyncio.ensure_future(engine.generate([i], Sampling(30, ignore_eos=True), key=i, n=2))
            for i in range(3, 7)
        ]
        await until(engine, "held", 4, 4)
        assert [r.load for r in engine.replicas] == [4, 4]
        assert [(await told(engine, i))["running"] for i in (0, 1)] == [4, 4]
        servers.hold.unlink()
        await asyncio.gather(*tasks)
        servers.change(1)
        await engine.update(servers.weights, 2)
        assert [r.version for r in engine.replicas] == [2, 2]
        assert [(await told(engine, i))["loads"] for i in (0, 1)] == [2, 2]

    run(work())


def test_what_a_killed_replica_held_is_sent_to_another(servers: StubServers) -> None:
    """Nothing is lost, the samples are those that they would have been, and the dead one comes back
    with the current weights.
    """
    engine = servers.engine(replicas=2)

    async def work() -> None:
        await engine.update(servers.weights, 1)
        servers.change(1)
        await engine.update(servers.weights, 2)
        want = [
            (await engine.generate([i], Sampling(40, ignore_eos=True), key=i, n=2))
            for i in range(3, 7)
        ]
        servers.hold.touch()
        tasks = [
            asyncio.ensure_future(engine.generate([i], Sampling(40, ignore_eos=True), key=i, n=2))
            for i in range(3, 7)
        ]
        await until(engine, "held", 4, 4)
        victim = engine.replicas[1]
        assert victim.process is not None and victim.load == 4
        os.kill(victim.process.pid, signal.SIGKILL)
        servers.hold.unlink()
        assert [[c.tokens for c in found] for found in await asyncio.gather(*tasks)] == [
            [c.tokens for c in found] for found in want
        ]
        while victim.version != 2:
            await engine.generate([3], Sampling(1), key=1)
            await asyncio.sleep(0.05)
        await engine.update(servers.weights, 3)
        assert engine.measured["engine/restarts"] == 1.0
        assert victim.up and engine.restarts == 1 and (await told(engine, 1))["loads"] == 2

    run(work())


def test_a_replica_that_hangs_is_replaced(servers: StubServers) -> None:
    engine = servers.engine(health_seconds=1)
    servers.hold.touch()

    async def work() -> None:
        await engine.update(servers.weights, 1)
        task = asyncio.ensure_future(engine.generate(PROMPT, Sampling(40, ignore_eos=True), key=1))
        await until(engine, "held", 1)
        servers.hang.touch()
        servers.hold.unlink()
        while not engine.restarts:
            await asyncio.sleep(0.05)
        servers.hang.unlink()
        assert len((await task)[0].tokens) == 40 and engine.restarts >= 1

    run(work())


def test_a_server_that_does_not_start_is_a_readable_error(servers: StubServers) -> None:
    setup = servers.setup()
    (servers.model / "model.safetensors").unlink()
    engine = make_served(setup)
    with pytest.raises(InputError, match=r"FileNotFoundError.*model\.safetensors"):
        run(engine.generate(PROMPT, FREE, key=1))
    engine.close()
