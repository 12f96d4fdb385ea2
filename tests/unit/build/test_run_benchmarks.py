"""Benchmarks in the evaluations of a run: the numbers of `reinforge benchmark`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

import reinforge
from reinforge.config.eval import BenchmarkName
from reinforge.core.errors import InputError
from reinforge.evals.benchmarks.table import PRESETS
from reinforge.evals.statistics import wilson
from reinforge.models.tiny import make_tiny_model

SUMS = [
    {"question": f"{name}: which?", "answer": f"This.\n#### {n}"}
    for name, n in (("a", 6), ("b", 6), ("c", 6), ("d", 4))
]
NEW = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_model(folder, width=48, layers=2, heads=4, context=256)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    return path


def asked(rows: Path, **more: Any) -> str:
    item = {"task": "gsm8k", "rows": str(rows), "fewshot": 0, "max_new_tokens": NEW, **more}
    return f"eval.benchmarks={json.dumps([item])}"


def test_the_names_of_the_configuration_are_the_presets() -> None:
    assert get_args(BenchmarkName) == tuple(PRESETS)


def test_a_run_that_learns_three_of_four(tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Nothing is held out: benchmarks alone are an evaluation. It learns to say 6."""
    taught = [
        {"prompt": f"Question: {row['question']}\nAnswer:", "completion": " #### 6"} for row in SUMS
    ]
    data = tmp_path / "taught.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in taught))
    result = reinforge.train(
        model=tiny,
        data=data,
        algorithm="sft",
        steps=100,
        prompts_per_step=4,
        learning_rate=1e-2,
        dir=tmp_path / "run",
        overrides=[asked(rows), "eval.every=50"],
    )
    table = result.history["eval/gsm8k/accuracy"].dropna()
    assert table.iloc[0] == 0.0 and table.iloc[-1] == 0.75
    found = result.metrics
    assert found["eval/gsm8k/strict_match"] == 0.75 and found["eval/gsm8k/unscored"] == 0
    interval = (found["eval/gsm8k/accuracy_low"], found["eval/gsm8k/accuracy_high"])
    assert interval == pytest.approx(wilson(3, 4))
    outside = reinforge.benchmark(
        tmp_path / "run", "gsm8k", rows=rows, fewshot=0, max_new_tokens=NEW
    )["gsm8k"]
    assert [r["scores"]["accuracy"] for r in outside.records] == [1, 1, 1, 0]
    again = reinforge.evaluate(tmp_path / "run")
    assert again["eval/gsm8k/accuracy"] == 0.75


def test_beside_held_out_rows_of_rl(tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Longer prompts than the run's own: the engine has room for them."""
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps(SUMS[0] | {"question": "x" * 180}) + "\n")
    result = reinforge.train(
        model=tiny,
        data=[{"prompt": f"{n}=", "answer": str(n)} for n in range(8)],
        eval_data=[{"prompt": "9=", "answer": "9"}],
        rewards=["exact_number"],
        algorithm="grpo",
        steps=1,
        prompts_per_step=2,
        group_size=2,
        max_new_tokens=4,
        dir=tmp_path / "run",
        overrides=[asked(long), "rollout.max_batch=1"],
    )
    assert {"eval/accuracy", "eval/gsm8k/accuracy", "eval/gsm8k/cut"} <= result.metrics.keys()
    assert result.metrics["eval/n"] == 1


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([{"task": "gsm8k", "rows": "none.jsonl"}], r"eval.benchmarks.0.rows: there is no file"),
        ([{"task": "mmlu", "rows": "ROWS", "fewshot": 0}], "which no engine of a run tells"),
        ([{"task": "gsm8k", "rows": "ROWS"}], r"shots: FILE.* or fewshot: 0"),
        ([{"task": "gsm8k", "rows": "ROWS"}] * 2, "a task stands there twice"),
        ([{"task": "gsm9k"}], "eval.benchmarks.0.task"),
    ],
)
def test_what_is_wrong_is_told_by_its_key(
    tiny: Path,
    tmp_path: Path,
    items: list[dict[str, Any]],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "r.jsonl"
    choice = {"choices": ["x", "y"], "answer": "#### 1", "question": "Which?"}
    if items[0]["task"] == "mmlu":
        choice["answer"] = "A"
    file.write_text(json.dumps(choice) + "\n")
    said_items = json.dumps(items).replace("ROWS", str(file))
    with pytest.raises(InputError, match=said):
        reinforge.train(
            model=tiny,
            data=[{"prompt": "1=", "completion": "1"}],
            algorithm="sft",
            steps=1,
            dir=tmp_path / "run",
            overrides=[f"eval.benchmarks={said_items}"],
        )
