"""`reinforge data make` with a teacher that was trained for it: in this process and behind our own
server, killed and started again, and training on what came out.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import cli_runs
from helpers.chat_server import served_model
from helpers.teachers import DOCUMENTS, SUMS, TEMPLATE, WRONG, make_teacher
from helpers.toys import SilentView
from reinforge import make_data
from reinforge.build.run import train_config
from reinforge.cli.main import main
from reinforge.config.load import config_from_dict

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def address(teacher: str) -> Iterator[str]:
    with served_model(teacher, max_new_tokens=80) as (url, _):
        yield url


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in SUMS.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def trained(model: str, algorithm: str, source: Path, folder: Path) -> dict[str, float]:
    """The metrics of a few steps on a file, as `reinforge train` does them."""
    config = config_from_dict(
        {
            "model": {"path": model, "device": "cpu"},
            "algorithm": {"name": algorithm},
            "data": {"source": str(source)},
            "train": {"steps": 12, "prompts_per_step": 3, "learning_rate": 2e-3},
            "run": {"dir": str(folder), "checkpoint": {"every": 0}},
        }
    )
    return train_config(config, None, SilentView()).metrics


def test_what_is_made_can_be_trained_on(teacher: str, sums: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.jsonl"
    options: dict[str, Any] = dict(teacher=teacher, n=16, max_new_tokens=12, rewards="exact_match")
    made = make_data("answers", sums, out, at_least=1, **options)
    said = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in made.rows}
    assert said == SUMS, "right ones only, of a teacher that is wrong as often"
    assert made.dropped["low score"] >= 3
    assert trained(teacher, "sft", out, tmp_path / "sft")["sft/loss"] < 0.25
    pairs = make_data("pairs", sums, tmp_path / "pairs.jsonl", **options)
    assert {p["prompt"]: p["chosen"] for p in pairs.rows} == SUMS
    assert WRONG in {p["rejected"] for p in pairs.rows}
    metrics = trained(teacher, "dpo", tmp_path / "pairs.jsonl", tmp_path / "dpo")
    assert metrics["rewards/accuracy"] == 1.0


def test_questions_about_documents_in_the_form_that_was_asked_for(
    teacher: str, address: str, tmp_path: Path
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, (text, _, _) in DOCUMENTS.items():
        (folder / name).write_text(text)
    options: dict[str, Any] = dict(template=TEMPLATE, questions=1, max_new_tokens=80, temperature=0)
    made = make_data("questions", folder, tmp_path / "made.jsonl", teacher=teacher, **options)
    found = {
        Path(row["document"]).name: [m["content"] for m in row["messages"]] for row in made.rows
    }
    assert found == {name: [question, answer] for name, (_, question, answer) in DOCUMENTS.items()}
    other = make_data("questions", folder, tmp_path / "other.jsonl", teacher=address, **options)
    assert [row["messages"] for row in other.rows] == [row["messages"] for row in made.rows]
    assert other.manifest["teacher"] == {"model": "tiny", "server": address}


def test_a_kill_in_the_middle_changes_nothing(
    teacher: str, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["data", "make", "answers", str(sums), "--teacher", teacher, "-n", "4"]
    line += ["--reward", "exact_match", "--best", "2", "--max-new-tokens", "12", "--out"]
    stop = {"REINFORGE_CRASH_AT": "journal:added@2"}
    code, _ = cli_runs.forked(*line, "cut.jsonl", cwd=tmp_path, env=stop)
    assert code == -signal.SIGKILL and not (tmp_path / "cut.jsonl").exists()
    part = tmp_path / ".cut.raw.jsonl.part"
    known = {json.loads(line)[0]["id"] for line in part.read_text().splitlines()}
    assert 0 < len(known) < len(SUMS)
    monkeypatch.chdir(tmp_path)
    for name in ("cut.jsonl", "whole.jsonl"):
        assert main([*line, name]) == 0
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    told = [json.loads((tmp_path / f"{n}.manifest.json").read_text()) for n in ("cut", "whole")]
    assert {**told[0], "file": ""} == {**told[1], "file": ""}
    assert not part.exists()
