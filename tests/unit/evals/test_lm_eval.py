"""lm-evaluation-harness on our forward and engine: the numbers of its own HuggingFace class, and a
task from a file by the command line.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'reinforge[lm-eval]'")
pytestmark = pytest.mark.timeout(300)

from lm_eval.models.huggingface import HFLM  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from reinforge.build.saved_model import open_model  # noqa: E402
from reinforge.cli.main import app  # noqa: E402
from reinforge.core.errors import InputError  # noqa: E402
from reinforge.evals.lm_eval import NativeLM, run_tasks  # noqa: E402

PAIRS = [
    ("2+3=", "5"),
    ("2+3=", "57"),
    ("1+1=", "2"),
    ("", "12+7"),
    ("7 + 8 = ", "15"),
    ("9-4=", "5"),
    ("2+3=", "5"),
]
TEXTS = ["1+2=3", "12 + 7 = 19; 3 + 4 = 7", "8" * 300]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from reinforge.models.tiny import make_tiny_model

    return str(
        make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", width=48, layers=2, heads=4)
    )


@pytest.fixture(scope="module")
def both(model: str) -> tuple[NativeLM, Any]:
    return NativeLM(open_model(model)[0]), HFLM(
        pretrained=model, device="cpu", dtype="float32", batch_size=3
    )


def asked(*rows: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=row, arguments=row) for row in rows]


def test_loglikelihoods_are_theirs(both: tuple[NativeLM, Any]) -> None:
    """Shared contexts, an empty one, one that ends with a blank."""
    ours, theirs = (lm.loglikelihood(asked(*PAIRS), disable_tqdm=True) for lm in both)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert max(abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True)) < 1e-4
    assert ours[0] == ours[-1] and ours[0][0] != ours[1][0]


def test_a_greedy_continuation_is_greedy(both: tuple[NativeLM, Any]) -> None:
    ours = both[0]
    (text,) = ours.generate_until(asked(("2+3=", {"until": [], "max_gen_toks": 4})))
    if text:
        assert ours.loglikelihood(asked(("2+3=", text)), disable_tqdm=True)[0][1]


def test_rolling_is_theirs(both: tuple[NativeLM, Any]) -> None:
    """Texts that fit; the last is longer than the context of 256 tokens, where windows may be cut
    one token apart.
    """
    ours, theirs = (
        lm.loglikelihood_rolling(asked(*((t,) for t in TEXTS)), disable_tqdm=True) for lm in both
    )
    for text, a, b in zip(TEXTS, ours, theirs, strict=True):
        assert abs(a - b) < (1e-4 if len(text) < 250 else 0.05 * abs(b))


def test_generation_is_theirs_and_stops(both: tuple[NativeLM, Any]) -> None:
    requests = asked(
        *(
            (p, {"until": ["\n"], "max_gen_toks": 6, "do_sample": False})
            for p in ("2+3=", "1+1=", "7 + 8 =")
        )
    )
    ours, theirs = (lm.generate_until(requests, disable_tqdm=True) for lm in both)
    assert ours == theirs
    letter = ours[0][1:2]
    if letter:
        (cut,) = both[0].generate_until(asked(("2+3=", {"until": [letter], "max_gen_toks": 6})))
        assert cut == ours[0].split(letter)[0]
    with pytest.raises(InputError, match="repetition_penalty"):
        both[0].generate_until(asked(("2+3=", {"repetition_penalty": 1.2})))


def write_task(folder: Path) -> None:
    rows = [
        {"question": f"{a}+{b}=", "options": [str(a + b), str(a + b + 1)], "gold": 0}
        for a in range(1, 5)
        for b in range(1, 4)
    ]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "sums.yaml").write_text(f"""task: our_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "sums.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")


def test_a_task_of_ones_own(model: str, tmp_path: Path, both: tuple[NativeLM, Any]) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    write_task(tmp_path)
    ours = run_tasks(both[0].model, ["our_sums"], include=tmp_path)
    theirs = simple_evaluate(
        model=both[1],
        tasks=["our_sums"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        log_samples=False,
    )["results"]
    assert ours["our_sums"]["acc,none"] == theirs["our_sums"]["acc,none"]
    result = CliRunner().invoke(
        app,
        [
            "eval",
            model,
            "--runner",
            "lm_eval",
            "--tasks",
            "our_sums",
            "--include",
            str(tmp_path),
            "--limit",
            "6",
        ],
    )
    assert result.exit_code == 0, result.output
    assert "our_sums/acc" in result.output
    result = CliRunner().invoke(app, ["eval", model, "--runner", "lm_eval"])
    assert result.exit_code != 0 and "which tasks" in str(result.exception)
