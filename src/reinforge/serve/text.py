"""From tokens to the text of an answer, piece by piece: half characters, stop strings and tool
calls are held back until they are whole.

Whatever the pieces, joined they are the same text: a streamed answer and one that was waited for
are equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reinforge.envs.calls.hermes import OPEN, Hermes

Decode = Callable[[Sequence[int]], str]
HALF = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`.

    >>> held_back("so, STO", ["STOP"]), held_back("STOP it", ["STOP"])
    (3, 0)
    """
    longest = max(map(len, marks), default=1) - 1
    return next(
        (
            n
            for n in range(min(longest, len(text)), 0, -1)
            if any(m.startswith(text[-n:]) for m in marks)
        ),
        0,
    )


@dataclass
class Decoding:
    """Text of tokens that come one by one.

    Only a window is decoded: the last piece of text, which decoders look at, and what is new.
    """

    decode: Decode
    tokens: list[int] = field(default_factory=list)
    begin: int = 0  # of the window
    done: int = 0  # tokens whose text was given out

    def push(self, token: int) -> str:
        self.tokens.append(token)
        new = self._new()
        if not new or new.endswith(HALF):
            return ""
        self.begin, self.done = self.done, len(self.tokens)
        return new

    def close(self) -> str:
        """What is left: bytes that never became a character."""
        new, self.begin, self.done = self._new(), self.done, len(self.tokens)
        return new

    def _new(self) -> str:
        before = self.decode(self.tokens[self.begin : self.done])
        now = self.decode(self.tokens[self.begin :])
        return now[len(before) :]


class Text:
    """The visible text: without the stop string and what follows it."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()):
        self.decoding = Decoding(decode)
        self.stops = [s for s in stops if s]
        self.pending = ""
        self.stopped = False  # at a stop string
        self.length = 0  # characters given out

    def push(self, token: int) -> str:
        return self._out(self.decoding.push(token))

    def close(self) -> str:
        out = self._out(self.decoding.close())
        rest = self.pending
        self.pending = ""
        self.length += len(rest)
        return out + rest

    def _out(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self.pending + new
        found = [at for s in self.stops if (at := text.find(s)) >= 0]
        if found:
            self.stopped = True
            self.pending = ""
            out = text[: min(found)]
        else:
            keep = held_back(text, self.stops)
            out = text[: len(text) - keep]
            self.pending = text[len(text) - keep :]
        self.length += len(out)
        return out


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # JSON text
    id: str = ""  # empty: any will do


class ToolText:
    """Text of a model that may call tools: what comes before the first call goes on, the rest waits
    for its end.
    """

    def __init__(self) -> None:
        self.pending = ""
        self.calling = False

    def push(self, text: str) -> str:
        self.pending += text
        if self.calling:
            return ""
        at = self.pending.find(OPEN)
        self.calling = at >= 0
        cut = at if self.calling else len(self.pending) - held_back(self.pending, [OPEN])
        # the space between an answer and a call belongs to the template
        cut = len(self.pending[:cut].rstrip())
        out = self.pending[:cut]
        self.pending = self.pending[cut:]
        return out

    def close(self) -> tuple[str, list[Call]]:
        """The rest of the text, or the calls that it was."""
        calls = parse_calls(self.pending) if self.calling else None
        return ("", calls) if calls else (self.pending, [])


def parse_calls(text: str) -> list[Call] | None:
    """Calls in the format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>`, one or more and nothing else. None where anything is malformed: it is then
    text like any other.

    >>> parse_calls('<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>')
    [Call(name='add', arguments='{"a": 1}', id='')]
    """
    parsed = Hermes().parse(text)
    if parsed.content.strip() or parsed.errors:
        return None
    return [Call(c.name, json.dumps(c.arguments, ensure_ascii=False)) for c in parsed.calls]
