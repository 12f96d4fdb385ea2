"""benchmarks/gpu_train.py: what it reads from a run's metrics, and that its prompts have the
length they are said to have."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import gpu_train
import pytest


def line(step: int, seconds: float, train_gib: float) -> dict[str, float]:
    return {
        "step": step,
        "time/train": seconds - 1,
        "time/step": seconds,
        "memory/train_gib": train_gib,
        "response/length": 8.0,
    }


def test_the_first_two_steps_are_not_in_the_median_but_in_the_memory() -> None:
    lines = [line(1, 40.0, 30.0), line(2, 9.0, 50.0)]
    lines += [line(n, seconds, 20.0) for n, seconds in enumerate((3.0, 7.0, 4.0), 3)]
    found = gpu_train.measured([*lines, {"step": 5, "eval/accuracy": 1.0}])
    assert (found["steps"], found["step"], found["phases"]["train"]) == (5, 4.0, 3.0)
    assert (found["first_step"], found["all_steps"]) == (40.0, 63.0)
    assert (found["fastest"], found["slowest"]) == (3.0, 7.0)
    assert found["gib"] == {"train_gib": 50.0}


def test_a_run_that_broke_off_before_its_first_step() -> None:
    assert gpu_train.measured([]) == {"steps": 0}


def test_what_the_run_chose_is_in_its_log() -> None:
    line = "layers are not compiled, because it would save 2% (model.compile: auto)"
    assert gpu_train.said(f"loading\n{line}\nstep 1/4  reward 1\n") == [line]


def test_a_word_is_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(gpu_train, "VOCABULARY", 49000)
    gpu_train.write_tokenizer(tmp_path / "tokenizer")
    asked = Namespace(prompts=1, steps=3, prompt=16, response=5, sft=True)
    gpu_train.write_rows(tmp_path / "rows.jsonl", asked)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    read = [json.loads(text) for text in (tmp_path / "rows.jsonl").open()]
    rows = [row["prompt"] for row in read]
    assert [len(tokenizer.encode(row["completion"])) for row in read] == [5, 5, 5]
    assert [len(tokenizer.encode(text)) for text in rows] == [16, 16, 16]
    assert tokenizer.decode(tokenizer.encode(rows[0])) == rows[0]
    assert tokenizer.eos_token_id is None


def test_further_runs_have_further_settings_and_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[Path, list[str]]] = []
    prepared: list[str] = []

    def prepare(args: Namespace, folder: Path) -> Path:
        prepared.append(args.shape)
        return folder / "train.yaml"

    def train(path: Path, run: Path, settings: list[str]) -> tuple[int, float]:
        seen.append((path, settings))
        run.mkdir()
        run.with_suffix(".log").write_text("")
        (run / "metrics.jsonl").write_text("")
        return 0, 1.0

    monkeypatch.setattr(gpu_train, "prepare", prepare)
    monkeypatch.setattr(gpu_train, "train", train)
    words = ["--shape", "tiny", "--dir", str(tmp_path), "a=1", "--then", "b=2 c=3", "--then", "d=4"]
    monkeypatch.setattr("sys.argv", ["gpu_train.py", *words])
    assert gpu_train.main() == 0
    settings = [["a=1"], ["a=1", "b=2", "c=3"], ["a=1", "d=4"]]
    assert seen == [(tmp_path / "train.yaml", one) for one in settings] and prepared == ["tiny"]
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["settings"] for one in printed] == settings
