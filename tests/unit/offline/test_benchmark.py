"""Benchmarks on models and servers: known answers give known numbers, a kill loses nothing, and
what is wrong is told before a model is loaded.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import reinforge
from helpers import hub_server
from helpers.openai_stub import stub_server
from helpers.sandboxes import containment
from reinforge.cli.main import app, main
from reinforge.core.errors import InputError
from reinforge.evals.statistics import wilson
from reinforge.models.tiny import make_tiny_model
from reinforge.offline import benchmark as benchmark_module
from reinforge.offline.completion_sources import NativeSource

SUMS = [
    {"question": f"What is {a} and {a + 1}?", "answer": f"They are added.\n#### {2 * a + 1}"}
    for a in range(4)
]
COLOURS = [
    {"question": f"Colour {i}?", "choices": ["red", "blue"], "answer": i % 2, "subject": s}
    for i in range(4)
    for s in ("one", "two")
]
DOUBLE = {
    "task_id": "Own/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "double",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return str(make_tiny_model(folder, width=48, layers=2, heads=4, context=512))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def adds(body: dict[str, Any]) -> str:
    """Right, but for the first question."""
    words = body["messages"][-1]["content"].split()
    a = int(words[2])
    return f"\\boxed{{{2 * a + 1 if a else 7}}}"


def test_a_server_that_knows_three_of_four(tmp_path: Path) -> None:
    with stub_server(adds) as stub:
        found = reinforge.benchmark(
            "mine", "gsm8k", rows=write(tmp_path / "r.jsonl", SUMS), server=stub.url, out=tmp_path
        )
        assert len(stub.asked) == 4
        assert {a["temperature"] for a in stub.asked} == {0.0}
        assert {a["max_tokens"] for a in stub.asked} == {512}
    result = found["gsm8k"]
    assert result.value == 0.75 and result.rows == 4 and result.unscored == 0
    main = result.metrics["accuracy"]
    assert (main.low, main.high) == pytest.approx(wilson(3, 4))
    assert result.metrics["strict_match"].value == 0 and result.settings["prompt"] == "chat"
    records = lines_of(tmp_path / "gsm8k.jsonl")
    assert [r["scores"]["accuracy"] for r in records] == [0, 1, 1, 1]
    assert records[0]["answer"] == "7" and records[0]["gold"] == "1"
    assert records[0]["why"] == "'7' is not '1'" and SUMS[0]["question"] in str(
        records[0]["prompt"]
    )
    said = json.loads((tmp_path / "results.json").read_text())
    assert said["tasks"]["gsm8k"]["metrics"]["accuracy"]["value"] == 0.75
    assert "records" not in said["tasks"]["gsm8k"]


def test_what_was_answered_is_not_asked_again(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies with two answers: the second command asks for two, and all are as in one go."""
    settings: dict[str, Any] = {"rows": SUMS, "fewshot": 0, "max_new_tokens": 8}
    whole = reinforge.benchmark(model, "gsm8k", **settings)["gsm8k"]
    journal = tmp_path / ".gsm8k.jsonl.part"
    asked: list[str] = []
    dying = True
    complete = NativeSource.complete

    async def counted(self: Any, row: Any, *args: Any, **kw: Any) -> Any:
        asked.append(row.id)
        if dying and len(asked) > 2:
            while len(journal.read_text().splitlines() if journal.exists() else []) < 2:
                await asyncio.sleep(0.01)
            raise RuntimeError("the power is gone")
        return await complete(self, row, *args, **kw)

    monkeypatch.setattr(NativeSource, "complete", counted)
    with pytest.raises(RuntimeError, match="power"):
        reinforge.benchmark(model, "gsm8k", out=tmp_path, **settings)
    assert not (tmp_path / "gsm8k.jsonl").exists() and not (tmp_path / "results.json").exists()
    dying = False
    asked.clear()
    with journal.open("a") as file:
        file.write('[{"id": "2", "comple')  # what a kill leaves of a line
    again = reinforge.benchmark(model, "gsm8k", out=tmp_path, **settings)["gsm8k"]
    assert asked == ["2", "3"]
    assert [r["completion"] for r in again.records] == [r["completion"] for r in whole.records]
    assert not journal.exists()
    asked.clear()
    third = reinforge.benchmark(model, "gsm8k", out=tmp_path, **settings)["gsm8k"]
    assert asked == [] and third.records == again.records
    # a longer answer is another answer
    reinforge.benchmark(model, "gsm8k", out=tmp_path, **(settings | {"max_new_tokens": 9}))
    assert len(asked) == 4


