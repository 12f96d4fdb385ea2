"""From tokens to the text of an answer, piece by piece: half characters and stop strings are held
back until they are whole.

Whatever the pieces, joined they are the same text: a streamed answer and one that was waited for
are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reinforge.envs.calls.reader import first_stop
from reinforge.envs.calls.stream import held_back

Decode = Callable[[Sequence[int]], str]
HALF = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet


@dataclass
class TokenDecoder:
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


class VisibleText:
    """The visible text of one answer: without the stop string and what follows it."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()):
        self.decoder = TokenDecoder(decode)
        self.stops = [s for s in stops if s]
        self.pending = ""
        self.stopped = False  # at a stop string
        self.length = 0  # characters given out

    def push(self, token: int) -> str:
        return self._out(self.decoder.push(token))

    def close(self) -> str:
        out = self._out(self.decoder.close())
        rest = self.pending
        self.pending = ""
        self.length += len(rest)
        return out + rest

    def _out(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self.pending + new
        found = first_stop(text, self.stops)
        if found is not None:
            self.stopped = True
            self.pending = ""
            out = text[:found]
        else:
            keep = held_back(text, self.stops)
            out = text[: len(text) - keep]
            self.pending = text[len(text) - keep :]
        self.length += len(out)
        return out
