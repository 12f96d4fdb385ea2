"""Tool calls in text that comes piece by piece: what may be a call is held back until it is whole.

Whatever the pieces, joined they are the same text and the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.core.env import Call
from reinforge.envs.calls.base import CallFormat


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


class CallStream:
    """Splits one answer, as it is streamed, into text and tool calls. `serve` makes one for every
    answer to a request with tools; `AnswerReader` does the same for answers that are complete.

    What comes before the first call goes on at once, the rest waits for the end.
    """

    def __init__(self, format: CallFormat) -> None:
        self.format = format
        self.pending = ""
        self.calling = False

    def push(self, text: str) -> str:
        """The text that is certain to be no call."""
        self.pending += text
        if self.calling:
            return ""
        found = [at for mark in self.format.marks if (at := self.pending.find(mark)) >= 0]
        self.calling = bool(found)
        if found:
            cut = min(found)
        else:
            cut = len(self.pending) - held_back(self.pending, self.format.marks)
        # the space between an answer and a call belongs to the template
        cut = len(self.pending[:cut].rstrip())
        out = self.pending[:cut]
        self.pending = self.pending[cut:]
        return out

    def close(self) -> tuple[str, list[Call]]:
        """The rest of the text, or the calls that it was."""
        calls = read_calls(self.pending, self.format) if self.calling else None
        return ("", calls) if calls else (self.pending, [])


def read_calls(text: str, format: CallFormat) -> list[Call] | None:
    """The calls of a text that is one or more calls and nothing else. None where anything is
    malformed: it is then text like any other.

    >>> from reinforge.envs.calls.hermes import Hermes
    >>> read_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', Hermes())
    [Call(name='add', arguments={'a': 1}, id='')]
    """
    parsed = format.parse(text)
    if parsed.content.strip() or parsed.errors:
        return None
    return list(parsed.calls)
