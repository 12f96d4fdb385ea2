"""Servers on the GPUs of trainers: they start, sleep and wake so that each side finds its memory.
The GPUs are files (tests/helpers/ledger_gpus.py), the servers processes; the same on ranks is in
tests/scale/test_sleeping_servers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.ledger_gpus import FOLDER, events, note, take, taken
from helpers.ledger_trainer import room
from helpers.stub_servers import StubServers, stub_of, told
from helpers.toys import run
from reinforge.config.server_devices import ServerPlacement
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.gpu_room import GpuRoom

FREE = Sampling(6, ignore_eos=True)
TWO = ServerPlacement(("0", "1,2"), colocated=True)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServers]:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    made = StubServers(stub_of("sglang"), tmp_path)
    yield made
    made.close()


def release() -> list[GpuRoom]:
    """Of three trainers."""
    note("trainers release")
    return [GpuRoom(i, str(i), room(str(i))) for i in range(3)]


def since(start: int) -> list[str]:
    return events()[start:]


@pytest.mark.parametrize("level", ["auto", "all"])
def test_all_servers_sleep_and_wake_together(servers: StubServers, level: str) -> None:
    engine = servers.engine(release, device="cuda", sleep=level, replicas=2, placed=TWO)

    async def work() -> None:
        await engine.update(servers.weights, 1)
        [before] = await engine.generate([5, 9], FREE, key=1)
        start = len(events())
        await engine.sleep()
        assert since(start)[::3] == ["trainers release"] * 2
        assert sorted(since(start)[1:3]) == ["server on 0 sleeps", "server on 1,2 sleeps"]
        assert [taken("server", gpu) for gpu in "012"] == [0, 0, 0]
        assert engine.memory.given == [32 << 30] * 3
        left = [] if level == "all" else ["weights"]
        assert [(await told(engine, i))["memory"] for i in (0, 1)] == [left] * 2
        start = len(events())
        servers.change(1)
        await engine.update(servers.weights, 2)
        found = since(start)
        assert found[0] == "trainers release"  # and only then does anybody wake
        assert sorted(found[1:3]) == ["server on 0 wakes", "server on 1,2 wakes"]
        assert sorted(found[3:5] + found[5:7]) == [
            "server on 0 loads 2",
            "server on 0 scores",
            "server on 1,2 loads 2",
            "server on 1,2 scores",
        ]
        assert len(found) == 7
        # who only asks again wakes them, too
        await engine.sleep()
        [after] = await engine.generate([5, 9], FREE, key=1)
        assert after.tokens != before.tokens and after.versions == [2] * 6
        assert [taken("server", gpu) for gpu in "012"] == [32 << 30] * 3

    run(work())


def test_nobody_wakes_where_training_keeps_too_much(servers: StubServers) -> None:
    engine = servers.engine(release, device="cuda", replicas=2, placed=TWO)

    async def work() -> None:
        await engine.update(servers.weights, 1)
        await engine.sleep()
        take("trainer", "2", 60 << 30)
        start = len(events())
        told = r"engine.memory: the server on GPU 2 gave back 32.0 GiB .* rank 2 leaves 20.0 GiB"
        with pytest.raises(InputError, match=told):
            await engine.update(servers.weights, 2)
        assert since(start) == ["trainers release"]
        take("trainer", "2", 47 << 30)
        await engine.update(servers.weights, 2)
        assert [r.version for r in engine.replicas] == [2, 2]

    run(work())


def test_servers_on_one_gpu_start_one_after_the_other(servers: StubServers) -> None:
    """Each takes its share of what it finds free."""
    together = ServerPlacement(("0", "0"), colocated=True)
    engine = servers.engine(release, device="cuda", replicas=2, memory=0.4, placed=together)
    assert engine.setup.in_turn and engine.replicas[1].process is None
    run(engine.update(servers.weights, 1))
    assert events()[:4] == ["server on 0 starts", "server on 0 is ready"] * 2
    assert [r.version for r in engine.replicas] == [1, 1]
