"""`reinforge sft MODEL DATA`: a first run from a file of one's own, and what it says of a row that
is not right.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.offline_runs import small_model
from reinforge.cli.main import app
from reinforge.cli.quick import sft_config
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.data.sources import load_rows, train_and_eval_rows
from reinforge.watch.runs import read_lines

ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("small"))


def write(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def test_one_command_trains(model: str, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", ROWS)
    out = tmp_path / "run"
    given = [
        "sft",
        model,
        data,
        "--out",
        str(out),
        "--epochs",
        "4",
        "train.learning_rate=0.01",
        "model.device=cpu",
    ]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0 and f"reinforge export {out} OUT" in result.output
    assert result.output.startswith(
        "training all weights for 4 epochs, 14 rows a step, learning rate 0.01 (cosine), 3 rows"
        f" held out, in {out}"
    )
    lines = [line for line in read_lines(out / "metrics.jsonl") if "train/loss" in line]
    assert len(lines) == 17  # 57 rows that are left, 14 at a time, four times
    assert lines[-1]["train/loss"] < 0.7 * lines[0]["train/loss"]
    # one row in twenty
    assert json.loads((out / "config.json").read_text())["data"]["eval"]["size"] == 3


def test_another_setting_in_the_same_directory_is_told_by_its_option(
    model: str, tmp_path: Path
) -> None:
    given = ["sft", model, write(tmp_path / "rows.jsonl", ROWS), "--out", str(tmp_path / "run")]
    few = ["train.steps=1", "model.device=cpu"]
    CliRunner().invoke(app, [*given, *few, "--lora", "2"], catch_exceptions=False)
    with pytest.raises(InputError) as caught:
        CliRunner().invoke(app, [*given, *few, "--lora", "4"], catch_exceptions=False)
    assert "--lora was 2 and is 4" in str(caught.value)
    assert "Use another --out for a new run" in str(caught.value)
    assert "run.dir" not in str(caught.value) and "adapter.rank" not in str(caught.value)


def test_settings_by_size_and_adapter(model: str, tmp_path: Path) -> None:
    few = sft_config(model, write(tmp_path / "few.jsonl", ROWS[:8]))
    assert (
        few.data.eval.size == 0
        and few.train.prompts_per_step == 2
        and few.train.learning_rate == 1e-5
        and few.adapter is None
    )
    assert few.run.dir == "runs/sft-model-few"
    # 200 would be held out, and two prompts have 180 rows
    copies = [{**row, "n": i} for i in range(90) for row in ROWS]
    many = sft_config(model, write(tmp_path / "many.jsonl", copies), lora=8, epochs=2.0)
    assert (
        many.data.eval.size == 180
        and many.train.prompts_per_step == 16
        and many.train.learning_rate == 2e-4
    )
    assert many.adapter is not None and many.adapter.rank == 8 and many.train.epochs == 2.0
    short = sft_config(model, write(tmp_path / "few.jsonl", ROWS[:8]), overrides=["train.steps=3"])
    assert short.train.steps == 3 and short.train.epochs is None  # steps replace the epochs


def test_rate_and_batch_by_option(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line to the configuration that is trained."""
    trained: list[Config] = []
    monkeypatch.setattr("reinforge.cli.train._train_run", trained.append)
    data = write(tmp_path / "few.jsonl", ROWS[:8])
    line = ["sft", model, data, "--learning-rate", "3e-3", "--batch-size", "4"]
    result = CliRunner().invoke(app, line, catch_exceptions=False)
    assert result.exit_code == 0 and "4 rows a step, learning rate 0.003" in result.output
    [config] = trained
    assert (config.train.learning_rate, config.train.prompts_per_step) == (3e-3, 4)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "1+1=", "completion": "2"', r"rows\.jsonl:4: is not valid JSON"),
        ({"prompt": "1+1="}, r"rows\.jsonl:4\): has no answer to train on: no column completion"),
        ({"prompt": "1+1=", "completion": 5}, r"rows\.jsonl:4\): completion is int, not text"),
        ({"prompt": 7, "completion": "5"}, r"rows\.jsonl:4: prompt is int, not text"),
        (
            {"prompt": "1+1=", "completion": ""},
            r"rows\.jsonl:4\): completion is empty\. Repair or remove the row\.$",
        ),
        (
            {"prompt": "1+1=", "completion": None},
            r"rows\.jsonl:4\): completion is missing \(null\)",
        ),
        (
            {"conversations": [{"from": "humen", "value": "hi"}]},
            r"rows\.jsonl:4: conversations\[0\] is from 'humen'\. Speakers are: system, human",
        ),
        (
            {"messages": [{"from": 3, "value": "hi"}]},
            r"rows\.jsonl:4: messages\[0\] is from 3\. Speakers are",
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}]},
            r"rows\.jsonl:4\): its prompt is chat messages, but the tokenizer has no chat template",
        ),
        (
            {"messages": [{"role": "user", "content": "hi"}, {"role": "asistant", "content": "x"}]},
            r"rows\.jsonl:4: messages\[1\] has the role 'asistant'",
        ),
        (
            {"instruction": "", "input": "", "output": "5"},
            r"rows\.jsonl:4: instruction is empty, and so is its input",
        ),
        ({"instruction": "1+1=", "output": ""}, r"rows\.jsonl:4\): completion is empty"),
        (
            {"frage": "1+1=", "antwort": "2"},
            r"rows\.jsonl:4: has no prompt: its columns are frage, antwort",
        ),
    ],
)
def test_a_malformed_row_is_named(model: str, tmp_path: Path, row: Any, said: str) -> None:
    data = write(tmp_path / "rows.jsonl", [*ROWS[:3], row, *ROWS[3:6]])
    with pytest.raises(InputError, match=said):
        CliRunner().invoke(
            app, ["sft", model, data, "--out", str(tmp_path / "run")], catch_exceptions=False
        )


