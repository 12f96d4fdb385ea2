"""`runs compare` finds the first step at which two runs part, why, and the first token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import cli_runs
from reinforge.build.first_token import first_token
from reinforge.build.run import train_config
from reinforge.cli.main import main
from reinforge.config.load import load_config
from reinforge.loops.parting import DivergencePoint, find_parting
from reinforge.loops.view import NoView
from reinforge.rollout.kept import KeptRollouts

Variant = Callable[..., Path]


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    """Runs of four steps on rows of a file, with one thing changed."""
    folder = tmp_path_factory.mktemp("compare")
    model = cli_runs.make_model(folder, width=16)
    config = cli_runs.write_config(
        folder,
        model,
        train={"steps": 4, "prompts_per_step": 2},
        rollout={"max_new_tokens": 6},
        eval={"every": 0},
        run={"checkpoint": {"every": 0}},
    )
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]

    def made(name: str, *settings: str, numbers: int = 12, marks: str = "") -> Path:
        (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:numbers]))
        text = cli_runs.PARTS.replace("c.isdigit()", f"c.isdigit() or c in {marks!r}")
        (folder / "parts.py").write_text(text)
        own = [f"data.source={folder / 'rows.jsonl'}", "data.options={}", "data.eval.size=0"]
        run = folder / name
        train_config(load_config(config, [*own, f"run.dir={run}", *settings]), view=NoView())
        return run

    return made


@pytest.fixture(scope="module")
def base(variant: Variant) -> Path:
    return variant("base", "run.keep_rollouts=true")


@pytest.fixture(scope="module")
def cold(variant: Variant) -> Path:
    return variant("cold", "rollout.temperature=0.2")


def parting(first: Path, second: Path) -> DivergencePoint:
    compared, found = find_parting(first, second)
    assert compared == 4
    assert found is not None
    return found


def test_two_runs_of_one_configuration_do_not_part(base: Path, variant: Variant) -> None:
    assert find_parting(base, variant("same", "eval.every=2", "run.log.samples=2")) == (4, None)


def test_a_setting_of_sampling_shows_in_the_first_token(base: Path, cold: Path) -> None:
    found = parting(base, cold)
    assert (found.step, found.cause) == (1, "config")
    assert found.what.what == "tokens"
    assert found.evidence == ["rollout.temperature: 1.0 and 0.2"]
    assert first_token(base, cold, found) is None, "one of them kept nothing"
    token = first_token(base, cold, found, replayed=True)
    assert token is not None
    kept = KeptRollouts(base).samples(1)
    assert kept is not None
    sample = kept[found.what.group][found.what.sample or 0]
    place = int(sample.trained.nonzero()[token.position])
    assert token.logprobs[0] == float(sample.logprobs[place])
    assert token.tokens[0] != token.tokens[1]


def test_a_setting_of_learning_shows_in_the_update(base: Path, variant: Variant) -> None:
    found = parting(base, variant("fast", "train.learning_rate=0.004"))
    assert (found.step, found.what.what, found.what.group) == (1, "update", "")
    assert (found.cause, found.evidence) == ("config", ["train.learning_rate: 0.003 and 0.004"])


def test_a_schedule_that_ends_later_shows_when_it_falls(base: Path, variant: Variant) -> None:
    found = parting(base, variant("longer", "train.steps=6"))
    assert (found.step, found.what.what) == (4, "update"), "warm-up and its end are the same"
    assert found.evidence == ["train.steps: 4 and 6"]


def test_other_rows(base: Path, variant: Variant) -> None:
    found = parting(base, variant("rows", numbers=11))
    assert (found.what.what, found.cause) == ("rows", "data")


def test_a_function_that_answers_differently(base: Path, variant: Variant) -> None:
    """Its name in the configuration is the same."""
    marks = "".join(chr(i) for i in range(32, 127))
    found = parting(base, variant("marks", marks=marks))
    assert (found.step, found.what.what, found.cause) == (1, "rewards", "outside")


@pytest.mark.parametrize(
    ("key", "value", "cause"), [("threads", 7, "numerics"), ("code", "0", "code")]
)
def test_another_machine_and_other_code(
    base: Path, tmp_path: Path, key: str, value: object, cause: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(base, other)
    lines = cli_runs.lines(other / "anchors.jsonl")
    lines[0]["begins"][key] = value
    lines[2]["weights"] = "0"
    (other / "anchors.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = parting(base, other)
    assert (found.step, found.what.what, found.cause) == (2, "weights", cause)


def test_the_page(base: Path, cold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "compare", str(base), str(cold)]) == 0
    page = capsys.readouterr().out
    assert "part at" in page
    assert "config: rollout.temperature: 1.0 and 0.2" in page
    assert main(["runs", "compare", str(base), str(base)]) == 0
    assert "nowhere: 4 steps are equal, bit for bit" in capsys.readouterr().out
