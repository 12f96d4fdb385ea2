"""Which GPUs servers get, and what is refused before any is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from reinforge.config import server_devices
from reinforge.config.engine import SERVERS, EngineConfig, workers_of
from reinforge.config.load import config_from_dict
from reinforge.config.rules import machine
from reinforge.config.schema import Config
from reinforge.config.server_devices import place_servers, spread, stays_awake
from reinforge.core.errors import InputError

EIGHT = [str(i) for i in range(8)]


def config(engine: str = "vllm", staleness: int = 0, **section: Any) -> Config:
    return config_from_dict(
        {
            "model": {"path": "x"},
            "algorithm": {"name": "grpo"},
            "data": {"source": "x.jsonl"},
            "rewards": [{"name": "exact_number"}],
            "train": {"steps": 1},
            "run": {"dir": "r"},
            "rollout": {"engine": engine, "staleness": staleness},
            "engine": section,
        }
    )


@pytest.mark.parametrize(
    ("replicas", "workers", "want"),
    [
        (8, 1, EIGHT),
        (4, 2, ["0,1", "2,3", "4,5", "6,7"]),
        (2, 2, ["0,1", "4,5"]),
        (1, 8, ["0,1,2,3,4,5,6,7"]),
        (3, 1, ["0", "2", "5"]),
        (2, 3, ["0,1,2", "4,5,6"]),
        (3, 4, ["0,1,2,3", "4,5,6,7", "0,1,2,3"]),
    ],
)
def test_servers_are_spread_over_the_gpus(replicas: int, workers: int, want: list[str]) -> None:
    engine = EngineConfig(replicas=replicas, args={"tensor-parallel-size": workers})
    assert spread(engine, EIGHT) == tuple(want)
    placed = place_servers(engine, EIGHT)
    assert placed.devices == tuple(want) and placed.colocated


def test_where_a_trainer_is_too_a_server_is_colocated() -> None:
    apart = place_servers(EngineConfig(replicas=2, devices=["6", "7"]), EIGHT[:6])
    assert apart.devices == ("6", "7") and not apart.colocated
    mixed = place_servers(EngineConfig(replicas=2, devices=["5,6", "7"]), EIGHT[:6])
    assert mixed.colocated and [mixed.on(gpu) for gpu in ("5", "6", "4")] == [1, 1, 0]
    # one process trains on GPU 2 and sees others: its own is the first that a server gets
    assert place_servers(EngineConfig(), ["2"], ["0", "1"]).devices == ("2",)
    assert place_servers(EngineConfig(replicas=3), ["2"], ["0", "1"]).devices == ("2", "0", "1")
    # nobody trains on a GPU, or the servers are somebody else's
    assert place_servers(EngineConfig(replicas=2), []).devices == ()
    assert place_servers(EngineConfig(address=["http://a"]), EIGHT).devices == ()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match=r"engine.args: a server of 4 workers needs as many GPUs"):
        place_servers(EngineConfig(args={"tp-size": 4}), EIGHT[:2])
    with pytest.raises(InputError, match=r"3 servers are on GPU 0, each with 0.4.*at most 0.33"):
        place_servers(EngineConfig(replicas=3), ["0"])
    assert place_servers(EngineConfig(replicas=3, memory=0.33), ["0"]).devices == ("0",) * 3
    with pytest.raises(InputError, match=r"2 servers are on GPU 3, each with 0.6"):
        place_servers(EngineConfig(replicas=2, devices=["2,3", "3,4"], memory=0.6), ["0"])
    with pytest.raises(ValidationError, match=r"'2' are 1 GPUs for a replica of 2 workers"):
        EngineConfig(devices=["2"], args={"tensor_parallel_size": 2})
    assert workers_of(EngineConfig(devices=["2,3"], args={"--tensor-parallel-size": "2"})) == 2


@pytest.mark.parametrize("channel", ["ipc", "api"])
def test_handles_and_groups_do_not_reach_colocated_servers(channel: Any) -> None:
    """Handles are of one GPU; NCCL has no two processes on one."""
    spread_out = EngineConfig(replicas=2, channel=channel)
    with pytest.raises(InputError, match=r"engine.channel: weights that GPU 0 has.*Use memory"):
        place_servers(spread_out, ["0", "1"])
    assert place_servers(EngineConfig(channel=channel), ["0", "1"]).devices == ("0",)
    own = EngineConfig(replicas=2, channel=channel, devices=["2", "3"])
    assert not place_servers(own, ["0", "1"]).colocated


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def told(count: int, *devices: str, **more: Any) -> list[str]:
        monkeypatch.setattr(machine, "gpus_here", lambda: count)
        cfg = config(python="/bin/sh", replicas=len(devices), devices=list(devices))
        return [problem.why for problem in machine.missing(cfg.model_copy(update=more))]

    assert told(4, "0", "3") == [] == told(0, "9") == told(4, "GPU-12ab")
    assert told(4, "0", "3,4") == ["there is no GPU 4: this machine has 4, from 0."]


def test_what_does_not_sleep_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not stays_awake(config("native"))
    for server in SERVERS:
        assert stays_awake(config(server, sleep="never"))
        assert stays_awake(config(server, staleness=1))  # it generates while the policy trains
        assert not stays_awake(config(server, sleep="never", address=["http://a"]))
        assert stays_awake(config(server)) == (not SERVERS[server].sleeps)
    monkeypatch.setitem(server_devices.SERVERS, "vllm", replace(SERVERS["vllm"], sleeps=False))
    assert stays_awake(config("vllm"))