ALPACA = [
    {"instruction": "Add the numbers.", "input": f"{a} {b}", "output": str(a + b)}
    for a in range(9)
    for b in range(6)
]


def test_alpaca_rows_need_no_mapping_and_keep_their_input(model: str, tmp_path: Path) -> None:
    """The one-liner of the quickstart."""
    data = write(tmp_path / "alpaca.jsonl", ALPACA)
    out = tmp_path / "run"
    result = CliRunner().invoke(
        app,
        ["sft", model, data, "--out", str(out), "train.steps=1", "model.device=cpu"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    rows = load_rows(sft_config(model, data).data)
    assert rows[7].prompt == "Add the numbers.\n1 1" and rows[7].columns["completion"] == "2"


def test_half_of_an_alpaca_row_is_not_taken_for_the_whole(model: str, tmp_path: Path) -> None:
    data = write(tmp_path / "alpaca.jsonl", ALPACA)
    with pytest.raises(
        InputError,
        match=(
            r"alpaca\.jsonl:1: data\.columns takes the prompt from instruction, and input would be"
            r" left out"
        ),
    ):
        sft_config(
            model, data, overrides=["data.columns={prompt: instruction, completion: output}"]
        )
    bare = write(tmp_path / "bare.jsonl", [{**row, "input": ""} for row in ALPACA])
    mapped = sft_config(
        model, bare, overrides=["data.columns={prompt: instruction, completion: output}"]
    )
    assert load_rows(mapped.data)[0].prompt == "Add the numbers."


@pytest.mark.parametrize(("copies", "held"), [(1, 5), (2, 4), (50, 0)])
def test_the_hold_out_that_nobody_asked_for_never_fails(
    copies: int, held: int, model: str, tmp_path: Path
) -> None:
    """Rows with the same prompt stay together, so that a twentieth of 100 may be no number of rows
    that there can be.
    """
    rows = [{"prompt": f"{i // copies}: ", "completion": str(i)} for i in range(100)]
    said: list[str] = []
    config = sft_config(model, write(tmp_path / "rows.jsonl", rows), say=said.append)
    train, evaluation = train_and_eval_rows(config.data)
    assert (len(train), len(evaluation), config.data.eval.size) == (100 - held, held, held)
    assert said == (
        []
        if held == 5
        else [f"{held} rows are held out instead of 5: rows with the same prompt stay together."]
    )
    with (
        pytest.raises(InputError, match="exactly 5 rows|cannot hold out")
        if held < 5
        else nullcontext()
    ):
        asked = sft_config(
            model, write(tmp_path / "rows.jsonl", rows), overrides=["data.eval.size=5"]
        )
        train_and_eval_rows(asked.data)
