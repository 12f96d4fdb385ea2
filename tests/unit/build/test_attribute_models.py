"""An attribute model from rows to its use: two attributes that pull in opposite directions are
learned by one trunk with two heads, saved with their names, resumed, exported, refused.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import reinforge
from helpers.offline_runs import PAIRS, WORDS, config, launch, small_model
from helpers.tiny_runs import digest, lines, make_config
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.build.serving import load_scorer
from reinforge.build.trainer import build
from reinforge.cli.main import main
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.evals.rows import correlation
from reinforge.offline.export import export
from reinforge.serve.options import ServeOptions
from reinforge.serve.requests import ApiError, ScoreRequest

ATTRIBUTES = ["loudness", "calmness"]
# the louder an answer, the less calm; every third word lacks a grade
GRADED: list[dict[str, Any]] = [
    {
        "prompt": f"{word}:",
        "completion": f"{word.upper()}!" if loud else word,
        "loudness": 4.0 if loud else 0.0,
        "calmness": None if i % 3 == 0 else 0.0 if loud else 3.0,
    }
    for i, word in enumerate(WORDS)
    for loud in (True, False)
]
HELD = [
    {
        **row,
        "prompt": f"{row['prompt']}{row['prompt']}",
        "calmness": 0.0 if row["loudness"] else 3.0,
    }
    for row in GRADED[:8]
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("small"))


def attribute_config(model: str, folder: Path, *overrides: str, **more: Any) -> Config:
    more = {"steps": 25, "train": {"prompts_per_step": 24}, **more}
    algorithm = {"attributes": ATTRIBUTES}
    return config(model, folder, "regression", *overrides, algorithm=algorithm, **more)


@pytest.fixture(scope="module")
def trained(model: str, tmp_path_factory: pytest.TempPathFactory) -> Config:
    cfg = attribute_config(model, tmp_path_factory.mktemp("attributes") / "run")
    launch(cfg, GRADED, HELD)
    return cfg


@pytest.fixture(scope="module")
def judge(trained: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(Path(trained.run.dir), tmp_path_factory.mktemp("judge") / "model")


def test_two_attributes_that_conflict_are_learned(trained: Config) -> None:
    """Heads that start at 0 have the losses of the data; then each follows its own numbers."""
    start, first, *_, final = lines(trained)
    assert first["reward/loss/loudness"] == pytest.approx(8.0)
    assert first["reward/loss/calmness"] == pytest.approx(4.5)
    # 24 answers with loudness, 16 with calmness
    assert first["reward/loss"] == pytest.approx((24 * 8.0 + 16 * 4.5) / 40)
    assert start["eval/loss/loudness"] == pytest.approx(8.0)
    assert "eval/correlation/loudness" not in start  # all scores are 0
    for name in ATTRIBUTES:
        assert final[f"eval/loss/{name}"] < 0.2, final
        assert final[f"eval/correlation/{name}"] > 0.95


def test_resume_is_exact(model: str, tmp_path: Path) -> None:
    whole, cut = (attribute_config(model, tmp_path / run, steps=5) for run in ("whole", "cut"))
    launch(whole, GRADED)
    launch(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 2})}), GRADED)
    launch(cut, GRADED)
    assert digest(whole) == digest(cut)


def test_an_export_is_a_classifier_with_the_names_of_its_heads(judge: Path) -> None:
    """transformers alone loads it, finds the names, and reads the two numbers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    plain = AutoModelForSequenceClassification.from_pretrained(judge)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    assert plain.config.id2label == dict(enumerate(ATTRIBUTES))
    said = {}
    for completion in ("APE!", "ape"):
        ids = [*tokenizer(f"ape:{completion}")["input_ids"], tokenizer.eos_token_id]
        said[completion] = plain(torch.tensor([ids])).logits[0].tolist()
    assert said["APE!"] == pytest.approx([4.0, 0.0], abs=0.8)
    assert said["ape"] == pytest.approx([0.0, 3.0], abs=0.8)


