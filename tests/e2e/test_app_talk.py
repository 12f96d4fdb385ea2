"""What the web app has other processes do: a checkpoint that talks, rows as the trainer sees them,
rewards on a text that somebody typed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from helpers.chat_server import make_chat_model
from helpers.tiny_runs import launch, make_config
from helpers.web_app import AppClient, web_app

MODEL = "model"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppClient]:
    root = tmp_path_factory.mktemp("talk")
    model = make_chat_model(root / MODEL)
    launch(make_config(model, root / "runs", "first", "grpo", "train.steps=1"))
    with web_app(root / "runs") as client:
        yield client


@pytest.mark.timeout(600)
def test_a_checkpoint_talks(app: AppClient) -> None:
    """One process that loads it; the second question finds it there."""
    asked = {
        "sides": [{"run": "first"}, {"run": "first", "step": 1}],
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.0,
        "max_tokens": 6,
    }
    one, other = app.post("chat", asked)["answers"]
    assert one["text"] == other["text"] and one["step"] == other["step"] == 1
    assert len(one["tokens"]) == 6
    for token in one["tokens"]:
        assert token["logprob"] == max(logprob for _, logprob in token["top"])
    wrong = {**asked, "sides": [{"run": "first", "step": 7}]}
    assert "no checkpoint of step 7" in app.post("chat", wrong, 404)["error"]["what"]
    app.post("chat", {**asked, "sides": [{"run": "../first"}]}, 400)


@pytest.mark.timeout(600)
def test_rows_as_the_trainer_sees_them_and_rewards_of_a_typed_text(
    app: AppClient, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    told = [{"prompt": f"{i}+1=", "completion": str(i + 1), "answer": str(i + 1)} for i in range(5)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in told))
    model = app.get("config", run="first")["flat"]["model.path"]
    page = app.post("data", {"source": str(rows), "model": model, "page": 1, "size": 2})
    assert page["rows"] == 5 and page["bad_rows"] == 0 and len(page["shown"]) == 2
    pieces = page["shown"][0]["texts"][0]["pieces"]
    assert "2+1=" in "".join(p["text"] for p in pieces if not p["trained"])
    assert "3" in "".join(p["text"] for p in pieces if p["trained"])
    assert app.post("data", {}, 400)["error"]["where"] == "source"
    config = {
        "model": {"path": model},
        "algorithm": {"name": "grpo"},
        "data": {"source": str(rows)},
        "rewards": [{"name": "exact_number", "weight": 2.0}],
        "train": {"steps": 1},
        "run": {"dir": "x"},
    }
    asked = {"yaml": yaml.safe_dump(config), "completion": "it is 4", "columns": {"answer": "4"}}
    (score,) = app.post("rewards", asked)
    assert score == {"name": "exact_number", "value": 1.0, "weight": 2.0, "error": None}
    wrong = app.post("rewards", {**asked, "yaml": "rewards: [3]"}, 400)["error"]
    assert "rewards" in wrong["what"]
