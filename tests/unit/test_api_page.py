"""docs/python.md runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from helpers.source_tree import ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_page_runs(tiny_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "python.md").read_text()
    assert text.count(MODEL) == 1
    names: dict[str, Any] = {"__name__": "page"}
    for i, block in enumerate(BLOCK.findall(text.replace(MODEL, tiny_dir))):
        exec(compile(block, f"docs/python.md, block {i}", "exec"), names)
    assert names["scores"] == [{"right": 1.0, "reward": 1.0}, {"right": 0.0, "reward": 0.0}]
    assert len(names["made"].rows) == 4
    assert names["table"].index.tolist() == [1, 2] and names["step"].done
    assert len(list(Path("runs").iterdir())) == 6
