"""What an SGLang server is told. What its dialect owes is in test_dialects.py, over a stub."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.toys import run
from reinforge.config.engine import EngineConfig
from reinforge.core.constraint import Constraint
from reinforge.core.engine import Sampling
from reinforge.engines.served.dialect import SampleRequest, ServerSetup
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


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (None, {}),
        (Constraint("regex", "a|b"), {"regex": "a|b"}),
        (Constraint("json_schema", '{"a": 1}'), {"json_schema": '{"a": 1}'}),
        (Constraint("json_object"), {"json_schema": '{"type": "object"}'}),
        (Constraint("grammar", 'root ::= "a"'), {"ebnf": 'root ::= "a"'}),
    ],
)
def test_the_form_of_an_answer_in_its_words(
    constraint: Constraint | None, words: dict[str, str]
) -> None:
    asked: list[dict[str, Any]] = []

    class Http:
        async def post(self, path: str, body: dict[str, Any]) -> list[Any]:
            asked.append(body)
            return []

    params = Sampling(4, constraint=constraint)
    run(Sglang().generate(Http(), [SampleRequest([1], 2, 4)], params, frozenset()))  # type: ignore[arg-type]
    [sent] = asked[0]["sampling_params"]
    forms = {"regex", "json_schema", "ebnf", "structural_tag"}
    assert {name: value for name, value in sent.items() if name in forms} == words
