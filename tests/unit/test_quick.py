"""`reinforge sft MODEL DATA`: a first run from a file of one's own, and what it says of a row that is not right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from family_runs import small_model
from reinforge.app.cli import app
from reinforge.app.quick import sft_config
from reinforge.core.errors import InputError
from reinforge.watch.runs import read_lines

ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("small"))


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_one_command_trains(model: str, tmp_path: Path) -> None:
    data, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "run"
    given = ["sft", model, data, "--out", str(out), "--epochs", "4", "train.learning_rate=0.01", "model.device=cpu"]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0 and f"reinforge export {out} OUT" in result.output
    lines = [line for line in read_lines(out / "metrics.jsonl") if "train/loss" in line]
    assert len(lines) == 17  # 57 rows that are left, 14 at a time, four times
    assert lines[-1]["train/loss"] < 0.7 * lines[0]["train/loss"]
    assert json.loads((out / "config.json").read_text())["data"]["eval"]["size"] == 3  # one row in twenty


def test_settings_by_size_and_adapter(model: str, tmp_path: Path) -> None:
    few = sft_config(model, write(tmp_path / "few.jsonl", ROWS[:8]))
    assert few.data.eval.size == 0 and few.train.prompts_per_step == 2 and few.train.learning_rate == 1e-5 and few.adapter is None
    assert few.run.dir == "runs/sft-model-few"
    many = sft_config(model, write(tmp_path / "many.jsonl", [{**row, "n": i} for i in range(90) for row in ROWS]), lora=8, epochs=2.0)
    assert many.data.eval.size == 200 and many.train.prompts_per_step == 16 and many.train.learning_rate == 2e-4
    assert many.adapter is not None and many.adapter.rank == 8 and many.train.epochs == 2.0
    short = sft_config(model, write(tmp_path / "few.jsonl", ROWS[:8]), overrides=["train.steps=3"])
    assert short.train.steps == 3 and short.train.epochs is None  # steps replace the epochs


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "1+1=", "completion": "2"', r"rows\.jsonl:4: is not valid JSON"),
        ({"prompt": "1+1="}, r"rows\.jsonl:4\): has no answer to train on: no column completion"),
        ({"prompt": "1+1=", "completion": 5}, r"rows\.jsonl:4\): completion is int, not text"),
        ({"prompt": 7, "completion": "5"}, r"rows\.jsonl:4: prompt is int, not text"),
        ({"prompt": "1+1=", "completion": ""}, r"rows\.jsonl:4\): completion is empty\. Repair or remove the row\.$"),
        ({"prompt": "1+1=", "completion": None}, r"rows\.jsonl:4\): completion is missing \(null\)"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, r"rows\.jsonl:4: has no prompt: .* only conversations\. Rewrite"),
        ({"messages": [{"from": "human", "value": "hi"}]}, r"rows\.jsonl:4: messages\[0\] has the keys from and value\. Rewrite"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "asistant", "content": "x"}]}, r"rows\.jsonl:4: messages\[1\] has the role 'asistant'"),
        ({"instruction": "1+1=", "output": "5"}, r"rows\.jsonl:4: has no prompt: none of the columns prompt, .* only instruction, output"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_named(model: str, tmp_path: Path, row: Any, said: str) -> None:
    data = write(tmp_path / "rows.jsonl", [*ROWS[:3], row, *ROWS[3:6]])
    with pytest.raises(InputError, match=said):
        CliRunner().invoke(app, ["sft", model, data, "--out", str(tmp_path / "run")], catch_exceptions=False)
