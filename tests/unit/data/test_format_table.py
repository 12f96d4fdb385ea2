"""The formats of rows: a row made as each original is, what becomes of it, and what is said."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any, get_args

import pytest
from test_chat import toy

from helpers.source_tree import ROOT
from reinforge.config.data import DataConfig, FormatName
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data.chat import Renderer
from reinforge.data.formats import FORMATS, read_row
from reinforge.data.source_report import SourceReport, lines_of
from reinforge.data.sources import load_rows, rows_from
from reinforge.data.units import pairs


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def human(text: str) -> dict[str, Any]:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict[str, Any]:
    return {"from": "gpt", "value": text}


HH = "\n\nHuman: What is 2+2?\n\nAssistant: 4.\n\nHuman: And 3+3?\n\nAssistant: "
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OPENR1 = {
    "problem": "2+2?",
    "solution": r"It is \boxed{4}",
    "answer": "4",
    "problem_type": "Algebra",
    "source": "olympiads",
    "is_reasoning_complete": [True, False, True],
    "generations": ["<think>5</think>5", "<think>4", "<think>4</think>4"],
    "correctness_math_verify": [False, True, True],
}

# a row as it is, its format, and our columns of it
ORIGINALS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "verl",
        {
            "data_source": "openai/gsm8k",
            "prompt": [user("2+2?")],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"split": "train", "index": 0},
        },
        {"prompt": [user("2+2?")], "answer": "4"},
    ),
    (
        "openai_pairs",
        {
            "input": {
                "messages": [user("How cold?")],
                "tools": [TOOL],
                "parallel_tool_calls": True,
            },
            "preferred_output": [assistant("50 F")],
            "non_preferred_output": [assistant("cold")],
        },
        {
            "prompt": [user("How cold?")],
            "chosen": [assistant("50 F")],
            "rejected": [assistant("cold")],
            "tools": [TOOL],
        },
    ),
    (
        "hh",
        {"chosen": HH + "6, I think.", "rejected": HH + "6, I guess."},
        {
            "prompt": [user("What is 2+2?"), assistant("4."), user("And 3+3?")],
            "chosen": [assistant("6, I think.")],
            "rejected": [assistant("6, I guess.")],
        },
    ),
    (
        "ultrafeedback",
        {
            "prompt": "2+2?",
            "prompt_id": "086b",
            "chosen": [user("2+2?"), assistant("4")],
            "rejected": [user("2+2?"), assistant("5")],
            "messages": [user("2+2?"), assistant("4")],
            "score_chosen": 8.5,
            "score_rejected": 8.0,
        },
        {"prompt": [user("2+2?")], "chosen": [assistant("4")], "rejected": [assistant("5")]},
    ),
    (
        "sharegpt_pairs",
        {"conversations": [human("2+2?")], "chosen": gpt("4"), "rejected": gpt("5")},
        {"prompt": [user("2+2?")], "chosen": [assistant("4")], "rejected": [assistant("5")]},
    ),
    (
        "orca_pairs",
        {"system": "Be brief.", "question": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": [system("Be brief."), user("2+2?")], "chosen": "4", "rejected": "5"},
    ),
    (
        "alpaca_pairs",
        {"instruction": "Add.", "input": "2 2", "chosen": "4", "rejected": "5"},
        {"prompt": "Add.\n2 2", "chosen": "4", "rejected": "5"},
    ),
    (
        "text_pairs",
        {"chosen": "Q: 2+2? A: 4", "rejected": "Q: 2+2? A: 5"},
        {"prompt": "Q: 2+2? A:", "chosen": " 4", "rejected": " 5"},
    ),
    (
        "pairs",
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    ),
    (
        "steps",
        {"prompt": "2+2?", "completions": ["1+1=2", "2+2=4"], "labels": [True, True]},
        {"prompt": "2+2?", "completions": ["1+1=2", "2+2=4"], "labels": [True, True]},
    ),
    (
        "kto",
        {"prompt": [user("2+2?")], "completion": [assistant("4")], "label": True},
        {"prompt": [user("2+2?")], "completion": [assistant("4")], "label": True},
    ),
    (
        "alpaca_kto",
        {"instruction": "Add.", "input": "2 2", "output": "4", "kto_tag": False},
        {"prompt": "Add.\n2 2", "completion": "4", "label": False},
    ),
    (
        "sharegpt_kto",
        {"messages": [human("2+2?"), gpt("4")], "kto_tag": True},
        {
            "prompt": [user("2+2?")],
            "completion": [assistant("4")],
            "label": True,
            "messages": [user("2+2?"), assistant("4")],
        },
    ),
    (
        "reasoning",
        OPENR1,
        {"prompt": "2+2?", "completion": "<think>4</think>4", "answer": "4"},
    ),
    (
        "rlvr",
        {"messages": [user("2+2?")], "ground_truth": "4", "dataset": "gsm8k"},
        {"prompt": [user("2+2?")], "answer": "4"},
    ),
    (
        "capybara",
        {"source": "x", "conversation": [{"input": "2+2?", "output": "4"}]},
        {"prompt": [user("2+2?")], "messages": [user("2+2?"), assistant("4")]},
    ),
    (
        "sharegpt",
        {"id": "QWJhYvA_0", "conversations": [human("2+2?"), gpt("4")], "system": "Be brief."},
        {
            "prompt": [system("Be brief."), user("2+2?")],
            "messages": [system("Be brief."), user("2+2?"), assistant("4")],
        },
    ),
    (
        "messages",
        {"messages": [user("2+2?"), assistant("4", weight=1)], "tools": [TOOL]},
        {"prompt": [user("2+2?")], "messages": [user("2+2?"), assistant("4", weight=1)]},
    ),
    (
        "orca",
        {"id": "niv.1", "system_prompt": "Be brief.", "question": "2+2?", "response": "4"},
        {"prompt": [system("Be brief."), user("2+2?")], "completion": "4"},
    ),
    (
        "helpsteer",
        {
            "prompt": "c#",
            "response": "A language.",
            "helpfulness": 3,
            "correctness": 4,
            "coherence": 4,
            "complexity": 2,
            "verbosity": 1,
        },
        {"prompt": "c#", "completion": "A language.", "helpfulness": 3, "verbosity": 1},
    ),
    (
        "prompt_completion",
        {"prompt": "2+2?", "response": "4", "helpfulness": "yes"},
        {"prompt": "2+2?", "completion": "4", "helpfulness": "yes"},
    ),
    (
        "alpaca",
        {"instruction": "Add.", "input": "2 2", "output": "4", "text": "Below is an ..."},
        {"prompt": "Add.\n2 2", "completion": "4"},
    ),
    (
        "query",
        {"type": "GSM", "query": "2+2?", "original_question": "1+1?", "response": "4"},
        {"prompt": "2+2?", "completion": "4"},
    ),
    ("prompt", {"question": "2+2?", "answer": "#### 4"}, {"prompt": "2+2?", "answer": "#### 4"}),
    ("text", {"text": "All of it."}, {"prompt": "All of it.", "text": "All of it."}),
]


@pytest.mark.parametrize(("name", "record", "ours"), ORIGINALS, ids=[o[0] for o in ORIGINALS])
def test_a_row_as_the_original_is(name: str, record: dict[str, Any], ours: dict[str, Any]) -> None:
    reports: list[SourceReport] = []
    (row,) = rows_from([record], reports=reports)
    found = {"prompt": row.prompt, **row.columns}
    assert {column: found.get(column) for column in ours} == ours
    (line,) = lines_of(reports)
    assert line.startswith(f"data: recognised as {name} (")
    assert rows_from([record], format=name)[0] == row, "named, it is read in the same way"
    kept = {k: v for k, v in record.items() if k not in ("id", "prompt", "question", *ours)}
    assert {column: row.columns[column] for column in kept} == kept


def test_every_format_has_an_original_a_name_in_the_configuration_and_a_line_in_the_docs() -> None:
    assert [o[0] for o in ORIGINALS] == list(FORMATS)
    assert get_args(FormatName) == ("auto", *FORMATS)
    made = runpy.run_path(str(ROOT / "tools" / "gen_formats.py"))
    text = made["PAGE"].read_text(encoding="utf-8")
    assert text == made["with_table"](text), "run `make reference`"
    assert all(f"| `{name}` |" in text for name in FORMATS)


def test_a_conversation_of_helpsteer() -> None:
    """Turns that stand in one text; one that ends with the assistant is left as it is."""
    text = "2+2?\n<extra_id_1>Assistant\n4\n<extra_id_1>User\nAnd 3+3?"
    graded = {"response": "6", "helpfulness": 4, "verbosity": None}
    row, read_as = read_row({"prompt": text, **graded}, "here")
    assert read_as is not None and read_as.format == "helpsteer"
    assert row["prompt"] == [user("2+2?"), assistant("4"), user("And 3+3?")]
    cut = text.rpartition("\n<extra_id_1>")[0]
    assert read_row({"prompt": cut, **graded}, "here")[0]["prompt"] == cut


def test_what_is_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Greet.", "output": "Hello."},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reports: list[SourceReport] = []
    load_rows(DataConfig(source=str(path)), reports)
    load_rows(DataConfig(source=str(path), template="{instruction}!", limit=1), reports)
    load_rows(DataConfig(source="arithmetic:chain"), reports)
    assert [line for report in reports for line in report.lines()] == [
        "recognised as alpaca (instruction, input, output); prompt = instruction + input,"
        " completion = output",
        "recognised as alpaca (instruction, input, output); prompt = data.template,"
        " completion = output",
    ]
    (found,) = reports[1].formats
    assert found is not None and found.templated


def test_rows_of_several_formats_are_counted() -> None:
    reports: list[SourceReport] = []
    rows_from([{"prompt": "a"}, {"prompt": "b"}, {"text": "c"}], reports=reports)
    assert reports[0].lines() == [
        "2 rows recognised as prompt (prompt)",
        "1 rows recognised as text (text)",
    ]


def test_a_format_that_is_named_goes_before_what_is_recognised() -> None:
    record = {"chosen": HH + "6.", "rejected": HH + "7."}
    (row,) = rows_from([record], format="text_pairs")
    assert (row.prompt, row.columns["chosen"]) == (HH.rstrip(" "), " 6.")
    both = {"prompt": "own", "instruction": "Add.", "output": "3"}
    assert rows_from([both])[0].prompt == "own"
    assert rows_from([both], format="alpaca")[0].prompt == "Add."
    with pytest.raises(InputError, match=r"no column kto_tag, which data\.format alpaca_kto needs"):
        rows_from([both], format="alpaca_kto")


def test_nothing_fits_names_the_columns_and_the_nearest_formats() -> None:
    with pytest.raises(InputError) as caught:
        rows_from([{"Instruction": "Add.", "Output": "3"}])
    said = str(caught.value)
    assert "its columns are Instruction, Output" in said
    assert "The nearest: alpaca has instruction (here: Instruction)" in said
    assert "data.columns: {prompt: <their name>" in said
    with pytest.raises(InputError, match=r"The nearest: .*query has query, response; "):
        rows_from([{"response": "a"}])


def test_an_answer_that_is_missing_names_the_formats_that_have_it() -> None:
    (row,) = rows_from([{"instruction": "Add.", "output": "3"}])
    renderer = Renderer(toy(), DataConfig(source="x.jsonl"))
    with pytest.raises(
        InputError, match=r"no column 'chosen', .* have it: openai_pairs, hh, ultra"
    ):
        pairs(renderer, row)


def test_a_template_leaves_compared_texts_as_they_are() -> None:
    (row,) = rows_from(
        [{"q": "2+2?", "chosen": "It is 4", "rejected": "It is 5"}], template="Q: {q}"
    )
    assert (row.prompt, row.columns["chosen"]) == ("Q: 2+2?", "It is 4")


def test_reasoning_without_messages_or_a_correct_generation() -> None:
    def completion(**columns: Any) -> Any:
        return read_row({"problem": "2+2?", **columns}, "row 0")[0].get("completion")

    assert completion(solution="4") == "4"
    assert completion(generations=["a", "b"]) == "a", "nothing says that one of them is wrong"
    assert completion(generations=["a"], correctness_math_verify=[False], solution="4") is None
    assert (
        completion(deepseek_reasoning="Two and two.", deepseek_solution="4")
        == "<think>\nTwo and two.\n</think>\n\n4"
    )
    messages = [user("2+2?"), assistant("4")]
    (row,) = rows_from([{**OPENR1, "messages": messages}])
    assert row.columns["messages"] == messages and "completion" not in row.columns


# bad rows


def test_bad_rows_are_dropped_and_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "" if i in (1, 4) else f"question {i}", "level": i % 3} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reports: list[SourceReport] = []
    cfg = DataConfig(source=str(path), bad_rows="drop", where={"level": 1})
    assert [row.prompt for row in load_rows(cfg, reports)] == ["question 7"]
    assert lines_of(reports)[1:] == [
        "data: data.where leaves out 5 of 8 rows",
        f"data: 2 of 8 rows dropped (data.bad_rows: drop):\n  - {path}:2: prompt is empty"
        f" (also {path}:5)",
    ]
    with pytest.warns(UserWarning, match="2 of 8 rows dropped"):
        assert len(load_rows(DataConfig(source=str(path), bad_rows="drop"))) == 6
    path.write_text('{"prompt": ""}\n' * 3)
    with pytest.raises(InputError, match="3 of 3 rows cannot be used"):
        load_rows(DataConfig(source=str(path), bad_rows="drop"), reports)


# OpenAI's messages


TURNS = [user("1?"), assistant("one", weight=0), user("2?"), assistant("two", weight=1)]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = CHATML.replace("{{ m.content }}<|im_end|>", "BODY").replace(
    "BODY",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}",
)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_turn_of_weight_0_is_not_trained(template: str) -> None:
    tokenizer = toy(template)
    (row,) = rows_from([{"messages": TURNS}])

    def trained(row: Row, loss_on: str) -> str:
        cfg = DataConfig(source="x.jsonl", loss_on=loss_on)  # type: ignore[arg-type]
        sample = Renderer(tokenizer, cfg).training_row(row)
        return str(tokenizer.decode(sample.tokens[sample.trained]))

    assert trained(row, "assistant") == "two<|im_end|>" == trained(row, "completion")
    (last,) = rows_from([{"messages": [*TURNS[:3], assistant("two", weight=0)]}])
    with pytest.raises(InputError, match="no assistant turn to train on"):
        trained(last, "assistant")
    (wrong,) = rows_from([{"messages": [user("1?"), assistant("one", weight=0.5)]}])
    with pytest.raises(InputError, match=r"messages\[1\].weight is 0.5, neither 0 nor 1"):
        trained(wrong, "assistant")


@pytest.mark.parametrize(
    "body",
    ["{{ c.function.arguments | tojson }}", "{{ c.function.name + c.function.arguments }}"],
    ids=["as an object", "as text"],
)
def test_arguments_reach_the_template_as_it_wants_them(body: str) -> None:
    calls = "{% for c in m.tool_calls or [] %}BODY{% endfor %}".replace("BODY", body)
    tokenizer = toy(CHATML.replace("{{ m.content }}", "{{ m.content or '' }}" + calls))
    texts = []
    for arguments in ({"city": "Oslo"}, json.dumps({"city": "Oslo"})):
        call = {"id": "1", "type": "function", "function": {"name": "", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        (row,) = rows_from([{"messages": [user("Warm?"), message]}])
        sample = Renderer(tokenizer, DataConfig(source="x.jsonl")).training_row(row)
        texts.append(tokenizer.decode(sample.tokens[sample.trained]))
    assert texts == ['{"city": "Oslo"}<|im_end|>'] * 2
