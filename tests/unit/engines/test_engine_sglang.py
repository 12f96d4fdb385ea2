"""What an SGLang server is told. What its dialect owes is in test_dialects.py, over a stub."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from reinforge.config.engine import EngineConfig
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.sglang import Sglang


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_command(tmp_path: Path, device: str) -> None:
    setup = ServerSetup(
        kind="sglang",
        cfg=EngineConfig(memory=0.3),
        model="/m",
        folder=tmp_path,
        dtype="float32",
        device=device,
        context=4096,
        vocabulary=100,
        longest=1280,
    )
    found = Sglang().command(setup, "py", 5)
    asked = dict(pairwise(found))
    assert found[:2] == ["py", "-c"] and asked["--host"] == "127.0.0.1" and asked["--port"] == "5"
    assert asked["--dtype"] == "float32" and asked["--context-length"] == "1281"
    assert asked["--mem-fraction-static"] == "0.3"
    assert "--enable-deterministic-inference" in found
    assert ("--enable-memory-saver" in found) == (device == "cuda")
    assert ("--device" in found) == (device == "cpu")
