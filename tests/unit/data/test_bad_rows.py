"""Rows that cannot be used are told together, before any weights are read."""

from __future__ import annotations

import doctest
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.local import LocalFactories
from reinforge.build.run import train_config
from reinforge.config.data import DataConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.data import bad_rows
from reinforge.data.bad_rows import by_reason
from reinforge.data.sources import load_rows


def test_the_first_five_bad_rows_are_named_and_all_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "" if i % 2 else f"question {i}", "answer": "1"} for i in range(14)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError) as caught:
        load_rows(DataConfig(source=str(path)))
    told = str(caught.value).splitlines()
    assert told[0] == "data: 7 of 14 rows cannot be used:"
    others = ", ".join(f"{path}:{line}" for line in (4, 6, 8, 10))
    assert told[1] == f"  - {path}:2: prompt is empty (also {others} and 2 more)"
    assert len(told) == 3
    assert "remove the row" in told[2]
    assert told[2].endswith("Or leave such rows out: data.bad_rows: drop.")
    # a limit that is reached before them does not look at them
    assert len(load_rows(DataConfig(source=str(path), limit=1))) == 1


def test_every_reason_has_a_line_up_to_five() -> None:
    assert doctest.testmod(bad_rows).failed == 0
    found = [(f"a:{i}", f"reason {i % 7}") for i in range(16)]
    assert by_reason(found) == [
        "a:0: reason 0 (also a:7, a:14)",
        "a:1: reason 1 (also a:8, a:15)",
        "a:2: reason 2 (also a:9)",
        "a:3: reason 3 (also a:10)",
        "a:4: reason 4 (also a:11)",
        "and 4 more",
    ]


def test_one_bad_row_is_told_as_before(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": null}\n{"prompt": "c"}\n')
    with pytest.raises(InputError, match=rf"^{path}:2: prompt is "):
        load_rows(DataConfig(source=str(path)))


def test_what_is_wrong_with_all_rows_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(InputError, match=r"^data.template: "):
        load_rows(DataConfig(source=str(path), template="{a!r}"))


@pytest.mark.parametrize(
    ("algorithm", "row", "what"),
    [
        ("sft", {"completion": None}, "completion is missing"),
        ("dpo", {"chosen": "yes", "rejected": "yes"}, "chosen and rejected are the same"),
        ("kto", {"completion": "yes", "label": "perhaps"}, "label"),
    ],
)
def test_supervised_rows_are_checked_before_weights_are_read(
    algorithm: str,
    row: dict[str, Any],
    what: str,
    make: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loads(*given: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(LocalFactories, "make_policy", loads)
    rows = [{"prompt": f"question {i}", **row} for i in range(8)]
    with pytest.raises(InputError) as caught:
        train_config(make("run", algorithm, rewards=[]), CallerObjects(data=rows))
    told = str(caught.value).splitlines()
    assert told[0] == "data: 8 of 8 rows cannot be used:"
    assert len(told) == 3 and "(data row 4) and 3 more)" in told[1] and what in told[1]


def test_prompts_that_cannot_be_rendered_are_dropped_and_told(
    make: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """A model without a chat template cannot render messages."""
    talk = [{"role": "user", "content": "question"}]
    rows = [{"prompt": talk if i in (1, 2) else f"question {i}", "answer": "1"} for i in range(6)]
    with pytest.raises(InputError, match=r"^data: 2 of 6 rows cannot be used:"):
        train_config(make("refused", "grpo", "train.steps=1"), CallerObjects(data=rows))
    cfg = make("dropped", "grpo", "train.steps=1", "data.bad_rows=drop")
    train_config(cfg, CallerObjects(data=rows))
    said = capsys.readouterr().out
    assert "data: 2 of 6 rows dropped (data.bad_rows: drop):" in said
    assert "(data row 1): its prompt is chat messages" in said and "(data row 2))" in said


def test_a_run_says_that_prompt_and_answer_are_glued(
    make: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["What is 1+1?", "1+1=", "Say two.\n", "Two?"]
    rows = [{"prompt": prompt, "completion": "two"} for prompt in asked]
    train_config(make("run", "sft", "train.steps=1", rewards=[]), CallerObjects(data=rows))
    said = capsys.readouterr().out
    assert said.count("data: 2 of 4 rows: as plain text nothing stands between") == 1


def test_a_run_says_that_a_step_repeats_rows(
    make: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"question {i}", "completion": "yes"} for i in range(3)]
    cfg = make("run", "sft", "train.steps=1", "train.prompts_per_step=4", rewards=[])
    train_config(cfg, CallerObjects(data=rows))
    said = (
        "warning: train.prompts_per_step: 4 rows per step, but there are only 3. A step repeats"
        " rows."
    )
    assert said in capsys.readouterr().out
