"""`reinforge check template`: what a model's chat template does to conversations, found by having
some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reinforge.config.data import DataConfig
from reinforge.config.model import ModelConfig
from reinforge.core.env import Action, Call, Observation
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.core.token_text import token_text
from reinforge.data.chat import Renderer
from reinforge.data.dialogue import DialogueTokens
from reinforge.data.templates import check_prefix, takes_tools
from reinforge.envs.calls import detect, tool_template_of
from reinforge.models.load import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USER = {"role": "user", "content": "What is 12*34?"}
CALL = Call("calculator", {"expression": "12*34"}, "abcdefghi")
RESULT = {"role": "tool", "name": "calculator", "tool_call_id": "abcdefghi", "content": "408"}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression."}},
            "required": ["expression"],
        },
    },
}


def check_template(model: str, chat_template: str | None = None) -> dict[str, Any]:
    """Everything that multi-turn training depends on, as (label: finding)."""
    return template_facts(load_tokenizer(ModelConfig(path=model, chat_template=chat_template)))


def template_facts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    found = check_prefix(tokenizer)
    if not found["chat"]:
        return {
            "chat template": "none: prompts are plain text, one message a line",
            "bos": found["bos"],
        }
    renderer = Renderer(tokenizer, DataConfig(source="check.jsonl"))
    native = takes_tools(renderer.template)
    format = detect(renderer.template.source())
    ids = renderer.prompt(Row("check", [USER, {"role": "assistant", "content": "408."}, USER]))
    again = list(tokenizer(token_text(tokenizer, ids), add_special_tokens=False)["input_ids"])
    plain = [("408.", [USER]), ("It is 408.", [USER]), ("Yes.", [USER])]
    thinking = [
        ("<think>\nI multiply.\n</think>\n\n408.", [USER]),
        ("<think>\nAgain.\n</think>\n\n408.", [USER]),
    ]
    tools = rows_of(renderer, [None, None], tools=True)
    calls = format or "none that we know"
    if not native:
        calls += "; no place for tools: they are told in words"
    return {
        "round trip": (
            "decoding and encoding a conversation gives its ids back"
            if again == ids
            else (
                "decoding and encoding gives OTHER ids (no harm: ids are never made from text"
                " again)"
            )
        ),
        "bos": f"written by the {found['bos']}" if found["bos"] != "nobody" else "none",
        "end of turn": (
            ", ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in renderer.stop_tokens)
            or "NONE: answers end at the token limit"
        ),
        "written by the template": (
            found["turn_end"] or "NONE: the model is not taught by it to stop"
        ),
        "generation markers": (
            "yes: it says itself what the assistant wrote"
            if found["markers"]
            else "no: turns are found by prefixes"
        ),
        "prefix property": (
            "yes" if found["prefix"] else "NO: SFT on several turns needs data.loss_on: completion"
        ),
        "rows of a conversation of 3 turns": _rows(rows_of(renderer, plain)),
        "... whose turns think": _rows(rows_of(renderer, thinking)),
        "... with tool calls": _rows(tools),
        "system message": "yes" if found["system"] else "no place for it",
        "tool calls": calls,
        "content": "as it is" if found["keeps_space"] else "stripped of space at its ends",
    }


def rows_of(renderer: Renderer, turns: list[Any], *, tools: bool = False) -> int | str:
    """Training rows that such a conversation becomes: 1 unless the template rewrites history.

    Text: why it could not be had.
    """
    tool_template = tool_template_of("auto", renderer)
    format = tool_template.format
    dialogue = DialogueTokens(renderer, "check")
    rows = 1
    end = renderer.template.controls(list(renderer.stop_tokens))[-1:]
    if tools and format is None:
        return "the format of its calls is not known: name one with env.calls"
    try:
        first = tool_template.first_observation(Observation([USER], [TOOL] if tools else None))
        dialogue.begin(first.messages, first.tools)
        for turn in turns:
            text, new = (
                (format.render([CALL]) if format else "", tool_template.reply_messages([RESULT]))
                if turn is None
                else turn
            )
            action = Action(
                text, [], "" if turn is None else text, calls=[CALL] if turn is None else []
            )
            rows += dialogue.go_on(
                [*renderer.template.plain(text), *end],
                tool_template.assistant_message(text, action),
                new,
            ).fresh
    except (InputError, TypeError) as error:
        return str(error)
    return rows


def _rows(found: int | str) -> str:
    if isinstance(found, str):
        return f"cannot be rendered: {found}"
    return (
        "1"
        if found == 1
        else f"{found}: the template REWRITES earlier turns; they share an episode and count once"
    )
