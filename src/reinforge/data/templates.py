"""From messages to ids through a chat template, such that text which somebody wrote never becomes a
control token.

The trick: special-token text inside messages is replaced by placeholders before the template
renders, and put back after. So we know where in the rendered text each such literal is. The text is
encoded as a whole, exactly as `apply_chat_template` would, and only the special ids that cover a
literal are replaced by the tokens of its characters. Where no message has such text, the ids are
those of `apply_chat_template`. What a template may cost is bounded: `bounded.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _render_with_assistant_indices, get_json_schema

from reinforge.core.errors import InputError
from reinforge.data.bounded import TemplateLimitError, compiled, spending

Span = tuple[int, int]
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
CONTINUES = "CONTINUE_FINAL_MESSAGE_TAG "  # as transformers has it: a template may strip the space


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Messages as a chat template renders them, and which spans of the text are literals or
    generated. The `Renderer` tokenises it.
    """

    text: str
    literals: tuple[Span, ...] = ()  # special-token text that came from the messages
    generated: tuple[Span, ...] = ()  # what the template's generation markers enclose
    masked: str = ""  # the text with placeholders instead of literals, where there are literals
    differs: bool = False  # the template would have rendered another text, had it seen the literals

    def until(self, end: int) -> RenderedChat:
        return RenderedChat(self.text[:end], tuple(s for s in self.literals if s[1] <= end))

    def since(self, start: int) -> RenderedChat:
        return RenderedChat(
            self.text[start:], tuple((a - start, b - start) for a, b in self.literals if a >= start)
        )


