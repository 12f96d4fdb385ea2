"""What the presets ask, and what their judges say of right, wrong and hostile answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.sandboxes import containment
from helpers.toys import run
from reinforge.core.errors import InputError
from reinforge.evals.benchmarks.humaneval import from_chat
from reinforge.evals.benchmarks.preset import Judgement, until
from reinforge.evals.benchmarks.result import result_of
from reinforge.evals.benchmarks.rows import read_examples, read_rows
from reinforge.evals.benchmarks.table import PRESETS, preset_of
from reinforge.evals.statistics import pass_at_k, wilson

APPLES = {
    "question": "Ann has 20 apples and buys 3 bags of 6. How many has she?",
    "answer": "She buys 3*6=<<3*6=18>>18.\nShe has 20+18=<<20+18=38>>38.\n#### 38",
}
RICH = {"question": "What is a thousand and two?", "answer": "It is this.\n#### 1,002"}
HALF = {"problem": "Halve $1$.", "solution": "Then $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"}
SKY = {
    "question": "Which colour is the sky?",
    "choices": ["red", "blue", "green", "A"],
    "answer": 1,
    "subject": "plain_sight",
}
DOUBLE = {
    "task_id": "Own/0",
    "prompt": 'from math import sqrt\n\n\ndef double(x):\n    """Twice x."""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "double",
}


def verdict(task: str, record: dict[str, Any], text: str, *, chat: bool = False) -> Judgement:
    judge = PRESETS[task].judge(chat=chat)
    try:
        return run(judge(record, text))
    finally:
        judge.close()


# gsm8k

THREE = ("accuracy", "strict_match", "flexible_extract")


@pytest.mark.parametrize(
    ("record", "text", "scores"),
    [
        (APPLES, " 20+18=38\n#### 38", (1, 1, 1)),
        (APPLES, " She has 38.", (1, 0, 1)),
        (APPLES, " The answer is \\boxed{38}", (1, 0, 1)),
        (APPLES, " #### 37", (0, 0, 0)),
        (APPLES, " #### 38 apples in 3 bags", (0, 1, 0)),  # the last number is no answer
        (APPLES, " #### 20+18", (0, 0, 0)),  # the question again
        (APPLES, " 38 or 37", (0, 0, 0)),
        (APPLES, "", (0, 0, 0)),
        (APPLES, " #### ", (0, 0, 0)),
        (APPLES, "<think>#### 37</think> #### 38", (1, 1, 1)),
        (APPLES, "<think>#### 38</think> #### 37", (0, 0, 0)),
        (APPLES, " #### 38\n#### 37", (0, 1, 0)),  # the last word counts, not the first
        (APPLES, " #### " + "9" * 10_000, (0, 0, 0)),
        (APPLES, " #### ３８", (0, 0, 0)),  # digits of another script
        (RICH, " #### 1002", (1, 1, 1)),
        (RICH, " #### $1,002.", (1, 0, 1)),
        (RICH, " #### 1.002", (0, 0, 0)),
    ],
)
def test_gsm8k(record: dict[str, Any], text: str, scores: tuple[int, ...]) -> None:
    assert verdict("gsm8k", record, text).scores == dict(zip(THREE, scores, strict=True))


def test_gsm8k_asks() -> None:
    task = preset_of("gsm8k")
    asked = task.plain(RICH, [APPLES])
    assert asked == (
        f"Question: {APPLES['question']}\nAnswer: {APPLES['answer']}\n\n"
        f"Question: {RICH['question']}\nAnswer:"
    )
    turns = task.chat(RICH, [APPLES])
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert turns[1]["content"] == APPLES["answer"] and RICH["question"] in turns[2]["content"]
    assert until(" 38\n\nQuestion: What", task.stops) == " 38\n\n"


# math


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("so $\\boxed{\\frac12}$", 1),
        ("so \\boxed{0.5}", 1),
        ("the answer is 1/2.", 1),
        ("\\boxed{2}", 0),
        ("\\boxed{\\frac{1}{2}", 0),  # never closed
        ("".join(f"\\boxed{{{i}/2}}" for i in range(40)) + "\\boxed{1/2}", 0),  # all of them
        ("\\boxed{9^{9^{9^9}}}", 0),
        ("", 0),
    ],
)
def test_math(text: str, right: int) -> None:
    found = verdict("math", HALF, text)
    assert found.scores == {"accuracy": right} and found.why


# mmlu


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("It scatters light.\nAnswer: B", 1),
        ("\\boxed{B}", 1),
        ("B", 1),
        ("B. blue", 1),
        ("Answer: A, B, C, D", 0),
        ("A B C D", 0),
        ("blue", 0),
        ("Answer: A", 0),
        ("<think>Answer: A</think>Answer: B", 1),
        ("", 0),
    ],
)
def test_mmlu_by_the_letter_that_is_written(text: str, right: int) -> None:
    assert verdict("mmlu", SKY, text).scores == {"accuracy": right}


def test_mmlu_by_log_probs() -> None:
    task = preset_of("mmlu")
    assert task.options(SKY) == [" A", " B", " C", " D"]
    assert task.picked(SKY, [-3.0, -1.0, -2.0, -9.0]).scores == {"accuracy": 1.0}
    wrong = task.picked(SKY, [-1.0, -1.0, -2.0, -9.0])
    assert wrong.scores == {"accuracy": 0.0} and wrong.answer == "A"
    assert task.plain(SKY, [SKY | {"question": " Grass? ", "answer": "C"}]) == (
        "The following are multiple choice questions (with answers) about plain sight.\n\n"
        "Grass?\nA. red\nB. blue\nC. green\nD. A\nAnswer: C\n\n"
        "Which colour is the sky?\nA. red\nB. blue\nC. green\nD. A\nAnswer:"
    )


# humaneval


@pytest.mark.parametrize(
    ("text", "chat", "right"),
    [
        ("    return 2 * x\n", False, 1),
        ("    return x + 2\n", False, 0),
        ("    import os\n    os._exit(0)\n", False, 0),
        ("    class Same:\n        __eq__ = lambda a, b: True\n    return Same()\n", False, 0),
        ("    return (\n", False, 0),
        ("Here:\n```python\ndef double(x):\n    return int(sqrt(4 * x * x)) * "
         "(1 if x > 0 else -1)\n```\nTry:\n```python\nprint(double(2))\n```", True, 1),
        ("```python\n    return x * 2\n```", True, 1),
        ("```\ndef twice(x):\n    return 2 * x\n```", True, 0),
        ("I do not know.", True, 0),
    ],
)  # fmt: skip
def test_humaneval(text: str, chat: bool, right: int) -> None:
    containment("own")
    found = verdict("humaneval", DOUBLE, text, chat=chat)
    assert found.scores == {"pass@1": right}, found.why
    assert found.why.startswith("passes" if right else "fails")


def test_a_block_that_defines_the_function_is_the_program() -> None:
    open_prompt = "def double(x):\n"
    program = from_chat(open_prompt, "double", "```\ndef double(x): return 2\n```")
    assert program == "def double(x):\n    pass\n\ndef double(x): return 2"
    assert from_chat("no module (", "f", "```\ndef f(): pass\n```") == "def f(): pass"


# ifeval


def test_ifeval_counts_prompts_and_instructions() -> None:
    record = {
        "prompt": "Say hello without commas in quotation marks.",
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{}, {"num_words": None}],
    }
    good = verdict("ifeval", record, '<think>well, well</think>"Hello"')
    assert set(good.scores.values()) == {1.0}
    found = verdict("ifeval", record, 'Sure!\n"Hello"')
    assert found.scores == {
        "prompt_strict": 0.0,
        "prompt_loose": 1.0,
        "instruction_strict": 0.5,
        "instruction_loose": 1.0,
    }
    assert "startend:quotation" in found.why and "no_comma" not in found.why
    # over all instructions, not over prompts
    one = {**record, "instruction_id_list": ["punctuation:no_comma"], "kwargs": "[{}]"}
    other = verdict("ifeval", one, "Hello")
    records = [{"scores": v.scores, "weights": v.weights, "stop": "eos"} for v in (found, other)]
    metrics = result_of(preset_of("ifeval"), records, 1, {}).metrics
    assert metrics["instruction_strict"].value == pytest.approx(2 / 3)
    assert metrics["prompt_strict"].value == 0.5


# rows

GOOD: dict[str, dict[str, Any]] = {
    "gsm8k": APPLES,
    "math": HALF,
    "mmlu": SKY,
    "humaneval": DOUBLE,
    "ifeval": {"prompt": "Hi", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
}


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("gsm8k", {"answer": "38"}, None),
        ("gsm8k", {"answer": "#### many"}, "many"),
        ("gsm8k", {"question": "  "}, "question"),
        ("math", {"solution": "1/2"}, "boxed"),
        ("math", {"solution": "\\boxed{ }"}, "boxed"),
        ("mmlu", {"answer": 4}, "answer is 4"),
        ("mmlu", {"answer": "E"}, "'E'"),
        ("mmlu", {"answer": True}, "True"),
        ("mmlu", {"choices": ["one"]}, "choices"),
        ("mmlu", {"choices": "ABCD"}, "choices"),
        ("humaneval", {"entry_point": "a b"}, "entry_point"),
        ("humaneval", {"test": None}, "test"),
        ("ifeval", {"kwargs": []}, "same length"),
        ("ifeval", {"kwargs": ["x"]}, "no object"),
        ("ifeval", {"kwargs": "["}, "JSON"),
        ("ifeval", {"instruction_id_list": ["a:b"]}, "a:b"),
    ],
)
def test_bad_rows_are_told_with_their_line(
    task: str, change: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(GOOD[task])}\n{json.dumps(GOOD[task] | change)}\n")
    if said is None:
        assert len(read_rows(preset_of(task), file, None)) == 2
        return
    with pytest.raises(InputError, match=said) as error:
        read_rows(preset_of(task), file, None)
    assert error.value.where == f"{file}:2"


@pytest.mark.parametrize("task", PRESETS)
def test_missing_columns_are_named(task: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "x"}\n')
    with pytest.raises(InputError, match=f"no column '{PRESETS[task].columns[0]}', only text"):
        read_rows(preset_of(task), file, None)


def test_directories_as_people_have_them(tmp_path: Path) -> None:
    """One file for each task; or what a download of the hub looks like."""
    task = preset_of("gsm8k")
    flat = tmp_path / "flat"
    flat.mkdir()
    (flat / "gsm8k.jsonl").write_text(json.dumps(APPLES))
    (flat / "gsm8k.shots.jsonl").write_text(json.dumps(RICH))
    rows = read_rows(task, flat, None)
    assert [row.record for row in rows] == [APPLES]
    assert read_examples(task, flat, 1, rows) == [[RICH]]
    hub = tmp_path / "hub" / "gsm8k" / "main"
    hub.mkdir(parents=True)
    (hub / "test-00000-of-00002.jsonl").write_text(json.dumps(APPLES))
    (hub / "test-00001-of-00002.jsonl").write_text(json.dumps(RICH))
    (hub / "train-00000-of-00001.jsonl").write_text(json.dumps(RICH) + "\n" + json.dumps(APPLES))
    for folder in (tmp_path / "hub", tmp_path / "hub" / "gsm8k"):
        rows = read_rows(task, folder, None)
        assert [row.record for row in rows] == [APPLES, RICH]
        # no row is an example of itself
        assert read_examples(task, folder, 1, rows) == [[RICH], [APPLES]]
    assert len(read_rows(task, tmp_path / "hub", 1)) == 1
    with pytest.raises(InputError, match=r"no math.jsonl.*--rows math=FILE"):
        read_rows(preset_of("math"), flat, None)


def test_examples_are_of_the_same_subject() -> None:
    task = preset_of("mmlu")
    shots = [SKY | {"question": f"{s} {i}", "subject": s} for i in range(3) for s in ("a", "b")]
    rows = read_rows(task, [SKY | {"subject": "b"}, SKY | {"subject": "a"}], None)
    found = read_examples(task, shots, 2, rows)
    assert [[e["question"] for e in own] for own in found] == [["b 0", "b 1"], ["a 0", "a 1"]]
    with pytest.raises(InputError, match="5 examples are wanted, and there are 3 with subject 'b'"):
        read_examples(task, shots, 5, rows)
    with pytest.raises(InputError, match="ifeval has no few-shot form"):
        read_examples(preset_of("ifeval"), None, 1, [])


def test_two_rows_of_one_name() -> None:
    with pytest.raises(InputError, match="Own/0"):
        read_rows(preset_of("humaneval"), [DOUBLE, DOUBLE], None)


# results


def test_means_are_over_rows_and_what_was_not_judged_is_left_out() -> None:
    scores = [[1.0, 0.0], [1.0, 1.0], [0.0, None], [None, None]]
    records = [
        {
            "scores": {"accuracy": s},
            "stop": "length" if s is None else "eos",
            "groups": {"level": i % 2},
        }
        for i, row in enumerate(scores)
        for s in row
    ]
    found = result_of(preset_of("math"), records, 2, {})
    assert found.value == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    main = found.metrics["accuracy"]
    assert (main.low, main.high) == pytest.approx(wilson(1.5, 3))
    assert found.metrics["pass@2"].value == pytest.approx(pass_at_k([1, 2], 2, 2))
    assert (found.rows, found.samples, found.unscored, found.cut) == (4, 2, 3, 3)
    assert found.groups["level"]["0"].value == 0.25 and found.groups["level"]["1"].value == 1.0
