"""Tool calls as models write them: every format reads what it writes, and says what is wrong with
what it cannot read.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.core.env import Action, Call, Observation
from reinforge.core.errors import InputError
from reinforge.envs import names
from reinforge.envs.calls import FORMATS, detect, format_of
from reinforge.envs.calls.tool_template import ToolTemplate

GOOD: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "Let me see.",
        [("add", {"a": 1})],
    ),
    (
        "hermes",
        (
            '<tool_call>{"name": "f", "arguments": {"x":'
            ' "</tool_call>"}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
        ),
        "",
        [("f", {"x": "</tool_call>"}), ("g", {})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 2}"}', "", [("f", {"x": 2})]),
    ("llama_json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    (
        "llama_json",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": null}}',
        "",
        [("f", {}), ("g", {"b": None})],
    ),
    (
        "llama_json",
        '{"type": "function", "function": {"name": "f", "parameters": {"x": [1]}}}',
        "",
        [("f", {"x": [1]})],
    ),
    (
        "llama_pythonic",
        '<|python_start|>[add(a=1, b="x"), stop()]<|python_end|>',
        "",
        [("add", {"a": 1, "b": "x"}), ("stop", {})],
    ),
    (
        "llama_pythonic",
        '<|python_tag|>brave_search.call(query="cats")',
        "",
        [("brave_search", {"query": "cats"})],
    ),
    (
        "pythonic",
        "[f(x=-1.5, y=[1, {'k': True}], z=null)]",
        "",
        [("f", {"x": -1.5, "y": [1, {"k": True}], "z": None})],
    ),
    (
        "mistral",
        (
            'Hm.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name":'
            ' "g", "arguments": {}}]'
        ),
        "Hm.",
        [("add", {"a": 1}), ("g", {})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("add", {"a": 1}), ("g", {})],
    ),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', "", [("add", {"a": 1})]),
    (
        "harmony",
        (
            "<|channel|>analysis<|message|>I must"
            " add.<|end|><|start|>assistant<|channel|>commentary to=functions.add"
            ' <|constrain|>json<|message|>{"a": 1}<|call|>'
        ),
        "",
        [("add", {"a": 1})],
    ),
    (
        "harmony",
        "<|start|>assistant to=functions.get.time<|channel|>commentary json<|message|>{}",
        "",
        [("get.time", {})],
    ),
    (
        "deepseek",
        (
            'Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a":'
            " 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "Yes.",
        [("add", {"a": 1})],
    ),
    (
        "deepseek",
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a":'
            " 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        ),
        "",
        [("add", {"a": 1}), ("g", {})],
    ),
    (
        "qwen_xml",
        "So:\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=text>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>",
        "So:",
        [("add", {"a": 1, "text": "two\nlines"})],
    ),
    ("qwen_xml", "<function=now>\n</function>", "", [("now", {})]),
    (
        "glm",
        (
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x"
            " y</arg_value>\n</tool_call>"
        ),
        "",
        [("add", {"a": 1, "b": "x y"})],
    ),
    (
        "glm",
        "<tool_call>now</tool_call><tool_call>then</tool_call>",
        "",
        [("now", {}), ("then", {})],
    ),
]
BAD = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "not valid JSON"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "must be a JSON object, not a list",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}} and then</tool_call>',
        "instead of </tool_call>",
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
    ("hermes", "<tool_call>" + "[" * 100_000, "nested too deeply"),
    ("llama_json", '{"name": "add", "parameters": {"a": 1}', "not valid JSON"),
    ("llama_json", '{"name": "add", "parameters": {}} bye', "separate calls with ;"),
    ("llama_json", "<|python_tag|>", "nothing after"),
    ("llama_pythonic", "<|python_start|>[add(1)]<|python_end|>", "must be named"),
    ("pythonic", "[add(a=open('x'))]", "must be a literal"),
    ("pythonic", "[add(a=1]", "not a Python list of calls"),
    ("pythonic", "[add(**{'a': 1})]", "named one by one"),
    ("pythonic", "[f(x=" + "(" * 5000 + ")]", "not a Python list of calls"),
    ("mistral", "[TOOL_CALLS]hello", "neither a JSON list of calls nor a name"),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": }}]', "not valid JSON"),
    ("mistral", "[TOOL_CALLS][]", "empty"),
    (
        "harmony",
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{a: 1}<|call|>",
        "arguments of add is not valid JSON",
    ),
    ("harmony", "<|channel|>commentary to=functions.add", "no <|message|>"),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add{}<｜tool▁call▁end｜>",
        "no <｜tool▁sep｜>",
    ),
    ("deepseek", "<｜tool▁calls▁begin｜>", "there is no <｜tool▁call▁begin｜>"),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{oops<｜tool▁call▁end｜>",
        "not valid JSON",
    ),
    ("qwen_xml", "<tool_call>\n{}\n</tool_call>", "must begin with <function=name>"),
    (
        "qwen_xml",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        "no <parameter=key>value</parameter>",
    ),
    ("glm", "<tool_call></tool_call>", "must begin with the name of a tool"),
    ("glm", "<tool_call>add <arg_key>a</arg_key></tool_call>", "no <arg_key>key</arg_key>"),
]


@pytest.mark.parametrize("name,text,content,calls", GOOD)
def test_what_is_well_formed_is_read(name: str, text: str, content: str, calls: list[Any]) -> None:
    parsed = FORMATS[name].parse(text)
    assert (
        [(c.name, dict(c.arguments)) for c in parsed.calls] == calls
        and parsed.errors == ()
        and parsed.content == content
    )


@pytest.mark.parametrize("name,text,why", BAD)
def test_what_is_malformed_is_said(name: str, text: str, why: str) -> None:
    parsed = FORMATS[name].parse(text)
    assert any(why in error for error in parsed.errors), parsed
    assert all(len(error) < 400 for error in parsed.errors), "the model has to read it"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text", ["", "The answer is 4.", '{"answer": 4}', "[1, 2]", "a < b and f(x)"]
)
def test_an_answer_is_no_call(name: str, text: str) -> None:
    parsed = FORMATS[name].parse(text)
    assert parsed.calls == () and parsed.errors == () and parsed.content == text


def test_the_mistral_id_and_the_harmony_answer() -> None:
    assert (
        FORMATS["mistral"].parse('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}').calls[0].id
        == "abcdefghi"
    )
    said = FORMATS["harmony"].parse(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Four."
    )
    assert (said.content, said.thinking, said.calls) == ("Four.", "hm", ())


TEXT = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=6)
VALUE = st.one_of(
    st.integers(-99, 99),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=3),
    TEXT.map(lambda t: f"{t} {t}"),
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(
        st.tuples(TEXT, st.dictionaries(TEXT, VALUE, max_size=3)), min_size=1, max_size=3
    )
)
def test_what_is_written_is_read_back(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    keywords = {
        "if",
        "in",
        "is",
        "or",
        "as",
        "and",
        "not",
        "for",
        "def",
        "del",
        "try",
        "from",
        "pass",
        "else",
        "elif",
        "with",
        "while",
        "class",
        "async",
    }
    made = [
        Call(f"f_{n}", {f"k_{k}": v for k, v in a.items() if k not in keywords}) for n, a in calls
    ]
    parsed = FORMATS[name].parse(FORMATS[name].render(made))
    assert list(parsed.calls) == made and parsed.errors == () and parsed.content == ""


def test_harmony_thinks_in_a_channel_of_its_own() -> None:
    tool_template = ToolTemplate(FORMATS["harmony"], native=True)
    assert tool_template.assistant_message(
        "Four.", Action("Four.", [], "Four.", thinking="hm")
    ) == {
        "role": "assistant",
        "content": "Four.",
        "thinking": "hm",
    }


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [m for f in FORMATS.values() for m in f.marks]
            + [
                '{"name": "f"',
                ', "arguments": {',
                "}",
                "}}",
                "]",
                "(",
                "<|message|>",
                "</tool_call>",
                "<function=f>",
                "<｜tool▁sep｜>",
                "[ARGS]",
                "text",
                "\n",
                "to=functions.x",
            ]
        ),
        max_size=8,
    )
)
def test_nothing_raises(name: str, pieces: list[str]) -> None:
    parsed = FORMATS[name].parse("".join(pieces))
    assert all(isinstance(c.arguments, dict) and c.name for c in parsed.calls)


def test_formats_are_found_by_their_templates() -> None:
    signs = {
        "hermes": "{{ '<tool_call>' }}",
        "mistral": "[TOOL_CALLS]",
        "llama_json": "<|python_tag|>",
        "llama_pythonic": "<|python_start|>",
        "harmony": "<|channel|>final",
        "deepseek": "<｜tool▁calls▁begin｜>",
        "qwen_xml": "<tool_call><function=",
        "glm": "<tool_call>x<arg_key>",
        "lfm2": "<|tool_call_start|>[",
    }
    assert {detect(text) for text in signs.values()} == signs.keys() and all(
        detect(text) == name for name, text in signs.items()
    )
    assert (
        detect("{{ messages }}") is None
        and format_of("auto", None).name == "hermes"
        and format_of("glm", signs["hermes"]).name == "glm"
    )
    assert tuple(FORMATS) == names.FORMATS
    with pytest.raises(InputError, match="there is no format"):
        format_of("morse", None)


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def test_a_template_without_tools_hears_of_them_in_words() -> None:
    tool_template = ToolTemplate(FORMATS["hermes"], native=False)
    opened = tool_template.first_observation(
        Observation([{"role": "user", "content": "2+2?"}], [TOOL])
    )
    assert opened.tools is None and [m["role"] for m in opened.messages] == ["system", "user"]
    assert (
        '"name": "add"' in opened.messages[0]["content"]
        and "<tool_call>" in opened.messages[0]["content"]
    )
    assert tool_template.reply_messages([{"role": "tool", "name": "add", "content": "4"}]) == [
        {"role": "user", "content": "<tool_response>\n4\n</tool_response>"}
    ]
    action = Action("x", [], "", calls=[Call("add", {"a": 1}, "i")])
    assert tool_template.assistant_message("x", action) == {"role": "assistant", "content": "x"}


def test_a_template_with_tools_gets_calls_as_it_wants_them() -> None:
    action = Action("x", [], "thought", calls=[Call("add", {"a": 1}, "i")])
    native = ToolTemplate(FORMATS["hermes"], native=True)
    assert native.first_observation(Observation([], [TOOL])).tools == [TOOL]
    assert native.assistant_message("x", action)["tool_calls"] == [
        {"type": "function", "id": "i", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    as_text = ToolTemplate(FORMATS["deepseek"], native=True).assistant_message("x", action)
    assert (
        as_text["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
        and as_text["content"] == "thought"
    )
    assert "tool_calls" not in native.assistant_message(
        "x", Action("x", [], "", calls=[Call("f", {})], errors=["bad"])
    ), "what could not be read whole stays text"