class Template:
    """The tokenizer's chat template and its encoding."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        names = {token.content for token in added if token.special} | {
            str(t) for t in tokenizer.all_special_tokens
        }
        self.special_ids = frozenset(tokenizer.all_special_ids) | {
            i for i, t in tokenizer.added_tokens_decoder.items() if t.special
        }
        ordered = sorted(names, key=lambda name: (-len(name), name))
        self.special = (
            re.compile("|".join(map(re.escape, ordered))) if ordered else re.compile(r"(?!)")
        )

    def has_special_text(self, value: Any) -> bool:
        """Whether any text in messages, tools or a plain string spells a special token."""
        found = False

        def look(text: str) -> str:
            nonlocal found
            found = found or self.special.search(text) is not None
            return text

        _map_text(value, look)
        return found

    def source(self, tools: list[Any] | None = None) -> str:
        return self.tokenizer.get_chat_template(tools=tools)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        generation_prompt: bool,
        where: str,
        mark: bool = False,
    ) -> RenderedChat:
        """The text of a conversation, with the places of special-token literals and of the
        generation markers.
        """
        if not self.has_special_text([messages, tools]):
            text, generated = self._render(messages, tools, generation_prompt, where, mark)
            return RenderedChat(text, generated=generated)
        fence = next(chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in repr([messages, tools]))
        literals: list[str] = []

        def hide(match: re.Match[str]) -> str:
            literals.append(match.group())
            return f"{fence}{len(literals) - 1}{fence}"

        def cover(text: str) -> str:
            return self.special.sub(hide, text)

        masked, generated = self._render(
            _map_text(messages, cover), _map_text(tools, cover), generation_prompt, where, mark
        )
        text = ""
        spans = []
        moves = []
        last = 0
        for match in re.finditer(f"{fence}([0-9]+){fence}", masked):
            text += masked[last : match.start()]
            literal = literals[int(match.group(1))]
            spans.append((len(text), len(text) + len(literal)))
            text += literal
            last = match.end()
            moves.append((last, len(text) - last))
        text += masked[last:]

        def moved(position: int) -> int:
            return position + next(
                (shift for after, shift in reversed(moves) if position >= after), 0
            )

        seen = self._render(messages, tools, generation_prompt, where, False)[0]
        return RenderedChat(
            text,
            tuple(spans),
            tuple((moved(a), moved(b)) for a, b in generated),
            masked,
            differs=seen != text,
        )

    def _render(
        self, messages: Any, tools: Any, generation_prompt: bool, where: str, mark: bool
    ) -> tuple[str, tuple[Span, ...]]:
        given: dict[str, Any] = {
            "messages": messages,
            "tools": (
                None
                if tools is None
                else [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in tools]
            ),
            "documents": None,
            "add_generation_prompt": generation_prompt,
            **self.tokenizer.special_tokens_map,
        }
        generated: list[Span] = []
        try:
            with spending(given):
                template = compiled(self.source(tools))
                if mark:
                    text, generated = _render_with_assistant_indices(template, **given)
                else:
                    text = template.render(**given)
        except TemplateLimitError as error:
            raise InputError(
                f"the chat template costs more than it may: {error}",
                where=where,
                fix=(
                    "Use another one (model.chat_template), and look at where this model comes"
                    " from."
                ),
            ) from None
        except TemplateError as error:
            raise InputError(
                f"the chat template refuses the messages: {error}",
                where=where,
                fix="Check roles and their order.",
            ) from None
        except (
            ArithmeticError,
            LookupError,
            MemoryError,
            RecursionError,
            SyntaxError,
            TypeError,
            ValueError,
        ) as error:
            said = f"{type(error).__name__}: {error}"
            raise InputError(
                f"the chat template fails on the messages: {said}",
                where=where,
                fix="Check roles and their order.",
            ) from None
        return text, tuple((a, b) for a, b in generated)

    @cached_property
    def text_arguments(self) -> bool:
        """Whether the template wants the arguments of a tool call as JSON text, found by trying:
        most want an object, and some add text to what they are given.
        """
        text = self._tried_call({"omega": "alpha"})
        return text is None or "{'omega'" in text  # as Python writes a dict

    @cached_property
    def writes_calls(self) -> bool:
        """Whether the template writes tool calls at all."""
        text = self._tried_call('{"omega": "alpha"}' if self.text_arguments else {"omega": "alpha"})
        return text is None or "sigma" in text

    def _tried_call(self, arguments: Any) -> str | None:
        """The text of a conversation with a call; None where the template refuses it."""
        function = {"name": "sigma", "arguments": arguments}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "alpha"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "id": "abcdefghi", "function": function}],
            },
        ]
        try:
            return self._render(messages, None, False, "chat template", False)[0]
        except InputError:
            return None

    def continued(self, messages: list[dict[str, Any]], where: str) -> str:
        """The text of a conversation up to the end of what its last message says, which somebody is
        to go on with.
        """
        *before, last = messages
        marked = {**last, "content": str(last["content"]) + CONTINUES}
        text = self._render([*before, marked], None, False, where, False)[0]
        end = text.rfind(CONTINUES.strip())
        if end < 0:
            raise InputError(
                "the chat template drops the last message.",
                where=where,
                fix="Use another template (model.chat_template).",
            )
        return text[:end] if text[end : end + len(CONTINUES)] == CONTINUES else text[:end].rstrip()

    def plain(self, text: str) -> list[int]:
        """Ids of text that has no control tokens, whatever it spells. No BOS, no EOS."""
        return list(
            self.tokenizer(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )["input_ids"]
        )

    def encode(self, rendered: RenderedChat, where: str) -> list[int]:
        """Ids of rendered text: the template's control tokens are single ids, literals are
        characters.
        """
        if not rendered.literals:
            return list(
                self.tokenizer(
                    rendered.text,
                    add_special_tokens=False,
                    split_special_tokens=False,
                    verbose=False,
                )["input_ids"]
            )
        if not self.tokenizer.is_fast:
            raise InputError(
                "has the text of a special token, which this (slow) tokenizer cannot keep apart"
                " from the token",
                where=where,
                fix="Remove the row, or use a tokenizer with a tokenizer.json.",
            )
        encoded = self.tokenizer(
            rendered.text,
            add_special_tokens=False,
            split_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids: list[int] = []
        for token, (start, end) in zip(
            encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            literal = token in self.special_ids and any(
                start < b and a < end for a, b in rendered.literals
            )
            ids.extend(self.plain(rendered.text[start:end]) if literal else [token])
        if rendered.masked:
            expected = self.tokenizer(
                rendered.masked, add_special_tokens=False, split_special_tokens=False, verbose=False
            )["input_ids"]
            if self.controls(ids) != self.controls(expected):
                raise InputError(
                    "has the text of a special token, and this tokenizer does not keep it text",
                    where=where,
                    fix="Remove the row.",
                )
        return ids

    def controls(self, ids: Sequence[int]) -> list[int]:
        """The control tokens among ids."""
        return [i for i in ids if i in self.special_ids and i != self.tokenizer.unk_token_id]


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """The same structure with `change` applied to every string value (not to keys and roles)."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {k: v if k == "role" else _map_text(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(v, change) for v in value]
    return value


