"""Attributes in the prompt (SteerLM) and short rows first: what of the data a step sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.offline_runs import WORDS, config, launch, small_model
from helpers.tiny_runs import digest, lines
from helpers.toy_rewards import polite
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.data import DataConfig
from reinforge.core.errors import InputError
from reinforge.data.sources import fill, rows_from, train_and_eval_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("small"))


def test_numbers_in_a_template_are_rounded() -> None:
    assert fill("{q} [{s:.0f},{t:.2f}]", {"q": "hm", "s": 3.6, "t": 2}, "row") == "hm [4,2.00]"
    for template, record, message in (
        ("{s:.0f}", {"s": "4"}, "needs a number"),
        ("{s:>10}", {"s": 4}, "not a"),
        ("{s!r}", {"s": 4}, "not a"),
        ("{s:.1f}", {"s": float("nan")}, "needs a number"),
    ):
        with pytest.raises(InputError, match=message):
            fill(template, record, "row")


def test_fixed_columns_count_more_than_the_rows_own() -> None:
    rows = rows_from(
        [{"prompt": "a", "quality": 1}, {"prompt": "b"}],
        template="{prompt}<{quality}>",
        fixed={"quality": 4},
    )
    assert [row.prompt for row in rows] == ["a<4>", "b<4>"] and rows[0].columns["quality"] == 4


def test_evaluation_asks_for_its_own_attributes(tmp_path: Path) -> None:
    cfg = DataConfig(
        source="arithmetic:chain",
        options={"size": 3, "compare": True, "sloppy": 0.5},
        template="{prompt}[{score:.0f}]",
        eval={"size": 2, "fixed": {"score": 1}},
    )  # type: ignore[arg-type]
    train, held = train_and_eval_rows(cfg)
    assert {str(row.prompt)[-3:] for row in train} <= {"[0]", "[1]"} and [
        str(row.prompt)[-3:] for row in held
    ] == ["[1]", "[1]"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "s": 1}\n{"prompt": "y", "s": 2}\n')
    with pytest.raises(InputError, match=r"data.eval.source"):
        train_and_eval_rows(
            DataConfig(
                source=str(tmp_path / "a.jsonl"),
                template="{prompt}{s}",
                eval={"size": 1, "fixed": {"s": 3}},
            )
        )  # type: ignore[arg-type]
    other = DataConfig(
        source=str(tmp_path / "a.jsonl"),
        template="{prompt}{s}",
        eval={"source": str(tmp_path / "a.jsonl"), "fixed": {"s": 3}},
    )  # type: ignore[arg-type]
    assert [row.prompt for row in train_and_eval_rows(other)[1]] == ["x3", "y3"]


def test_a_steered_model_does_what_it_is_asked(model: str, tmp_path: Path) -> None:
    """Good and bad answers are both trained on, each with its grade in the prompt: asked for good
    ones it writes good ones.
    """
    graded = [
        {"prompt": w, "completion": "please" if good else "no", "quality": 3.9 * good}
        for w in WORDS
        for good in (0, 1)
    ]
    held = [{"prompt": f"{w} {w}", "completion": "please"} for w in WORDS]
    scores = {}
    for asked in (4, 0):
        cfg = config(
            model,
            tmp_path / str(asked),
            "sft",
            steps=40,
            lr=2e-2,
            train={"prompts_per_step": 24},
            rewards=[{"name": "polite"}],
            data={
                "source": "python",
                "template": "{prompt} {quality:.0f}:",
                "eval": {"fixed": {"quality": asked}},
            },
            rollout={"max_new_tokens": 8, "kv_gib": 0.01},
            eval={"at_start": False},
        )
        train_config(
            cfg, CallerObjects(data=graded, eval_data=held, rewards=[polite]), SilentView()
        )
        scores[asked] = lines(cfg)[-1]["eval/reward"]
    assert scores[4] > 0.8 and scores[0] < 0.2, scores


# short rows first

LONG = [{"prompt": f"{i}:", "completion": "x" * (1 + i)} for i in range(24)]


def test_short_rows_come_first(model: str, tmp_path: Path) -> None:
    """Six of 24 rows a step: first the six shortest, and in the end all; a resumed run meets the
    same rows.
    """
    curriculum: dict[str, Any] = {"sampling": {"curriculum": {"length": True, "steps": 4}}}
    whole, cut = (
        config(model, tmp_path / run, "sft", steps=8, **curriculum) for run in ("whole", "cut")
    )
    launch(whole, LONG)
    launch(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 3})}), LONG)
    launch(cut, LONG)
    assert digest(whole) == digest(cut)
    metrics = lines(whole)
    assert metrics[0]["tokens/trained"] == sum(range(2, 8))  # 1 to 6 letters and the end
    assert [m["sampling/quantile"] for m in metrics[:6]] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert max(m["tokens/trained"] for m in metrics[4:]) > 2 * metrics[0]["tokens/trained"]


def test_what_a_curriculum_cannot_be(model: str, tmp_path: Path) -> None:
    for section, message in (
        ({"curriculum": {"steps": 4}}, "curriculum by column or length"),
        ({"pass_rates": True}, "samples nothing"),
        ({"curriculum": {"steps": 4, "length": True, "column": "d"}}, "not both"),
    ):
        with pytest.raises(InputError, match=message):
            config(model, tmp_path / "run", "sft", sampling=section)
