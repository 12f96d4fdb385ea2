"""Alpaca's and ShareGPT's rows are read as they are, and no part of them is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest

from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data.formats.turns import SPEAKERS
from reinforge.data.sources import check_messages, rows_from


def one(row: dict[str, Any], **more: Any) -> Row:
    return rows_from([row], **more)[0]


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


# Alpaca


@pytest.mark.parametrize(
    ("row", "prompt", "completion"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n1 2", "3"),
        ({"instruction": "Add.", "input": "", "output": "3"}, "Add.", "3"),
        ({"instruction": "Add.", "input": None, "output": "3"}, "Add.", "3"),
        ({"instruction": "Add.", "output": "3"}, "Add.", "3"),
        ({"instruction": "", "input": "1 2", "output": "3"}, "1 2", "3"),
        (
            {
                "instruction": "Who?",
                "context": "Ada wrote it.",
                "response": "Ada",
                "category": "qa",
            },
            "Who?\nAda wrote it.",
            "Ada",
        ),
        (
            {"instruction": "Add.", "input": "1 2", "output": "3", "text": "Below is ..."},
            "Add.\n1 2",
            "3",
        ),
        ({"instruction": "Add.", "input": "1 2", "answer": 3}, "Add.\n1 2", None),
    ],
    ids=[
        "whole",
        "empty input",
        "no input",
        "two columns",
        "input alone",
        "dolly",
        "with its text",
        "for a reward",
    ],
)
def test_alpaca(row: dict[str, Any], prompt: str, completion: str | None) -> None:
    found = one(row)
    assert found.prompt == prompt and found.columns.get("completion") == completion
    assert {name: found.columns[name] for name in row} == row, "their own columns stay, for rewards"


def test_alpaca_with_a_system_prompt_and_earlier_turns() -> None:
    row = {
        "instruction": "And 2?",
        "output": "4",
        "system": "Double it.",
        "history": [["1?", "2"], ["3?", "6"]],
    }
    assert one(row).prompt == [
        said("system", "Double it."),
        said("user", "1?"),
        said("assistant", "2"),
        said("user", "3?"),
        said("assistant", "6"),
        said("user", "And 2?"),
    ]
    with pytest.raises(InputError, match="a system message of its own"):
        one(row, system="Another.")
    with pytest.raises(InputError, match="history is not a list of pairs"):
        one({**row, "history": ["1?"]})


def test_alpaca_pairs_and_verdicts() -> None:
    pair = one({"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "4"})
    assert (pair.prompt, pair.columns["chosen"], pair.columns["rejected"]) == (
        "Add.\n1 2",
        "3",
        "4",
    )
    judged = one({"instruction": "Add.", "input": "1 2", "output": "3", "kto_tag": True})
    assert judged.columns["completion"] == "3" and judged.columns["label"] is True


def test_what_a_configuration_says_goes_before_the_shape() -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "better": "three", "text": "whole"}
    assert one(row, columns={"completion": "better"}).columns["completion"] == "three"
    assert one(row, template="{instruction}").prompt == "Add."
    assert one(row, template="{input}: {instruction}").prompt == "1 2: Add."
    assert one(row, columns={"prompt": "text"}).prompt == "whole"
    assert "completion" not in one(row, columns={"prompt": "text"}).columns, (
        "then it is no Alpaca row"
    )
    assert one({**row, "prompt": "own"}).prompt == "own"


@pytest.mark.parametrize("half", ["instruction", "input"])
def test_half_of_the_prompt_is_never_dropped_without_a_word(half: str) -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    other = {"instruction": "input", "input": "instruction"}[half]
    with pytest.raises(
        InputError, match=f"takes the prompt from {half}, and {other} would be left out"
    ):
        one(row, columns={"prompt": half, "completion": "output"})
    assert one(row, columns={"prompt": half, "topic": other}).columns["topic"] == row[other], (
        "it has another use"
    )
    with pytest.raises(InputError, match="input is list, not text"):
        one({"instruction": "Add.", "input": ["1", "2"]})


ODD = [{"from": "User 0", "value": "hello"}]


@pytest.mark.parametrize(
    ("row", "more", "prompt"),
    [
        ({"instruction": "Add.", "input": ["1", "2"]}, {"template": "{instruction}!"}, "Add.!"),
        ({"q": "1+2", "instruction": "", "input": ""}, {"template": "{q}"}, "1+2"),
        ({"q": "1+2", "instruction": "Add.", "history": "none"}, {"template": "{q}"}, "1+2"),
        ({"q": "1+2", "instruction": "Add.", "system": {"a": 1}}, {"template": "{q}"}, "1+2"),
        ({"q": "1+2", "conversations": ODD}, {"template": "{q}"}, "1+2"),
        (
            {"instruction": "Add.", "context": ["a page"]},
            {"columns": {"prompt": "instruction"}},
            "Add.",
        ),
        ({"text": "whole", "instruction": "Add.", "context": ["a page"]}, {}, "whole"),
        ({"text": "whole", "instruction": "Add.", "history": "none"}, {}, "whole"),
        ({"prompt": "own", "answer": "1", "conversations": ODD}, {}, "own"),
        ({"question": "own", "answer": "1", "conversation": ODD}, {}, "own"),
        ({"text": "whole", "conversations": ODD}, {}, "whole"),
    ],
)
def test_a_row_is_not_refused_for_columns_that_its_prompt_does_not_use(
    row: dict[str, Any], more: dict[str, Any], prompt: str
) -> None:
    found = one(row, **more)
    assert found.prompt == prompt
    kept = {
        name: value
        for name, value in row.items()
        if name not in ("prompt", "question", "text") and value != "Add."
    }
    assert {name: found.columns[name] for name in kept} == kept


def test_a_column_that_the_template_does_use_is_still_refused_and_an_answer_still_found() -> None:
    with pytest.raises(InputError, match="column 'input' is list, and data.template needs text"):
        one({"instruction": "Add.", "input": ["1", "2"]}, template="{instruction}: {input}")
    judged = one(
        {"instruction": "Add.", "input": ["1"], "output": "3", "kto_tag": True},
        template="{instruction}",
    )
    assert judged.columns["completion"] == "3" and judged.columns["label"] is True
    with pytest.raises(
        InputError, match=r"context is list, not text.*data\.columns: \{prompt.*data\.template"
    ):
        one({"instruction": "Add.", "context": ["a page"]})


# ShareGPT

TALK = [
    {"from": "human", "value": "1+1?"},
    {"from": "gpt", "value": "2"},
    {"from": "human", "value": "2+2?"},
    {"from": "gpt", "value": "4"},
]
MESSAGES = [
    said("user", "1+1?"),
    said("assistant", "2"),
    said("user", "2+2?"),
    said("assistant", "4"),
]


@pytest.mark.parametrize("name", ["conversations", "conversation", "messages"])
def test_sharegpt(name: str) -> None:
    found = one({name: TALK})
    assert found.columns["messages"] == MESSAGES and found.prompt == MESSAGES[:-1]
    ours = one({name: MESSAGES})
    assert ours.columns["messages"] == MESSAGES and ours.prompt == MESSAGES[:-1]


def test_sharegpt_with_a_system_prompt_in_the_row_or_in_the_talk() -> None:
    system = said("system", "Count.")
    assert one({"conversations": TALK, "system": "Count."}).columns["messages"] == [
        system,
        *MESSAGES,
    ]
    inside = [{"from": "system", "value": "Count."}, *TALK]
    assert one({"conversations": inside, "system": "Other."}).columns["messages"] == [
        system,
        *MESSAGES,
    ]
    assert one({"conversations": TALK}, system="Count.").columns["messages"] == [system, *MESSAGES]


def test_sharegpt_tool_calls() -> None:
    talk = [
        {"from": "human", "value": "How warm is it?"},
        {"from": "function_call", "value": '{"name": "warmth", "arguments": {"place": "here"}}'},
        {"from": "observation", "value": "20"},
        {"from": "gpt", "value": "20 degrees"},
    ]
    found = one({"conversations": talk}).columns["messages"]
    call = {"type": "function", "function": {"name": "warmth", "arguments": {"place": "here"}}}
    assert found[1]["tool_calls"] == [call] and found[2] == said("tool", "20")
    for broken in ("warmth()", "{}", "[]", None):
        with pytest.raises(
            InputError, match=r"conversations\[1\] is a function_call whose value is no JSON"
        ):
            one({"conversations": [talk[0], {"from": "function_call", "value": broken}]})


def test_sharegpt_pairs_and_verdicts() -> None:
    pair = one(
        {"conversations": TALK[:-1], "chosen": TALK[-1], "rejected": {"from": "gpt", "value": "5"}}
    )
    assert pair.prompt == MESSAGES[:-1]
    assert (pair.columns["chosen"], pair.columns["rejected"]) == (
        [MESSAGES[-1]],
        [said("assistant", "5")],
    )
    whole = one({"chosen": TALK, "rejected": [*TALK[:-1], {"from": "gpt", "value": "5"}]})
    assert (whole.prompt, whole.columns["chosen"]) == (MESSAGES[:-1], [MESSAGES[-1]])
    judged = one({"conversations": TALK, "kto_tag": False})
    assert (judged.prompt, judged.columns["completion"], judged.columns["label"]) == (
        MESSAGES[:-1],
        [MESSAGES[-1]],
        False,
    )


def test_every_speaker_has_a_role_that_messages_have() -> None:
    for speaker in set(SPEAKERS) - {"function_call"}:
        found = one(
            {"conversations": [{"from": "human", "value": "a"}, {"from": speaker, "value": "b"}]}
        )
        check_messages(found.columns["messages"], "here", "messages")
    with pytest.raises(
        InputError, match=r"conversations\[0\] is from 'narrator'\. Speakers are: system, human"
    ):
        one({"conversations": [{"from": "narrator", "value": "a"}]})
