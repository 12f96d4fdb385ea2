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


def test_episodes_stay_with_their_replica_until_the_weights_change(servers: StubServers) -> None:
    """Two groups of two episodes, five turns each: every turn goes where the one before was."""
    engine = servers.engine(replicas=2)
    asked: dict[tuple[int, ...], set[str]] = {}  # the servers that got these tokens
    generate = engine.dialect.generate

    def watched(http, requests, params, stops, heard):  # type: ignore[no-untyped-def]
        for request in requests:
            asked.setdefault(tuple(request.tokens), set()).add(http.address)
        return generate(http, requests, params, stops, heard)

    engine.dialect.generate = watched  # type: ignore[method-assign]

    async def episode(group: int, number: int) -> set[str]:
        tokens = [group, 7]
        places = set()
        for turn in range(5):
            [done] = await engine.generate(
                tokens, Sampling(4, ignore_eos=True), key=100 * group + 10 * number + turn
            )
            places |= asked[tuple(tokens)]
            tokens = [*tokens, *done.tokens, 9]
        return places

    async def work(kept: int) -> list[set[str]]:
        asked.clear()
        engine.router.kept = kept
        await engine.update(servers.weights, engine.version + 1)
        assert not engine.router._places
        return await asyncio.gather(*(episode(g, e) for g in (3, 4) for e in range(2)))

    found = run(work(1000))
    assert all(len(places) == 1 for places in found)
    assert found[0] == found[1] != found[2] == found[3]
    # remembering nothing, the two of a group are spread over both
    run(work(0))
    assert len(asked[3, 7]) == 2 == len(asked[4, 7])


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
        engine.router.forget()
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
        found = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert [[c.tokens for c in one] for one in found] == [
            [c.tokens for c in one] for one in want
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
