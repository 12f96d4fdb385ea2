"""What README and the home page have a newcomer type first, typed. Its shorter siblings parse the
same lines (tests/arch/test_doc_commands.py) and run the same recipe (tests/e2e/test_recipes.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.doc_snippets import snippets
from helpers.source_tree import ROOT


def first_block(page: str) -> str:
    return next(s.text for s in snippets("sh") if s.page == ROOT / page)


def test_readme_and_home_say_the_same() -> None:
    def commands(page: str) -> list[str]:
        return [line.partition("#")[0].strip() for line in first_block(page).splitlines()]

    assert commands("README.md") == commands("docs/index.md")
    assert [line.split()[1] for line in commands("README.md")] == ["tiny", "train", "chat"]


@pytest.mark.long
def test_the_first_lines_of_the_readme(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", first_block("README.md")],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
        input="3+4+5=\n",
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (tmp_path / "runs/algorithms/grpo/metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    accuracy = [line["eval/accuracy"] for line in found if "eval/accuracy" in line]
    assert accuracy[-1] > accuracy[0] + 0.05
    assert re.search(r"^> \d+$", done.stdout, re.MULTILINE), done.stdout  # what chat answered
