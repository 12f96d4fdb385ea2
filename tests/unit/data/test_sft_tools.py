"""SFT on conversations with tools: the schemas of the `tools` column are read, the assistant's
calls and answers are trained, results are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_chat import toy

from reinforge.config.data import DataConfig
from reinforge.data.chat import Renderer
from reinforge.data.sources import load_rows
from reinforge.data.units import texts

BODY = (
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>"
)
TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\nBODY\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace("BODY", BODY)
MARKED = TEMPLATE.replace(
    BODY,
    "{% if m.role == 'assistant' %}{% generation %}"
    + BODY
    + "{% endgeneration %}{% else %}"
    + BODY
    + "{% endif %}",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 12}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "what is 12+7?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "19", "tool_call_id": "1"},
    {"role": "assistant", "content": "it is 19"},
]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), json.dumps([TOOL["function"]])])
@pytest.mark.parametrize("split", [False, True])
def test_calls_and_answers_are_trained(
    tmp_path: Path, template: str, tools: Any, split: bool
) -> None:
    """As one conversation, and as prompt and completion; the schemas as a list or as JSON in text,
    as some data sets keep them, and without what is around them, as LLaMA-Factory does.
    """
    row = (
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:], "tools": tools}
        if split
        else {"messages": MESSAGES, "tools": tools}
    )
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    cfg = DataConfig(source=str(path))
    tokenizer = toy(template)
    ((sample,),) = texts(Renderer(tokenizer, cfg), load_rows(cfg)[0])
    whole = tokenizer.apply_chat_template(MESSAGES, tools=[TOOL], return_dict=False)
    # a completion may end with its last turn, before the newline
    assert sample.tokens.tolist() in (whole, whole[:-1])
    trained = tokenizer.decode(sample.tokens[sample.trained])
    call = '<call>{"name": "add", "arguments": {"a": 12}}</call><|im_end|>'
    assert trained.replace("\n", "") == f"{call}it is 19<|im_end|>"
    assert '"name": "add", "parameters"' in tokenizer.decode(sample.tokens[~sample.trained])
