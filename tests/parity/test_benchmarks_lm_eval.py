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

import yaml  # noqa: E402
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import reinforge  # noqa: E402
from helpers.openai_stub import stub_server  # noqa: E402
from reinforge.models.tiny import make_tiny_model  # noqa: E402

THEIRS = Path(lm_eval.__file__).parent / "tasks"
NEW = 20
# what is said, and what is right
SAID = {
    " So 3+4=7\n#### 7": "7",
    " #### 7.": "7",
    " #### 1,007": "1,007",
    " #### 1007": "1,007",
    " #### $7": "7",
    " So it is 7 in all": "7",
    " #### 7 of the 12": "7",
    " #### 12\n#### 7": "7",
    " 12 and then -7": "-7",
    " #### -7": "-7",
    " #### +7": "7",
    " 7.0": "7",
    " seven": "7",
    " ": "7",
    " #### 7\n\nQuestion: 1+1?\nAnswer: #### 2": "7",
    " Is it 7? #### 8 or": "7",
}
SUMS = [
    {"question": f"Which is number {i}?", "answer": f"This.\n#### {gold}"}
    for i, gold in enumerate(SAID.values())
]
CHOICES = [
    {"question": f" Number {i}? ", "choices": [str(i + k) for k in range(4)], "answer": (7 * i) % 4}
    for i in range(6)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """It has learned one answer to all questions, which is right for some."""
    folder = tmp_path_factory.mktemp("model")
    tiny = make_tiny_model(folder / "tiny", width=64, layers=2, heads=4, context=512)
    taught = [
        {"prompt": f"Question: {row['question']}\nAnswer:", "completion": " #### 7 or -7"}
        for row in SUMS
    ]
    result = reinforge.train(
        model=tiny,
        data=taught,
        algorithm="sft",
        steps=100,
        prompts_per_step=4,
        learning_rate=1e-2,
        dir=folder / "run",
    )
    result.model.save_pretrained(folder / "taught")
    result.tokenizer.save_pretrained(folder / "taught")
    return str(folder / "taught")


def their_results(lm: Any, folder: Path, name: str, base: str, **task: Any) -> dict[str, Any]:
    """Of a task that includes theirs, with rows of our own."""
    described = {"include": str(THEIRS / base), "task": name, "dataset_path": "json"}
    (folder / f"{name}.yaml").write_text(
        yaml.safe_dump({**described, "dataset_name": None, **task})
    )
    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=[name],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return {"metrics": found["results"][name], "samples": found["samples"][name]}


def transformers_model(path: str) -> Any:
    return HFLM(pretrained=path, device="cpu", dtype="float32", batch_size=1)


def their_gsm8k(lm: Any, folder: Path, **task: Any) -> dict[str, Any]:
    until = {"until": ["Question:"], "do_sample": False, "max_gen_toks": NEW}
    return their_results(
        lm, folder, "own_gsm8k", "gsm8k/gsm8k.yaml", generation_kwargs=until, **task
    )


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_gsm8k_asks_and_judges_as_they_do(tmp_path: Path) -> None:
    """The same prompts with two examples, and the same verdicts on answers of every kind."""
    shots = [{"question": f"Example {i}?", "answer": f"So.\n#### {i}"} for i in range(3)]
    files = {"test": write(tmp_path / "t.jsonl", SUMS), "train": write(tmp_path / "s.jsonl", shots)}
    by_question = dict(zip([row["question"] for row in SUMS], SAID, strict=True))

    def answer(prompt: str) -> str:
        asked = prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
        return by_question[asked].split("Question:")[0]

    class Reader(LM):
        """Says what is to be said."""

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return [answer(request.args[0]) for request in requests]

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
            raise AssertionError

        loglikelihood_rolling = loglikelihood

    theirs = their_gsm8k(
        Reader(),
        tmp_path,
        dataset_kwargs={"data_files": files},
        num_fewshot=2,
        fewshot_config={"sampler": "first_n"},
    )
    with stub_server(lambda body: answer(body["prompt"])) as stub:
        ours = reinforge.benchmark(
            "them",
            "gsm8k",
            rows=files["test"],
            shots=files["train"],
            fewshot=2,
            chat=False,
            server=stub.url,
        )["gsm8k"]
    asked = {s["doc"]["question"]: s["arguments"][0][0] for s in theirs["samples"]}
    assert [r["prompt"] for r in ours.records] == [asked[row["question"]] for row in SUMS]
    verdicts = {(s["doc"]["question"], s["filter"]): s["exact_match"] for s in theirs["samples"]}
    for row, record in zip(SUMS, ours.records, strict=True):
        want = {
            "strict_match": verdicts[row["question"], "strict-match"],
            "flexible_extract": verdicts[row["question"], "flexible-extract"],
        }
        found = {name: record["scores"][name] for name in want}
        assert found == want, record["completion"]
    strict = theirs["metrics"]["exact_match,strict-match"]
    assert ours.metrics["strict_match"].value == pytest.approx(strict) and 0 < strict < 1


def test_gsm8k_has_their_numbers(model: str, tmp_path: Path) -> None:
    rows = write(tmp_path / "test.jsonl", SUMS)
    theirs = their_gsm8k(
        transformers_model(model),
        tmp_path,
        dataset_kwargs={"data_files": {"test": rows}},
        training_split=None,
        fewshot_split=None,
        num_fewshot=0,
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
    # it did learn: it says 7, and then -7
    golds = list(SAID.values())
    assert strict == golds.count("7") / len(golds) > flexible == golds.count("-7") / len(golds) > 0


def test_mmlu_has_their_log_probs(model: str, tmp_path: Path) -> None:
    shots = [row | {"question": f"Example {i}?"} for i, row in enumerate(CHOICES[:3])]
    files = {
        "test": write(tmp_path / "test.jsonl", CHOICES),
        "dev": write(tmp_path / "d.jsonl", shots),
    }
    theirs = their_results(
        transformers_model(model),
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