# what a tokenizer and its template do


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer begins ordinary text with BOS."""
    return tokenizer.bos_token_id is not None and list(tokenizer("a", verbose=False)["input_ids"])[
        :1
    ] == [tokenizer.bos_token_id]


def turn_end(template: Template) -> int | None:
    """The control token that ends an assistant turn, if the template writes one."""
    messages = [{"role": "user", "content": "alpha"}, {"role": "assistant", "content": "gamma"}]
    rendered = template.render(messages, None, generation_prompt=False, where="chat template")
    tail = rendered.since(rendered.text.rfind("gamma") + len("gamma"))
    return next(iter(template.controls(template.encode(tail, "chat template"))), None)


def check_prefix(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the chat template does, found by trying it:

    chat: there is one. bos: who writes it (template, tokenizer or nobody). markers: it says which
    tokens the assistant generates. prefix: a shorter conversation renders to a prefix of a longer
    one. keeps_thinking: also when earlier turns think. keeps_space: content is not stripped.
    system, tools: it has a place for them. turn_end: the control token that ends an answer.
    """
    if not tokenizer.chat_template:
        return {"chat": False, "bos": "tokenizer" if adds_bos(tokenizer) else "nobody"}
    template = Template(tokenizer)

    def text(
        messages: list[dict[str, Any]], tools: list[Any] | None = None, answer: bool = False
    ) -> str:
        return template.render(
            messages, tools, generation_prompt=answer, where="chat template"
        ).text

    def stable(answers: tuple[str, str]) -> bool:
        messages = [
            m
            for a in answers
            for m in ({"role": "user", "content": "alpha"}, {"role": "assistant", "content": a})
        ]
        whole = text(messages)
        return all(whole.startswith(text(messages[:k], answer=k % 2 == 1)) for k in range(1, 5))

    user = {"role": "user", "content": "  alpha  "}
    system = {"role": "system", "content": "omega"}
    tool = {
        "type": "function",
        "function": {
            "name": "omega",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    end = turn_end(template)
    by_template = tokenizer.bos_token is not None and text([user]).startswith(
        str(tokenizer.bos_token)
    )
    return {
        "chat": True,
        "bos": "template" if by_template else "tokenizer" if adds_bos(tokenizer) else "nobody",
        "markers": MARKER.search(template.source()) is not None,
        "prefix": stable(("beta", "gamma")),
        "keeps_thinking": stable(("<think>\nbeta\n</think>\n\ngamma", "gamma")),
        "keeps_space": "  alpha  " in text([user]),
        "system": _accepts(lambda: text([system, user])),
        "tools": _accepts(lambda: text([user], [tool])),
        "turn_end": None if end is None else str(tokenizer.convert_ids_to_tokens(end)),
    }


def takes_system(template: Template) -> bool:
    """Whether the template has a place for a system message."""
    messages = [{"role": "system", "content": "omega"}, {"role": "user", "content": "alpha"}]
    return _accepts(
        lambda: template.render(messages, None, generation_prompt=True, where="chat template").text
    )


def takes_tools(template: Template) -> bool:
    """Whether the template has a place for tools, and for what they answer."""
    tool = {
        "type": "function",
        "function": {
            "name": "omega",
            "description": "d",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }

    def text(arguments: Any, *, answered: bool) -> str:
        call = {
            "type": "function",
            "id": "abcdefghi",
            "function": {"name": "sigma", "arguments": arguments},
        }
        answer: list[dict[str, Any]] = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "sigma", "tool_call_id": "abcdefghi", "content": "omega"},
        ]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "alpha"},
            *(answer if answered else []),
        ]
        return template.render(
            messages, None if answered else [tool], generation_prompt=True, where="chat template"
        ).text

    has_role = _accepts(lambda: text({}, answered=True)) or _accepts(
        lambda: text("{}", answered=True)
    )
    return has_role and _accepts(lambda: text({}, answered=False))


def _accepts(render: Callable[[], str]) -> bool:
    try:
        return "omega" in render()
    except (InputError, TypeError):  # some templates add text and objects
        return False
