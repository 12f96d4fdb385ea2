"""Groups, prompts and comparisons in the web app: what `runs why` and `runs compare` say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from helpers.web_app import AppClient, web_app
from reinforge.watch.why import explain_group, read_step

RUN = "first/grpo"


def test_a_group_is_what_runs_why_says(app: AppClient, runs: Path) -> None:
    record = read_step(runs / RUN, 2)
    page = app.get("group", run=RUN, step=2, group="1")
    want = json.loads(json.dumps(explain_group(record, record["groups"][1])))
    assert page["group"] == want and page["steps"] == [1, 2, 3, 4]
    assert page["verdict"].startswith("advantages follow from the rewards in all")
    for sample in page["group"]["samples"]:
        line = app.get("sample", run=RUN, line=page["lines"][sample["uid"]])
        assert line["reward"] == sample["reward"] and line["training"]["loss"] == sample["loss"]
    assert app.get("group", run=RUN)["step"] == 4
    assert "was not recorded" in app.get("group", 400, run=RUN, step=99)["error"]["what"]
    assert "no group" in app.get("group", 400, run=RUN, group="none")["error"]["what"]


def test_the_answers_to_one_prompt_in_the_order_of_training(app: AppClient, runs: Path) -> None:
    rows = [json.loads(x) for x in (runs / RUN / "samples.jsonl").read_text().splitlines()]
    name = rows[0]["row"]
    page = app.get("prompt", run=RUN, prompt=name)
    assert page["prompt"] == rows[0]["prompt"]
    assert [r["line"] for r in page["rows"]] == [
        i for i, row in enumerate(rows) if row["row"] == name
    ]
    app.get("prompt", 404, run=RUN, prompt="nobody")


def test_runs_over_each_other(runs: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(runs / RUN, tmp_path / name)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    config["train"]["learning_rate"] = 0.5
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    with web_app(tmp_path) as client:
        page = client.get("compare", run=["a", "b"])
        assert page["runs"] == ["a", "b"]
        assert page["config"] == [{"key": "train.learning_rate", "values": [0.01, 0.5]}]
        assert page["parting"]["step"] is None and page["parting"]["compared"] == 4
        curves = {c["name"]: c["series"] for c in page["curves"]}
        assert curves["reward/mean"][0] == curves["reward/mean"][1] != []
        anchors = [json.loads(x) for x in (tmp_path / "b/anchors.jsonl").read_text().splitlines()]
        third = next(a for a in anchors if a["step"] == 3 and "update" in a)
        third["update"] = "other"
        (tmp_path / "b/anchors.jsonl").write_text("\n".join(json.dumps(a) for a in anchors) + "\n")
        parting = client.get("compare", run=["a", "b"])["parting"]
        assert parting["step"] == 3 and parting["cause"] == "config"
        assert parting["what"] == "the same samples with another gradient"
        (curve,) = client.get("compare", run=["a", "b"], names="policy/entropy")["curves"]
        assert curve["name"] == "policy/entropy"


def test_tags_stay_with_the_run(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / RUN, tmp_path / "a")
    with web_app(tmp_path) as client:
        assert client.get("runs", tag="good") == []
        told = client.post("tags", {"run": "a", "tags": ["good", "<b>", "good"]}, method="PUT")
        assert told["tags"] == ["good", "<b>"]
        assert [r["run"] for r in client.get("runs", tag="good")] == ["a"]
    with web_app(tmp_path, launching=False) as client:
        assert client.get("run", run="a")["tags"] == ["good", "<b>"]
        assert not client.get("info")["launching"]
        for path, body in (
            ("tags", {"run": "a", "tags": []}),
            ("stop", {"run": "a"}),
            ("resume", {"run": "a"}),
            ("launch", {"yaml": "", "name": "b"}),
            ("branch", {"run": "a", "step": 1, "name": "b"}),
            ("plan", {"yaml": "", "full": True}),
        ):
            client.post(path, body, 403, method="PUT" if path == "tags" else "POST")


@pytest.mark.parametrize(
    ("yaml", "where", "words"),
    [
        ("train: {steps: 0}", "train.steps", ""),
        ("trian: {steps: 3}", "trian", "train"),
        ("{", None, ""),
        ("a: &a [*a, *a]", None, ""),
    ],
)
def test_what_is_wrong_is_said_by_key(
    app: AppClient, yaml: str, where: str | None, words: str
) -> None:
    page = app.post("plan", {"yaml": yaml})
    assert not page["ok"] and not page["checked"]
    assert where is None or any(
        p["where"] == where and words in p["what"] for p in page["problems"]
    ), page["problems"]


def test_recipes_and_the_schema_of_the_form(app: AppClient) -> None:
    names = [recipe["name"] for recipe in app.get("recipes")]
    assert "chain_sum" in names
    assert "algorithm" in app.get("recipe", name="chain_sum")["yaml"]
    app.get("recipe", 400, name="../pyproject")
    found = app.get("schema")
    assert found["properties"]["train"] and "$defs" in found
