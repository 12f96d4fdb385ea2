"""Attributes in the prompt (SteerLM): how they are written, and a model that does what it is
asked.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

import reinforge
from helpers.offline_runs import WORDS, config, launch
from reinforge.config.data import AttributesConfig, DataConfig
from reinforge.core.errors import InputError
from reinforge.data.sources import load_rows, rows_from
from reinforge.data.steering import quantised, steered
from reinforge.models.tiny import make_tiny_model

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "2+2?"},
]
ANSWER = {"role": "assistant", "content": "4"}


def rules(**more: Any) -> AttributesConfig:
    return AttributesConfig(names=["helpfulness", "verbosity"], **more)


def test_numbers_are_rounded_and_kept_on_their_scale() -> None:
    given = (-0.7, 0.49, 0.5, 2.5, 3.6, 9.0)
    assert [quantised(x, 0, 4) for x in given] == [0, 0, 1, 3, 4, 4]
    assert [quantised(x, -1, 9) for x in given] == [-1, 0, 1, 3, 4, 9]


def test_where_attributes_stand() -> None:
    row = {"prompt": "2+2?", "helpfulness": 3.6, "verbosity": -0.2}
    (text,) = rows_from([row], attributes=rules())
    assert text.prompt == "2+2?\nhelpfulness:4,verbosity:0"
    (talk,) = rows_from([{**row, "prompt": TALK}], attributes=rules(highest=3))
    assert talk.prompt == [*TALK[:2], {**TALK[2], "content": "2+2?\nhelpfulness:3,verbosity:0"}]
    (system,) = rows_from([row], attributes=rules(turn="system"))
    assert system.prompt == [
        {"role": "system", "content": "helpfulness:4,verbosity:0"},
        {"role": "user", "content": "2+2?"},
    ]
    (both,) = rows_from([row], attributes=rules(turn="system"), system="Be brief.")
    assert both.prompt[0]["content"] == "Be brief.\nhelpfulness:4,verbosity:0"  # type: ignore[index]
    template = "[{attributes}] {prompt}"
    (placed,) = rows_from([row], attributes=rules(), template=template)
    assert placed.prompt == "[helpfulness:4,verbosity:0] 2+2?"


def test_a_whole_conversation_is_trained_with_what_it_is_asked_for() -> None:
    """The attributes are those of the last answer, and both what is trained and the prompt that is
    generated from have them.
    """
    row = {"messages": [*TALK, ANSWER], "helpfulness": 2}
    (found,) = rows_from([row], attributes=rules())
    asked = [*TALK[:2], {**TALK[2], "content": "2+2?\nhelpfulness:2"}]  # it was given no verbosity
    assert found.prompt == asked and found.columns["messages"] == [*asked, ANSWER]


def test_what_is_fixed_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "x", "helpfulness": 1}\n{"prompt": "y"}\n')
    cfg = DataConfig(source=str(file), attributes=rules(), fixed={"helpfulness": 4, "verbosity": 1})
    assert [row.prompt for row in load_rows(cfg)] == [
        f"{text}\nhelpfulness:4,verbosity:1" for text in "xy"
    ]


def test_what_cannot_be_written() -> None:
    good = {"prompt": "x", "helpfulness": 1}
    for row, more, message in (
        ({"prompt": "x", "wit": 1}, {}, "none of the attributes helpfulness, verbosity"),
        ({**good, "verbosity": "high"}, {}, "needs a number verbosity"),
        (good, {"template": "{prompt}"}, "no place for data.attributes"),
        ({"text": "x", "helpfulness": 1}, {}, "no place for data.attributes"),
    ):
        with pytest.raises(InputError, match=message):
            rows_from([row], attributes=rules(), **more)
    with pytest.raises(InputError, match="no turn of the user"):
        steered([{"role": "system", "content": "x"}], "helpfulness:1", "user", "row")
    with pytest.raises(ValueError, match="nothing is between 4 and 4"):
        rules(lowest=4)


def test_a_reward_model_does_not_read_its_grades(tmp_path: Path) -> None:
    section = {"source": "python", "attributes": {"names": ["wit"]}}
    with pytest.raises(InputError, match="would read the grades that it is to give"):
        config("x", tmp_path, "regression", data=section, algorithm={"attributes": ["wit"]})


def test_asking_for_attributes_changes_the_answers(tmp_path: Path) -> None:
    """Every combination of two attributes is trained on, good or bad. Asked for one, the model
    writes answers that have it, and those alone.
    """
    graded = [
        {
            "prompt": f"{word}:",
            "completion": ("AB" if loud else "ab") + ("!" if keen else "."),
            "loud": 4.3 * loud - 0.2,
            "keen": 3.8 * keen,
        }
        for word, loud, keen in product(WORDS, (0, 1), (0, 1))
    ]
    shape: dict[str, Any] = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "context": 64}
    model = make_tiny_model(tmp_path / "model", spread=0.1, **shape)
    cfg = config(
        str(model),
        tmp_path / "run",
        "sft",
        steps=80,
        lr=1e-2,
        train={"prompts_per_step": 24},
        data={"source": "python", "attributes": {"names": ["loud", "keen"]}},
    )
    launch(cfg, graded)
    unseen = [f"{word}{word}:" for word in WORDS]
    for loud, keen in product((0, 4), (0, 4)):
        made = reinforge.generate(
            cfg.run.dir,
            unseen,
            max_new_tokens=6,
            temperature=0.0,
            fixed={"loud": loud, "keen": keen},
        )
        assert made[0]["prompt"] == f"{unseen[0]}\nloud:{loud},keen:{keen}"
        wanted = ("AB" if loud else "ab") + ("!" if keen else ".")
        assert sum(line["completion"] == wanted for line in made) >= 10, (loud, keen, made)
    with pytest.raises(InputError, match="none of the attributes loud, keen"):
        reinforge.generate(cfg.run.dir, unseen)
