"""Who holds memory of the trainer's GPU while it trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reinforge.build.engines import keeps_memory
from reinforge.config.engine import SERVERS
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config


def config(engine: str, **section: Any) -> Config:
    return config_from_dict(
        {
            "model": {"path": "x"},
            "algorithm": {"name": "grpo"},
            "data": {"source": "x.jsonl"},
            "rewards": [{"name": "exact_number"}],
            "train": {"steps": 1},
            "run": {"dir": "r"},
            "rollout": {"engine": engine},
            "engine": section,
        }
    )


def test_what_does_not_sleep_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not keeps_memory(config("native"))
    for server in SERVERS:
        assert keeps_memory(config(server, sleep="never"))
        assert not keeps_memory(config(server, sleep="never", devices=["1"]))
        assert not keeps_memory(config(server, sleep="never", address=["http://a"]))
        assert keeps_memory(config(server)) == (not SERVERS[server].sleeps)
    monkeypatch.setitem(SERVERS, "vllm", replace(SERVERS["vllm"], sleeps=False))
    assert keeps_memory(config("vllm")) and not keeps_memory(config("vllm", devices=["1"]))
