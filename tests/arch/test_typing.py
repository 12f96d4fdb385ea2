"""What a type checker sees of the package: `py.typed` promises that it sees something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.source_tree import SRC

SEEN = (
    "reinforge",
    "reinforge.version",
    "reinforge.api",
    "reinforge.build.result",
    "reinforge.build.run",
    "reinforge.loops.callbacks",
    "reinforge.loops.control",
    "reinforge.loops.open_step",
    "reinforge.config.*",
    "reinforge.core.*",
)
SETTINGS = "[mypy]\nfollow_imports = skip\nignore_missing_imports = True\n" + "".join(
    f"[mypy-{name}]\nfollow_imports = silent\n" for name in SEEN
)  # reading torch and transformers would take minutes
USE = """\
import reinforge

reveal_type(reinforge.train)
reveal_type(reinforge.evaluate)
reveal_type(reinforge.load_config)
reveal_type(reinforge.Config)
reveal_type(reinforge.Row)
reveal_type(reinforge.Sample)
reveal_type(reinforge.Group)
reveal_type(reinforge.Sampling)
reveal_type(reinforge.InputError)
result = reinforge.train(model="m", data=[{"prompt": "a"}])
reveal_type(result.steps)
for step in reinforge.Trainer("run.yaml"): reveal_type(step.rewards)
reinforge.train(model="m", stepz=3)
reinforge.tarin
"""


def test_a_type_checker_knows_the_public_names(tmp_path: Path) -> None:
    """Types, not Any; and with types a misspelt argument or name is found before anything runs."""
    (tmp_path / "use.py").write_text(USE)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=mypy.ini",
        "--cache-dir",
        str(tmp_path / "cache"),
        "use.py",
    ]
    environment = {**os.environ, "MYPYPATH": str(SRC)}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    lines = result.stdout.splitlines()
    seen = {
        int(line.split(":")[1]): line.partition('Revealed type is "')[2]
        for line in lines
        if "Revealed type" in line
    }
    assert sorted(seen) == [*range(3, 12), 13, 14], result.stdout + result.stderr
    assert not [n for n, text in seen.items() if text.startswith("Any")]
    assert "reinforge.build.result.RunResult" in seen[3] and "learning_rate" in seen[3]
    assert "reinforge.config.schema.Config" in seen[5]
    assert seen[13].startswith("int") or seen[13].startswith("builtins.int")
    assert any(line.startswith("use.py:15: error: Unexpected keyword") for line in lines), (
        result.stdout
    )
    assert any(line.startswith("use.py:16: error: Module has no attribute") for line in lines), (
        result.stdout
    )
