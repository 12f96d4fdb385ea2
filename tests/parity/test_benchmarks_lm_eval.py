"""Presets beside the tasks of lm-evaluation-harness: its own definitions of gsm8k and mmlu, its own
HuggingFace class, the same rows and the same model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm_eval is not installed: pip install 'reinforge[lm-eval]'"
)
pytestmark = pytest.mark.timeout(300)

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import reinforge  # noqa: E402
from reinforge.models.tiny import make_tiny_model  # noqa: E402

THEIRS = Path(lm_eval.__file__).parent / "tasks"
ENDS = ("#### {n}", "#### {n}.", "So #### {n} it is", "it is {n}", "#### ${n}", "#### {m}", "none")
NEW = 20
SUMS = [
    {
        "question": f"{'abcdefghijklmn'[i]}: {i}+{i}?",
        "answer": f"Twice.\n#### {2 * i * (1000 if i == 12 else 1):,}",
    }
    for i in range(14)
]
CHOICES = [
    {"question": f" Number {i}? ", "choices": [str(i + k) for k in range(4)], "answer": (7 * i) % 4}
    for i in range(6)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """It has learned by heart how to end the answers of gsm8k, rightly and wrongly."""
    folder = tmp_path_factory.mktemp("model")
    tiny = make_tiny_model(folder / "tiny", width=64, layers=2, heads=4, context=512)
    taught = [
        {
            "prompt": f"Question: {row['question']}\nAnswer:",
            "completion": " "
            + ENDS[i % len(ENDS)].format(n=row["answer"].rpartition(" ")[2], m=2 * i + 1),
        }
        for i, row in enumerate(SUMS)
    ]
    result = reinforge.train(
        model=tiny,
        data=taught,
        algorithm="sft",
        steps=120,
        prompts_per_step=14,
        learning_rate=1e-2,
        dir=folder / "run",
    )
    result.model.save_pretrained(folder / "taught")
    result.tokenizer.save_pretrained(folder / "taught")
    return str(folder / "taught")


def their_results(model: str, folder: Path, name: str, base: str, **task: Any) -> dict[str, Any]:
    """Of a task that includes theirs, with rows of our own."""
    import yaml

    described = {"include": str(THEIRS / base), "task": name, "dataset_path": "json"}
    (folder / f"{name}.yaml").write_text(
        yaml.safe_dump({**described, "dataset_name": None, **task})
    )
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, device="cpu", dtype="float32", batch_size=1),
        tasks=[name],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return {"metrics": found["results"][name], "samples": found["samples"][name]}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_gsm8k_has_their_numbers(model: str, tmp_path: Path) -> None:
    rows = write(tmp_path / "test.jsonl", SUMS)
    theirs = their_results(
        model,
        tmp_path,
        "own_gsm8k",
        "gsm8k/gsm8k.yaml",
        dataset_kwargs={"data_files": {"test": rows}},
        training_split=None,
        fewshot_split=None,
        num_fewshot=0,
        generation_kwargs={"until": ["Question:"], "do_sample": False, "max_gen_toks": NEW},
    )
    ours = reinforge.benchmark(
        model, "gsm8k", rows=rows, fewshot=0, chat=False, max_new_tokens=NEW
    )["gsm8k"]
    said = {s["doc"]["question"]: s["resps"][0][0] for s in theirs["samples"]}
    assert [r["completion"] for r in ours.records] == [said[row["question"]] for row in SUMS]
    strict = theirs["metrics"]["exact_match,strict-match"]
    flexible = theirs["metrics"]["exact_match,flexible-extract"]
    assert ours.metrics["strict_match"].value == pytest.approx(strict)
    assert ours.metrics["flexible_extract"].value == pytest.approx(flexible)
    # it did learn: the two say different things, and neither everything nor nothing
    assert 0 < strict < flexible < 1


def test_mmlu_has_their_log_probs(model: str, tmp_path: Path) -> None:
    shots = [row | {"question": f"Example {i}?"} for i, row in enumerate(CHOICES[:3])]
    files = {
        "test": write(tmp_path / "test.jsonl", CHOICES),
        "dev": write(tmp_path / "d.jsonl", shots),
    }
    theirs = their_results(
        model,
        tmp_path,
        "own_mmlu",
        "mmlu/default/_default_template_yaml",
        dataset_kwargs={"data_files": files},
        num_fewshot=2,
        description="The following are multiple choice questions (with answers).\n\n",
    )
    ours = reinforge.benchmark(
        model, "mmlu", rows=files["test"], shots=files["dev"], fewshot=2, chat=False
    )["mmlu"]
    said = {s["doc"]["question"]: [r[0][0] for r in s["resps"]] for s in theirs["samples"]}
    for row, record in zip(CHOICES, ours.records, strict=True):
        assert record["logprobs"] == pytest.approx(said[row["question"]], abs=1e-3)
    assert ours.value == pytest.approx(theirs["metrics"]["acc,none"])
