"""A conversation as ids that only grow: token in, token out.

What the model sampled stays as it was sampled. Only new messages are tokenised: the chat template
renders the whole conversation, and what it adds after the end of the model's turn is encoded and
appended. A template that rewrites what was said before (strips earlier thinking) cannot be followed
that way; then the conversation begins again from the template's own text, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.data.chat import Renderer
from reinforge.data.templates import RenderedChat

SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """What a conversation adds to the context, in ids. `DialogueTokens` makes it, players append
    it.
    """

    ids: list[int]  # to be appended; where `fresh`, the whole context
    fresh: bool = False  # the template rewrote what came before


class DialogueTokens:
    """`begin` gives the first prompt, `go_on` what follows each answer.

    Without a chat template messages are plain text, one a line.
    """

    def __init__(self, renderer: Renderer, where: str):
        self.renderer = renderer
        self.where = where
        self.template = renderer.template
        self.messages: list[dict[str, Any]] = []
        self.tools: list[Any] | None = None
        self._prompt = ""  # the template's text up to the header of the model's turn

    def begin(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        self.messages = list(messages)
        self.tools = tools
        if not self.renderer.chat:
            return self.renderer.bos + self.template.plain(_lines(messages))
        rendered = self._render(self.messages, generation_prompt=True)
        self._prompt = rendered.text
        return self._encode_all(rendered)

    def go_on(
        self, sampled: Sequence[int], answer: dict[str, Any], new: list[dict[str, Any]]
    ) -> AddedTokens:
        """What the context gets after the model's turn `sampled`, which as a message is `answer`,
        and before its next one.
        """
        history = self.messages
        prompt = self._prompt
        self.messages = [*history, answer, *new]
        if not self.renderer.chat:
            return AddedTokens(self.template.plain(f"\n{_lines(new)}\n"))
        whole = self._render(self.messages, generation_prompt=True)
        before = self._render([*history, answer], generation_prompt=False)
        self._prompt = whole.text
        closing = self._closing(before, len(prompt))
        end = (
            before.text.rfind(closing)
            if closing
            else _content_end(before.text, len(prompt), answer)
        )
        # the template writes this turn differently once it is not the last
        if whole.text[:end] != before.text[:end]:
            end = self._end_in(whole, history, answer, new, closing)
        said = _squeezed(whole.text[len(prompt) : end])
        lost = [
            part
            for part in ("content", "thinking")
            if _squeezed(str(answer.get(part) or "")) not in said
        ]
        if not whole.text.startswith(prompt) or lost:
            return AddedTokens(self._encode_all(whole), fresh=True)
        ids = self._encode_since(whole, end)
        ends = {
            *self.template.controls(ids[:1]),
            *(self.template.encode(RenderedChat(closing), self.where) if closing else []),
        }
        return AddedTokens(
            ids[1:] if sampled and ids and sampled[-1] in ends and ids[0] in ends else ids
        )

    def _closing(self, before: RenderedChat, start: int) -> str:
        """The control token with which the template ends the answer, the last of `before`; empty
        where it writes none.
        """
        controls = [
            m
            for m in self.template.special.finditer(before.text, start)
            if not _inside(m.span(), before.literals)
        ]
        return (
            controls[-1].group()
            if controls and not before.text[controls[-1].end() :].strip()
            else ""
        )

    def _end_in(
        self,
        whole: RenderedChat,
        history: list[dict[str, Any]],
        answer: dict[str, Any],
        new: list[dict[str, Any]],
        closing: str,
    ) -> int:
        """Where the answer ends in the whole, found by rendering another answer in its place: what
        follows is the same.
        """
        other = self._render(
            [*history, {**answer, "content": "\u2060"}, *new], generation_prompt=True
        ).text
        n = next(
            (
                i
                for i, (a, b) in enumerate(zip(reversed(whole.text), reversed(other), strict=False))
                if a != b
            ),
            min(len(whole.text), len(other)),
        )
        start = len(whole.text) - n
        found = whole.text.find(closing, start) if closing else start
        return found if found >= 0 else start

    def _render(self, messages: list[dict[str, Any]], *, generation_prompt: bool) -> RenderedChat:
        return self.template.render(
            messages, self.tools, generation_prompt=generation_prompt, where=self.where
        )

    def _encode_since(self, rendered: RenderedChat, start: int) -> list[int]:
        """Ids of the text after a cut, as they are in the whole where the cut leaves the ids before
        it alone: some tokenizers begin every text with a space.
        """
        prefix, ids = (
            self.template.encode(r, self.where) for r in (rendered.until(start), rendered)
        )
        return (
            ids[len(prefix) :]
            if ids[: len(prefix)] == prefix
            else self.template.encode(rendered.since(start), self.where)
        )

    def _encode_all(self, rendered: RenderedChat) -> list[int]:
        ids = self.template.encode(rendered, self.where)
        bos = self.renderer.bos
        return bos + ids if ids[:1] != bos else ids


def _lines(messages: list[dict[str, Any]]) -> str:
    return "\n".join(str(m.get("content") or "") for m in messages)


def _content_end(text: str, start: int, answer: dict[str, Any]) -> int:
    content = str(answer.get("content") or "").strip()
    found = text.rfind(content, start) if content else -1
    return found + len(content) if found >= 0 else len(text)


def _squeezed(text: str) -> str:
    return SPACE.sub("", text)


def _inside(span: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bool:
    return any(a < span[1] and span[0] < b for a, b in spans)
