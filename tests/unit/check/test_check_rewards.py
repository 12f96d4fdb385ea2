"""`reinforge check rewards`: sound rewards pass, and each kind of hole is found by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reinforge.check.attacks import attacks
from reinforge.check.rewards import RewardFindings, check_rewards
from reinforge.cli.main import main
from reinforge.config.load import config_from_dict
from reinforge.core.errors import InputError
from reinforge.core.sample import Row

HOLES = """
def empty_is_fine(completions, answer):
    return [1.0 if not c.strip() or c.strip() == a else 0.0 for c, a in zip(completions, answer)]

def contained(completions, answer):
    return [float(a in c) for c, a in zip(completions, answer)]

def longest(completions, answer):
    return [float(len(c) > 10_000 or c.strip() == a) for c, a in zip(completions, answer)]

def fragile(completions, answer):
    return [float(int(c) == int(a)) for c, a in zip(completions, answer)]

def stern(completions, answer):
    return [0.0 for c in completions]

def wide(completions, answer):
    return [float(c.strip().isdigit() and int(c) == int(a)) for c, a in zip(completions, answer)]
"""


def found(
    tmp_path: Path,
    rewards: list[dict[str, Any]],
    rows: list[dict[str, Any]] | None = None,
    **kw: Any,
) -> RewardFindings:
    import json

    data = tmp_path / "rows.jsonl"
    data.write_text(
        "\n".join(
            json.dumps(r)
            for r in rows
            or [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(30, 46)]
        )
    )
    (tmp_path / "holes.py").write_text(HOLES)
    cfg = {
        "model": {"path": "none"},
        "algorithm": {"name": "grpo"},
        "data": {"source": str(data)},
        "rewards": rewards,
        "train": {"steps": 1},
        "run": {"dir": "x"},
    }
    return check_rewards(config_from_dict(cfg, where="test"), **kw)


def failed(result: RewardFindings) -> set[str]:
    return {t.kind.removesuffix(", in the right form") for t in result.tried if not t.ok}


@pytest.mark.parametrize(
    "rewards",
    [
        [{"name": "exact_number"}],
        [{"name": "exact_match"}],
        [{"name": "number", "options": {"relative": 0.001}}],
        [{"name": "math", "timeout": 20}],
        [{"name": "exact_number", "gate": "tags"}, {"name": "tags", "weight": 0.2}],
        [{"name": "exact_number"}, {"name": "repetition", "weight": -0.1}],
    ],
    ids=lambda r: "+".join(x["name"] for x in r),
)
def test_sound_rewards_pass(tmp_path: Path, rewards: list[dict[str, Any]]) -> None:
    result = found(tmp_path, rewards)
    assert result.ok and result.tried[0].passed == 16 and len(result.tried) > 20
    assert sum(t.passed for t in result.tried[1:]) == 0


def test_choice_is_sound(tmp_path: Path) -> None:
    rows = [{"prompt": f"Which one? {i}", "answer": "ABCD"[i % 4]} for i in range(8)]
    assert found(tmp_path, [{"name": "choice"}], rows).ok


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        ("empty_is_fine", {"nothing", "white space"}),
        (
            "contained",
            {
                "the answer among 1000 others",
                "a thousand boxes",
                "two answers",
                "the answer, taken back",
            },
        ),
        ("longest", {"a thousand boxes", "nested braces", "100,000 digits", "a megabyte"}),
        ("wide", {"full-width digits", "100,000 digits"}),
        ("stern", {"right, as it is"}),
    ],
)
def test_holes_are_found(tmp_path: Path, function: str, kinds: set[str]) -> None:
    result = found(tmp_path, [{"name": f"{tmp_path}/holes.py:{function}"}])
    assert not result.ok and failed(result) == kinds


def test_a_reward_that_raises_is_found(tmp_path: Path) -> None:
    result = found(tmp_path, [{"name": f"{tmp_path}/holes.py:fragile"}])
    empty = next(t for t in result.tried if t.kind == "nothing")
    assert not empty.ok and empty.raised is not None and "fragile raised at" in empty.raised
    assert "holes.py:12 in fragile: ValueError: " in empty.raised


def test_gold_in_a_form_of_its_own(tmp_path: Path) -> None:
    rewards = [
        {"name": "regex", "weight": 0.5, "options": {"pattern": "^=> .*", "full": True}},
        {"name": "exact_number"},
    ]
    assert not found(tmp_path, rewards).ok and found(tmp_path, rewards, gold="=> {answer}").ok
    with pytest.raises(InputError, match="--gold"):
        found(tmp_path, rewards, gold="=>")


def test_attacks_never_end_in_the_answer() -> None:
    for gold in ("7", "9", "-3", "2.5", "B", "Paris", "999"):
        for kind, text in attacks(Row("r", "What?"), gold).items():
            assert (
                text is None
                or not text
                or kind in ("a printed verdict",)
                or not text.split()
                or text.split()[-1].strip(".{}\\boxed") != gold
            ), (gold, kind)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "20+3=", "answer": "23"}\n'
    )
    (tmp_path / "c.yaml").write_text(
        "model: {path: none}\nalgorithm: {name: grpo}\ndata: {source:"
        f" {tmp_path}/rows.jsonl}}\nrewards: [{{name: exact_number}}]\ntrain: {{steps: 1}}\nrun:"
        " {dir: x}\n"
    )
    assert main(["check", "rewards", str(tmp_path / "c.yaml")]) == 0
    assert "a thousand boxes" in capsys.readouterr().out
    assert (
        main(
            [
                "check",
                "rewards",
                str(tmp_path / "c.yaml"),
                "rewards=[{name: regex, options: {pattern: '\\d|^$'}}]",
            ]
        )
        == 1
    )
    assert "FAILS" in capsys.readouterr().out
    assert main(["check", "--help"]) == 0 and "rewards" in capsys.readouterr().out
