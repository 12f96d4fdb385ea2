"""Reward models from YAML to a reward in RL: first step, learning, resume, export as an ordinary
classifier, calibration.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.offline_runs import HELD, PAIRS, config, launch, small_model
from helpers.tiny_runs import digest, lines, make_config
from helpers.toys import SilentView
from reinforge.algorithms.catalogue import TABLE
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.inputs import read_inputs
from reinforge.build.local import LocalFactories
from reinforge.build.run import train_config
from reinforge.build.trainer import build
from reinforge.build.unit_rows import make_units
from reinforge.core.errors import InputError
from reinforge.evals.rows import calibration_error
from reinforge.offline.export import export
from reinforge.rewards.model import ModelReward

GRADED: list[dict[str, Any]] = [
    {"prompt": row["prompt"], "completion": row[side], "score": 1.0 if side == "chosen" else -1.0}
    for row in PAIRS
    for side in ("chosen", "rejected")
]
STEPS: list[dict[str, Any]] = [
    {
        "prompt": row["prompt"],
        "steps": [row["chosen"], row["rejected"], row["chosen"]],
        "labels": [True, False, True],
    }
    for row in PAIRS
]
DATA = {"regression": GRADED, "process": STEPS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def judge(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained reward model, exported."""
    folder = tmp_path_factory.mktemp("judge")
    cfg = config(model, folder / "run", "bradley_terry", steps=15, train={"prompts_per_step": 12})
    launch(cfg, PAIRS)
    return export(Path(cfg.run.dir), folder / "model")


@pytest.mark.parametrize("name", [n for n, spec in TABLE.items() if spec.family == "reward"])
def test_first_step_and_learning(model: str, tmp_path: Path, name: str) -> None:
    """A head that starts at 0 scores 0: losses are known. Then it learns rows it has not seen."""
    data = DATA.get(name, PAIRS)
    held = [{**row, "prompt": f"9 {row['prompt']}"} for row in data[:4]]
    cfg = config(
        model,
        tmp_path / "run",
        name,
        steps=15,
        train={"prompts_per_step": 12},
        data={"source": "python", "shuffle": False},
    )
    launch(cfg, data, held)
    metrics = lines(cfg)
    start = metrics[0]
    first = metrics[1]
    final = metrics[-1]
    known = {"margin": math.log(1 + math.e), "regression": 1.0}.get(name, math.log(2))
    assert first["reward/loss"] == pytest.approx(known, abs=1e-6) == start["eval/loss"]
    assert final["eval/loss"] < 0.5 * known
    if name != "regression":
        assert final["eval/accuracy"] == 1.0
        # a tie is wrong; 0 says "not right"
        assert start["eval/accuracy"] == (pytest.approx(1 / 3) if name == "process" else 0.0)
    if name not in DATA:
        assert (
            start["eval/margin"] == 0 < 1 < final["eval/margin"] and start["eval/calibration"] == 0
        )
        # all are right, so it is the mean doubt, 1 - sigma(margin)
        assert 0 < final["eval/calibration"] < 0.25


def test_calibration_by_hand() -> None:
    """Confidence sigma(ln 3) = 3/4: three of four right is no error, four of four is 1/4, none is
    3/4.
    """
    three_quarters = math.log(3)
    signs = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    assert calibration_error(signs * three_quarters) == pytest.approx(0, abs=1e-12)
    assert calibration_error(signs.abs() * three_quarters) == pytest.approx(0.25)
    assert calibration_error(-signs.abs() * three_quarters) == pytest.approx(0.75)
    two_bins = torch.tensor([three_quarters] * 4 + [0.0] * 4, dtype=torch.float64)
    assert calibration_error(two_bins) == pytest.approx(0.125)


def test_resume_is_exact(model: str, tmp_path: Path) -> None:
    whole, cut = (config(model, tmp_path / run, "centred", steps=5) for run in ("whole", "cut"))
    launch(whole, PAIRS)
    launch(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 2})}), PAIRS)
    launch(cut, PAIRS)
    assert digest(whole) == digest(cut)