def test_it_goes_on_from_its_export_and_from_no_other_heads(
    model: str, judge: Path, tmp_path: Path
) -> None:
    again = attribute_config(str(judge), tmp_path / "again", steps=1)
    launch(again, GRADED)
    assert lines(again)[0]["reward/loss"] < 0.3
    other = config(str(judge), tmp_path / "other", "regression", algorithm={"attributes": ["wit"]})
    with pytest.raises(InputError, match="its heads are loudness, calmness, not wit"):
        build(other, SilentView(), CallerObjects(data=[{**row, "wit": 1} for row in GRADED]))
    with pytest.raises(InputError, match="has 2 outputs, not one score"):
        build(
            config(str(judge), tmp_path / "pairs", "bradley_terry"),
            SilentView(),
            CallerObjects(data=PAIRS),
        )


def test_an_adapter_trains_the_heads_too(model: str, tmp_path: Path) -> None:
    cfg = attribute_config(model, tmp_path / "run", steps=10, adapter={"rank": 4})
    launch(cfg, GRADED, HELD)
    assert lines(cfg)[-1]["eval/loss"] < 0.5 * lines(cfg)[0]["eval/loss"]
    config_json = export(Path(cfg.run.dir), tmp_path / "model") / "config.json"
    assert json.loads(config_json.read_text())["id2label"]["1"] == "calmness"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "completion": "x"}, "none of the attributes loudness, calmness"),
        ({"prompt": "a", "completion": "x", "loudness": math.nan, "calmness": ""}, "none of"),
        ({"prompt": "a", "completion": "x", "loudness": "high"}, "needs a number loudness"),
        ({"prompt": "a", "completion": "x", "loudness": math.inf}, "no grade"),
    ],
)
def test_rows_that_are_refused(model: str, tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        build(attribute_config(model, tmp_path), SilentView(), CallerObjects(data=[row]))


def test_what_cannot_be_asked_for(model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names one of them twice"):
        config(model, tmp_path, "regression", algorithm={"attributes": ["wit", "wit"]})
    with pytest.raises(InputError, match=r"algorithm.attributes: bradley_terry .*does not read"):
        config(model, tmp_path, "bradley_terry", algorithm={"attributes": ["wit"]})
    with pytest.raises(InputError, match="causal LMs only"):
        attribute_config(model, tmp_path, "train.backend=megatron")


def test_rewards_are_weighted_sums_of_heads(judge: Path) -> None:
    """The score is Σ weight·head to the last bit, and Python gets every head beside it."""
    weights = {"loudness": 0.65, "calmness": -0.5}
    reward = {"name": "model", "options": {"path": str(judge), "weights": weights}, "weight": 2.0}
    rows = [{"prompt": "ape:", "completion": text} for text in ("APE!", "ape", "Ape")]
    said = reinforge.score(reward, rows)
    for one in said:
        assert list(one) == ["loudness", "calmness", "model", "reward"]
        assert one["model"] == 0.65 * one["loudness"] + -0.5 * one["calmness"]  # type: ignore[operator]
        assert one["reward"] == 2 * one["model"]  # type: ignore[operator]
    assert said[0]["loudness"] > 3 > 1 > said[1]["loudness"]  # type: ignore[operator]
    for wrong, message in (
        ({}, "has the heads loudness, calmness"),
        ({"weights": {"wit": 1}}, "has no head 'wit'"),
        ({"weights": {"calmness": "much"}}, "no weights of heads"),
        ({"weights": {}}, "no weights of heads"),
    ):
        options = {"path": str(judge), **wrong}
        with pytest.raises(InputError, match=message):
            reinforge.score({"name": "model", "options": options}, rows)
    with pytest.raises(InputError, match=r"rewards\[0\].*as in a configuration"):
        reinforge.score({"names": "model"}, rows)
    process = {"name": "process", "options": {"path": str(judge)}}
    with pytest.raises(InputError, match="has 2 outputs, not one score"):
        reinforge.score(process, rows)


@pytest.mark.parametrize("algorithm", ["grpo", "best_of_n"])
def test_weights_decide_what_a_policy_learns(
    model: str, judge: Path, tmp_path: Path, algorithm: str
) -> None:
    """Against the same two heads, one policy learns to shout and another to be calm."""
    heard = []
    for weights in ({"loudness": 1.0}, {"loudness": -0.5, "calmness": 1.0}):
        options = {"path": str(judge), "weights": weights}
        cfg = make_config(
            model,
            tmp_path,
            f"{len(heard)}",
            algorithm,
            "train.steps=14",
            "train.learning_rate=1e-2",
            "train.prompts_per_step=8",
            "algorithm.group_size=8",
            "rollout.max_new_tokens=4",
            rewards=[{"name": "model", "options": options}],
        )
        prompts = [{"prompt": f"{word}:"} for word in WORDS]
        train_config(cfg, CallerObjects(data=prompts), SilentView())
        made = reinforge.generate(cfg.run.dir, prompts, n=4, max_new_tokens=4)
        said = reinforge.score({"name": "model", "options": options}, made)
        heard.append(sum(float(one["loudness"] or 0) for one in said) / len(said))
    assert heard[0] > heard[1] + 1.5, heard


def test_a_file_is_labelled(judge: Path, trained: Config, tmp_path: Path) -> None:
    """By the export, and by the run itself."""
    file = tmp_path / "answers.jsonl"
    rows = [
        {"prompt": "ape:", "completion": "APE!", "source": "x"},
        {"prompt": "bee:", "response": "bee"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exported = tmp_path / "exported.jsonl"
    own = tmp_path / "own.jsonl"
    assert main(["score", str(judge), "--data", str(file), "--out", str(exported)]) == 0
    weights = ["--weights", "loudness=1,calmness=-2"]
    asked = ["score", trained.run.dir, "--data", str(file), "--out", str(own), *weights]
    assert main(asked) == 0
    first, second = map(json.loads, exported.read_text().splitlines())
    assert first["source"] == "x" and first["loudness"] == pytest.approx(4, abs=0.8)
    assert second["completion"] == "bee" and second["calmness"] == pytest.approx(3, abs=0.8)
    assert "reward" not in first  # nobody said what is how good
    for line, other in zip(
        (first, second), map(json.loads, own.read_text().splitlines()), strict=True
    ):
        for name in ATTRIBUTES:
            assert other[name] == pytest.approx(line[name], abs=1e-5)
        assert other["reward"] == pytest.approx(other["loudness"] - 2 * other["calmness"])
    file.write_text(json.dumps({"prompt": "ape:"}) + "\n")
    assert main(["score", str(judge), "--data", str(file), "--out", str(own)]) == 2


def test_a_server_gives_all_attributes(judge: Path) -> None:
    scorer = load_scorer(str(judge), ServeOptions())

    def ask(**more: Any) -> dict[str, Any]:
        request = ScoreRequest(prompts=["ape:"] * 2, completions=["APE!", "ape"], **more)
        return asyncio.run(scorer.score(request))

    plain = ask()
    assert plain["scores"] == [None, None] and list(plain["attributes"][0]) == ATTRIBUTES
    weighted = ask(weights={"loudness": 0.5, "calmness": 1.0})
    assert weighted["attributes"] == plain["attributes"]
    assert weighted["scores"] == [
        0.5 * one["loudness"] + one["calmness"] for one in plain["attributes"]
    ]
    with pytest.raises(ApiError, match="no head 'wit'"):
        ask(weights={"wit": 1.0})
    scorer.close()


def test_correlation_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 4.0])
    y = torch.tensor([3.0, 1.0, 1.0])
    # means 7/3 and 5/3: -8/3 over the root of 14/3 times 8/3
    assert correlation(x, y) == pytest.approx((-2.6666666) / math.sqrt(14 / 3 * 8 / 3), abs=1e-6)
    assert correlation(x, torch.ones(3)) is None and correlation(x[:1], y[:1]) is None