def test_log_probs_of_letters_are_those_of_transformers(model: str, tmp_path: Path) -> None:
    """And they are kept: a second command computes none."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shots = [c | {"question": "Example?", "answer": "A"} for c in COLOURS[:2]]
    settings: dict[str, Any] = {"rows": COLOURS, "shots": shots, "fewshot": 1, "out": tmp_path}
    found = reinforge.benchmark(model, "mmlu", **settings)["mmlu"]
    module = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    right = 0
    for row, record in zip(COLOURS, found.records, strict=True):
        assert f"about {row['subject']}.\n\nExample?" in record["prompt"]
        ids = tokenizer(record["prompt"], return_tensors="pt").input_ids
        with torch.no_grad():
            logp = module(ids).logits[0, -1].log_softmax(-1)
        letters = [tokenizer(f" {x}", add_special_tokens=False).input_ids for x in "AB"]
        # a blank and a letter are two bytes, and here two tokens: the letter depends on the blank
        with torch.no_grad():
            after = module(torch.cat([ids, torch.tensor([letters[0][:1]])], 1)).logits[0, -1]
        want = [float(logp[x[0]] + after.log_softmax(-1)[x[1]]) for x in letters]
        assert record["logprobs"] == pytest.approx(want, abs=1e-4)
        right += (want[1] > want[0]) == (row["answer"] == 1)
    assert found.value == right / 8 and set(found.groups["subject"]) == {"one", "two"}
    kept = (tmp_path / "mmlu.jsonl").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_module, "score_continuations", None)
        assert reinforge.benchmark(model, "mmlu", **settings)["mmlu"].value == found.value
    assert (tmp_path / "mmlu.jsonl").read_bytes() == kept


def test_a_prompt_that_does_not_fit_counts_as_wrong(model: str) -> None:
    rows = [SUMS[i] | {"question": "x" * size} for i, size in enumerate((480, 600))]
    found = reinforge.benchmark(model, "gsm8k", rows=rows, fewshot=0)["gsm8k"]
    # the answer to the first ends where the model's context does
    first, second = found.records
    assert first["stop"] == "length" and 0 < len(first["completion"]) < 30
    assert found.rows == 2 and "too long for the model" in second["why"]
    assert second["scores"]["accuracy"] == 0.0


def test_pass_at_k_of_programs(tmp_path: Path) -> None:
    containment("own")
    answers = [
        "```\ndef double(x):\n    return 2 * x\n```",
        *["```\ndef double(x): return 5\n```"] * 3,
    ]
    with stub_server(lambda body: answers) as stub:
        settings: dict[str, Any] = {"rows": [DOUBLE], "n": 4, "server": stub.url}
        found = reinforge.benchmark("mine", "humaneval", temperature=0.8, **settings)["humaneval"]
        with pytest.raises(InputError, match="greedy"):
            reinforge.benchmark("mine", "humaneval", **settings)
    assert found.metric == "pass@1" and found.value == 0.25
    assert found.metrics["pass@4"].value == 1.0
    assert [r["scores"]["pass@1"] for r in found.records] == [1, 0, 0, 0]


def test_a_run_and_its_checkpoints(model: str, tmp_path: Path) -> None:
    """What is measured are the weights of the checkpoint that is named."""
    rows = write(tmp_path / "t.jsonl", [{"prompt": "2+2=", "completion": "4"}] * 4)
    reinforge.train(
        model=model,
        data=rows,
        algorithm="sft",
        steps=2,
        learning_rate=0.1,
        dir=tmp_path / "run",
        overrides=["run.checkpoint.every=1"],
    )
    settings: dict[str, Any] = {"rows": COLOURS, "fewshot": 0, "chat": False}
    by = {
        name: [r["logprobs"] for r in found["mmlu"].records]
        for name, found in (
            ("base", reinforge.benchmark(model, "mmlu", **settings)),
            ("newest", reinforge.benchmark(tmp_path / "run", "mmlu", **settings)),
            ("2", reinforge.benchmark(tmp_path / "run", "mmlu", checkpoint="2", **settings)),
            ("1", reinforge.benchmark(tmp_path / "run", "mmlu", checkpoint="1", **settings)),
        )
    }
    assert by["newest"] == by["2"] and by["1"] not in (by["2"], by["base"])


def test_the_command(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "gsm8k.jsonl", SUMS)
    write(tmp_path / "mmlu.jsonl", COLOURS)
    line = ["benchmark", model, "--rows", ".", "--fewshot", "0", "--max-new-tokens", "4"]
    done = CliRunner().invoke(app, [*line, "--tasks", "gsm8k,mmlu", "--limit", "3"])
    assert done.exit_code == 0, done.output
    assert "gsm8k\taccuracy\t" in done.output and "mmlu\taccuracy\t" in done.output
    folder = Path("benchmarks/tiny")
    (records,) = (line for line in done.output.splitlines() if line.startswith("records"))
    assert records.split(maxsplit=1)[1] == f"{folder}/gsm8k.jsonl, {folder}/mmlu.jsonl"
    assert len(lines_of(folder / "gsm8k.jsonl")) == 3
    # another task of the same model: the results of the first stay
    done = CliRunner().invoke(app, [*line, "--tasks", "mmlu"])
    assert done.exit_code == 0, done.output
    said = json.loads((folder / "results.json").read_text())["tasks"]
    assert said["gsm8k"]["rows"] == 3 and said["mmlu"]["rows"] == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "gsmk8"], "Did you mean gsm8k"),
        (["--tasks", ","], "which benchmarks"),
        (["--tasks", "gsm8k", "--rows", "none.jsonl"], "there is no file none.jsonl"),
        (["--tasks", "gsm8k,mmlu", "--rows", "r.jsonl"], "Say whose rows these are"),
        (["--tasks", "gsm8k", "--rows", "math=r.jsonl"], "no task of this call"),
        (["--tasks", "gsm8k", "--rows", "a.jsonl", "--rows", "b.jsonl"], "whose rows"),
        (
            ["--tasks", "mmlu", "--plain", "--rows", "r.jsonl", "--server", "http://x/v1"],
            "no column",
        ),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "r.jsonl", SUMS)
    assert main(["benchmark", "no/such-model", "--chat", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_server_tells_no_log_probs() -> None:
    with pytest.raises(InputError, match="which a server does not tell"):
        reinforge.benchmark(
            "x", "mmlu", rows=COLOURS, fewshot=0, chat=False, server="http://127.0.0.1:9/v1"
        )


def test_offline_is_told_at_once(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Before the model is loaded; nothing is timed but a hang would be seen."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError) as error:
        reinforge.benchmark("no/such-model", "gsm8k", chat=True)
    assert error.value.where == "--rows gsm8k" and "HF_HUB_OFFLINE" in str(error.value)
    assert "--rows gsm8k=FILE (.jsonl or .parquet, with the columns question, answer)" in str(
        error.value
    )
    with pytest.raises(InputError, match=r"--shots gsm8k=FILE.* or --fewshot 0"):
        reinforge.benchmark(model, "gsm8k", rows=SUMS)


def test_rows_of_the_hub(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset's own data set, its subset and its splits."""
    with hub_server.running() as hub:
        hub_server.pointed_at(hub, tmp_path / "home", monkeypatch)
        tables = {
            f"main/{split}-00000-of-00001.jsonl": "".join(json.dumps(r) + "\n" for r in rows)
            for split, rows in (("test", SUMS[:3]), ("train", SUMS[3:]))
        }
        card = (
            "---\nconfigs:\n- config_name: main\n  data_files:\n"
            "  - {split: train, path: main/train-*}\n  - {split: test, path: main/test-*}\n---\n"
        )
        files = {**tables, "README.md": card}
        hub.add("openai/gsm8k", files, "dataset")
        found = reinforge.benchmark(model, "gsm8k", fewshot=1, max_new_tokens=2)["gsm8k"]
    assert found.rows == 3 and str(SUMS[3]["question"]) in found.records[0]["prompt"]
