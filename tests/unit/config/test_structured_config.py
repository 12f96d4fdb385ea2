"""The sections `rollout.structured` and `eval.structured`: one form each, from the file or inline;
`plan` names the key of what is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from reinforge.build.constraints import eval_constraint, rollout_constraint
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.config.structured import StructuredConfig
from reinforge.core.constraint import Constraint
from reinforge.core.errors import InputError
from reinforge.plan.plan import PlanReport, describe
from reinforge.plan.preflight import preflight


def config(folder: Path, **more: Any) -> Config:
    return config_from_dict(
        {
            "model": {"path": "org/name"},
            "algorithm": {"name": "grpo", "group_size": 4},
            "data": {"source": "reasoning_gym:chain_sum"},
            "rewards": [{"name": "exact_number"}],
            "train": {"steps": 8},
            "run": {"dir": str(folder / "run")},
            **more,
        }
    )


def test_one_form_and_no_more(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rollout.structured.*regex and json_object given"):
        config(tmp_path, rollout={"structured": {"regex": "a", "json_object": True}})
    with pytest.raises(InputError, match="nothing given; give one of regex, json_schema"):
        config(tmp_path, rollout={"structured": {}})


def test_forms_become_constraints(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    (tmp_path / "g.lark").write_text('start: "a"')
    forms: list[tuple[dict[str, Any], Constraint]] = [
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"json_object": True}, Constraint("json_object")),
        ({"json_schema": {"type": "string"}}, Constraint("json_schema", '{"type": "string"}')),
        (
            {"json_schema": str(tmp_path / "s.json")},
            Constraint("json_schema", '{"type": "integer"}'),
        ),
        ({"grammar": 'start: "b"'}, Constraint("grammar", 'start: "b"')),
        ({"grammar": str(tmp_path / "g.lark")}, Constraint("grammar", 'start: "a"')),
    ]
    for given, wanted in forms:
        assert StructuredConfig(**given).constraint("x") == wanted


def test_an_evaluation_has_that_of_training_unless_it_has_its_own(tmp_path: Path) -> None:
    plain = config(tmp_path)
    assert rollout_constraint(plain) is None and eval_constraint(plain) is None
    one = config(tmp_path, rollout={"structured": {"regex": "a"}})
    assert rollout_constraint(one) == eval_constraint(one) == Constraint("regex", "a")
    two = config(
        tmp_path,
        rollout={"structured": {"regex": "a"}},
        eval={"structured": {"json_object": True}},
    )
    assert rollout_constraint(two) == Constraint("regex", "a")
    assert eval_constraint(two) == Constraint("json_object")


@pytest.mark.parametrize(
    ("where", "form", "said"),
    [
        ("rollout", {"regex": "(a"}, "rollout.structured.regex: this regular expression cannot"),
        ("eval", {"json_schema": {"type": "?"}}, "eval.structured.json_schema: this JSON schema"),
        ("eval", {"grammar": "start: NO"}, "eval.structured.grammar: this grammar cannot be used"),
        ("rollout", {"json_schema": "none.json"}, "rollout.structured.json_schema: cannot read"),
        ("rollout", {"grammar": "none.lark"}, "rollout.structured.grammar: cannot read none.lark"),
    ],
)
def test_plan_names_the_key(tmp_path: Path, where: str, form: Any, said: str) -> None:
    report = preflight(config(tmp_path, **{where: {"structured": form}}))
    assert any(error.startswith(said) for error in report.errors), report.errors


def test_plan_finds_nothing_wrong_with_a_right_one(tmp_path: Path) -> None:
    report = preflight(config(tmp_path, rollout={"structured": {"regex": "[0-9]+"}}))
    assert not any("structured" in error for error in report.errors)


def test_plan_says_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    report = preflight(config(tmp_path, eval={"structured": {"json_object": True}}))
    assert any("pip install 'reinforge[structured]'" in error for error in report.errors)


def test_plan_says_what_answers_match(tmp_path: Path) -> None:
    def lines(**rollout: Any) -> dict[str, str]:
        report = preflight(config(tmp_path, rollout=rollout))
        return dict(describe(PlanReport(summary=report.summary)))

    assert "answers" not in lines() and "drafts" not in lines()
    found = lines(structured={"regex": "yes|no"})
    assert found["answers"] == "match rollout.structured.regex: yes|no"
    assert lines(structured={"json_object": True})["answers"] == (
        "match rollout.structured.json_object"
    )
    long = lines(structured={"json_schema": {"enum": ["a" * 40, "b" * 40]}})["answers"]
    start = 'match rollout.structured.json_schema: {"enum": ["aaa'
    assert long.startswith(start) and long.endswith("bb...") and len(long) == 38 + 60
    assert lines(speculation={"when": "tail", "rows": 8})["drafts"] == (
        "3 tokens are guessed at once while at most 8 sequences are left"
    )
    assert lines(speculation={"when": "always", "drafts": 5})["drafts"] == (
        "5 tokens are guessed at once"
    )
