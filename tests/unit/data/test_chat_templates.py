"""Chat templates by name: the texts that they write, and what they are refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_chat import toy
from transformers import PreTrainedTokenizerFast

from helpers.source_tree import ROOT
from reinforge.config.chat_templates import CHAT_TEMPLATES, fitting
from reinforge.config.data import DataConfig
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data.chat import Renderer, check_prefix
from reinforge.data.templates import Template, takes_tools
from reinforge.models.load import chat_template_of

EOS = "<|endoftext|>"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "and?"},
]
# the conversation, up to where the assistant goes on; <s> is BOS
WRITTEN = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "llama2": (
        f"<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nhello [/INST] hi {EOS}<s>[INST] and? [/INST]"
    ),
    "mistral": f"<s>[INST] Be brief.\n\nhello [/INST] hi{EOS}[INST] and? [/INST]",
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\nhello<end_of_turn>\n<start_of_turn>model\nhi"
        "<end_of_turn>\n<start_of_turn>user\nand?<end_of_turn>\n<start_of_turn>model\n"
    ),
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nhello<|end|>\n<|assistant|>\nhi<|end|>\n"
        "<|user|>\nand?<|end|>\n<|assistant|>\n"
    ),
    "zephyr": (
        f"<|system|>\nBe brief.{EOS}\n<|user|>\nhello{EOS}\n<|assistant|>\nhi{EOS}\n"
        f"<|user|>\nand?{EOS}\n<|assistant|>\n"
    ),
    "vicuna": f"Be brief. USER: hello ASSISTANT: hi{EOS}USER: and? ASSISTANT:",
    "alpaca": (
        f"Be brief.\n\n### Instruction:\nhello\n\n### Response:\nhi{EOS}\n\n"
        "### Instruction:\nand?\n\n### Response:\n"
    ),
}


def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    tokenizer = toy(None, eos=EOS)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(CHAT_TEMPLATES[name].tokens)},
        replace_extra_special_tokens=False,
    )
    tokenizer.chat_template = chat_template_of(name, tokenizer)
    return tokenizer


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_what_is_written(name: str) -> None:
    tokenizer = tokenizer_for(name)
    rendered = Template(tokenizer).render(TALK, None, generation_prompt=True, where="here")
    assert rendered.text == WRITTEN[name]
    assert (
        tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
        == WRITTEN[name]
    )
    assert f"- `{name}`: " in (ROOT / "docs" / "data.md").read_text()


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_every_turn_can_be_trained_and_ends(name: str) -> None:
    """A shorter conversation is a prefix of a longer one, exactly one BOS at most begins it, and
    what is trained is what the assistant says with a token that ends it.
    """
    tokenizer = tokenizer_for(name)
    facts = check_prefix(tokenizer)
    assert facts["prefix"] and facts["system"] and facts["turn_end"] is not None
    renderer = Renderer(tokenizer, DataConfig(source="x.jsonl"))
    talk = [*TALK, {"role": "assistant", "content": "bye"}]
    sample = renderer.training_row(Row("r", talk[:-1], {"messages": talk}))
    trained = tokenizer.decode(sample.tokens[sample.trained]).replace(" ", "")
    end = facts["turn_end"]
    assert trained == f"hi{end}bye{end}"
    assert tokenizer.convert_tokens_to_ids(end) in renderer.stop_tokens
    assert sample.tokens.tolist()[:2] != [tokenizer.bos_token_id] * 2


@pytest.mark.parametrize("name", sorted(set(CHAT_TEMPLATES) - {"chatml"}))
def test_tools_are_refused_and_not_lost(name: str) -> None:
    template = Template(tokenizer_for(name))
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [call]},
        ],
    ]
    for talk in turns:
        with pytest.raises(InputError, match="this chat template has no place for tools"):
            template.render(talk, None, generation_prompt=False, where="here")


def test_chatml_writes_tools_as_hermes_does() -> None:
    tokenizer = tokenizer_for("chatml")
    template = Template(tokenizer)
    assert takes_tools(template) and not template.text_arguments and template.writes_calls
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        TALK[0],
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
    ]
    text = template.render(talk, [tool], generation_prompt=True, where="here").text
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n") and text.count("Be") == 1
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in text
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{one}\n{one}<|im_end|>\n" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_turns_must_alternate_where_the_format_has_no_names_for_them() -> None:
    template = Template(tokenizer_for("mistral"))
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InputError, match="turns of user and assistant must alternate"):
        template.render(twice, None, generation_prompt=True, where="here")


def test_names_that_do_not_fit_and_files_that_are_not_there(tmp_path: Path) -> None:
    tokenizer = toy(None, eos=EOS)
    names = fitting(tokenizer.get_vocab())
    assert names == ["chatml", "llama2", "mistral", "zephyr", "vicuna", "alpaca"]
    with pytest.raises(InputError, match=r"<end_of_turn>, with which gemma.*chatml, llama2"):
        chat_template_of("gemma", tokenizer)
    with pytest.raises(InputError, match=r"neither the name .* There are: chatml, llama3"):
        chat_template_of("chatlm", tokenizer)
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}")
    assert chat_template_of(str(own), tokenizer) == "{{ messages[0].content }}"
    with pytest.raises(InputError, match=r"model\.chat_template \(chatml, llama2, .*, or a file\)"):
        Renderer(tokenizer, DataConfig(source="x.jsonl", chat="always"))
    with pytest.raises(InputError, match=r"set model\.chat_template \(chatml, llama2, "):
        Renderer(tokenizer, DataConfig(source="x.jsonl")).prompt(Row("r", TALK))
