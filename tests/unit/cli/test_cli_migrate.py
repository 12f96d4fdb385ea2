"""The command `migrate`: the configuration on one stream, what is said of it on the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reinforge.cli.main import main
from reinforge.config.load import load_config

FILE = "stage: sft\nmodel_name_or_path: org/model\ndataset: rows.json\n"
FILE += "finetuning_type: full\nodd_key: 1\n"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text(FILE)
    return path


def test_the_configuration_is_on_standard_output(
    theirs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["migrate", str(theirs)]) == 0
    out, err = capsys.readouterr()
    (tmp_path / "ours.yaml").write_text(out)
    config = load_config(tmp_path / "ours.yaml")
    assert (config.model.path, config.data.source) == ("org/model", "rows.json")
    assert config.adapter is None
    assert "not known:\n  odd_key = 1" in err and "LLaMA-Factory, sft; 5 keys" in err


def test_a_file_is_written_once(
    theirs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ours = tmp_path / "ours.yaml"
    assert main(["migrate", str(theirs), "-o", str(ours), "--devices", "4"]) == 0
    assert load_config(ours).train.prompts_per_step == 32  # 8 a device, their default
    assert f"next: reinforge plan {ours}" in capsys.readouterr().out
    assert main(["migrate", str(theirs), "-o", str(ours)]) == 2
    assert "this file exists" in capsys.readouterr().err


def test_json(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(theirs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["library"] == "LLaMA-Factory" and found["config"]["algorithm"] == {"name": "sft"}
    assert {note["theirs"]: note["state"] for note in found["notes"]}["odd_key"] == "unknown"


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["migrate", str(tmp_path / "none.yaml")]) == 2
    assert "no such" in capsys.readouterr().err