def test_an_exported_model_is_an_ordinary_classifier_and_scores_what_it_was_trained_on(
    model: str, judge: Path, tmp_path: Path
) -> None:
    """transformers alone reads at the last token; so does the reward `model`; and training read
    there too.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    plain = AutoModelForSequenceClassification.from_pretrained(judge)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    reward = ModelReward(str(judge)).load("cpu")
    for row in PAIRS[:4]:
        found = {}
        for side in ("chosen", "rejected"):
            ids = tokenizer(row["prompt"] + row[side])["input_ids"] + [tokenizer.eos_token_id]
            found[side] = plain(torch.tensor([ids])).logits[0, 0].item()
            assert reward([row["prompt"]], [row[side]]) == pytest.approx([found[side]], abs=1e-5)
        assert found["chosen"] > found["rejected"] + 1
    inputs = read_inputs(
        config(model, tmp_path / "run", "bradley_terry"),
        CallerObjects(data=PAIRS),
        SilentView(),
        LocalFactories().make_rewards,
    )
    units = make_units(inputs, inputs.train_rows, SilentView()).units
    for (chosen, rejected), row in zip(units, PAIRS, strict=True):
        assert chosen.tokens.tolist() == reward.ids(row["prompt"], row["chosen"]) and bool(
            chosen.trained[-1]
        )
        assert rejected.tokens.tolist() == reward.ids(row["prompt"], row["rejected"]) and bool(
            rejected.trained[-1]
        )


def test_it_is_a_reward_at_once(model: str, judge: Path, tmp_path: Path) -> None:
    """GRPO against it: the score of what the policy writes rises."""
    rewards = [{"name": "model", "options": {"path": str(judge)}}]
    cfg = make_config(
        model,
        tmp_path,
        "rl",
        "grpo",
        "train.steps=20",
        "train.learning_rate=1e-2",
        "train.prompts_per_step=8",
        "algorithm.group_size=8",
        "rollout.max_new_tokens=4",
        rewards=rewards,
    )
    train_config(
        cfg, CallerObjects(data=[{"prompt": row["prompt"]} for row in PAIRS]), SilentView()
    )
    metrics = lines(cfg)
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 1


@pytest.mark.parametrize("inner", [True, False])
def test_steps_are_labelled_where_they_end(model: str, tmp_path: Path, inner: bool) -> None:
    row = {
        "prompt": "ab:",
        "steps" if inner else "completions": ["cd", "efg"],
        "labels": [True, 0.25],
    }
    inputs = read_inputs(
        config(model, tmp_path / "run", "process"),
        CallerObjects(data=[row]),
        SilentView(),
        LocalFactories().make_rewards,
    )
    ((sample,),) = make_units(inputs, inputs.train_rows, SilentView()).units
    text = "ab:cd\nefg\n"
    assert len(sample.tokens) == len(text) and sample.trained.nonzero()[:, 0].tolist() == [5, 9]
    assert sample.streams["label"][sample.trained].tolist() == [1.0, 0.25]


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("margin", {"prompt": "a", "chosen": "x", "rejected": "y"}, "needs a number margin"),
        ("regression", {"prompt": "a", "completion": "x"}, "needs a number score"),
        ("process", {"prompt": "a", "steps": ["x"], "labels": [True, False]}, "one for each"),
        ("process", {"prompt": "a", "steps": ["x"], "labels": ["?"]}, "neither true nor false"),
    ],
)
def test_rows_that_are_refused(
    model: str, tmp_path: Path, name: str, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        build(config(model, tmp_path / "run", name), SilentView(), CallerObjects(data=[row]))


def test_what_means_nothing_to_a_reward_model_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no setting 'beta'"):
        launch(
            config(model, tmp_path / "run", "bradley_terry", algorithm={"options": {"beta": 1}}),
            PAIRS,
            HELD,
        )
    with pytest.raises(InputError, match="only pairs leave the zero"):
        launch(
            config(model, tmp_path / "run", "regression", algorithm={"options": {"centre": 0.1}}),
            GRADED,
        )
