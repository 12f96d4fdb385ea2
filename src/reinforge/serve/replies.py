"""Answers as OpenAI objects.

A streamed answer and a whole one are built from the same pieces by the same code.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from reinforge.core.env import Call
from reinforge.core.sample import Stop
from reinforge.envs.calls.hermes import Hermes
from reinforge.envs.calls.stream import CallStream
from reinforge.serve.engine_thread import AnswerPiece
from reinforge.serve.text import Decode, VisibleText

Json = dict[str, Any]
Top = list[tuple[int, float]]
Place = dict[str, Json]  # a place of a prompt: what may stand there, by token id


@dataclass
class PreparedRequest:
    """What a request asked for, ready for the engine."""

    kind: str  # chat or text
    model: str
    prompts: list[list[int]]
    n: int
    logprobs: bool = False
    top: int = 0
    token_ids: bool = False
    usage: bool = False  # at the end of a stream
    stops: Sequence[str] = ()
    hidden: frozenset[int] = frozenset()  # stop tokens: never part of the text
    tools: bool = False
    # each prompt's text, log-probs and likeliest tokens
    echo: list[tuple[str, list[float], list[Top]]] | None = None
    # of each prompt's tokens, where `prompt_logprobs` asks for it; the first has none
    scored: list[list[Place | None]] | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


class Choice:
    """One completion on its way."""

    def __init__(self, decode: Decode, wanted: PreparedRequest):
        self.text = VisibleText(decode, wanted.stops)
        self.hidden = wanted.hidden
        self.call_stream = CallStream(Hermes()) if wanted.tools else None
        self.content = ""
        self.calls: list[Call] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[Top] = []
        self.offsets: list[int] = []  # characters before each token
        self.finish: str | None = None

    def take(self, piece: AnswerPiece) -> str:
        """The text that this piece makes certain."""
        out = ""
        for token in piece.tokens:
            self.offsets.append(self.text.length)
            if not (piece.stop is Stop.EOS and token in self.hidden):
                out += self.text.push(token)
        if piece.stop is not None:
            out += self.text.close()
        if self.call_stream is not None:
            out = self.call_stream.push(out)
            if piece.stop is not None:
                rest, self.calls = self.call_stream.close()
                out += rest
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.tops += piece.top or []
        self.content += out
        if piece.stop is not None:
            ended = "stop" if piece.stop is Stop.EOS or self.text.stopped else "length"
            self.finish = "tool_calls" if self.calls else ended
        return out


class ReplyFormatter:
    """Formats the pieces of one request.

    `decode` gives visible text, `spell` that of one token, control tokens included.
    """

    def __init__(self, wanted: PreparedRequest, decode: Decode, spell: Decode):
        self.wanted = wanted
        self.spell = spell
        self.choices = [Choice(decode, wanted) for _ in range(len(wanted.prompts) * wanted.n)]

    async def whole(self, pieces: AsyncGenerator[AnswerPiece, None]) -> Json:
        async with aclosing(pieces):
            async for piece in pieces:
                self.choices[piece.index].take(piece)
        make = self._message if self.wanted.kind == "chat" else self._text
        reply = self._frame("", [make(i, choice) for i, choice in enumerate(self.choices)])
        return {**reply, "usage": self._usage()}

    async def chunks(self, pieces: AsyncGenerator[AnswerPiece, None]) -> AsyncGenerator[Json, None]:
        if self.wanted.kind == "chat":
            for i in range(len(self.choices)):
                yield self._chunk(i, {"role": "assistant", "content": ""})
        async with aclosing(pieces):
            async for piece in pieces:
                for chunk in self._pieced(piece):
                    yield chunk
        if self.wanted.usage:
            yield {**self._frame(".chunk", []), "usage": self._usage()}

    def _pieced(self, piece: AnswerPiece) -> Iterator[Json]:
        chat = self.wanted.kind == "chat"
        choice = self.choices[piece.index]
        out = choice.take(piece)
        if out or self.wanted.logprobs or self.wanted.token_ids:
            yield self._chunk(piece.index, {"content": out} if chat else out, piece)
        if choice.calls:
            yield self._chunk(
                piece.index,
                {"tool_calls": [{"index": k, **_call(c)} for k, c in enumerate(choice.calls)]},
            )
        if choice.finish is not None:
            yield self._chunk(piece.index, {} if chat else "", finish=choice.finish)

    # parts

    def _frame(self, suffix: str, choices: list[Json]) -> Json:
        chat = self.wanted.kind == "chat"
        frame = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.wanted.id}",
            "object": f"chat.completion{suffix}" if chat else "text_completion",
            "created": self.wanted.created,
            "model": self.wanted.model,
            "choices": choices,
        }
        if chat and self.wanted.token_ids:
            frame["prompt_token_ids"] = self.wanted.prompts[0]
        return frame

    def _chunk(
        self, index: int, delta: Any, piece: AnswerPiece | None = None, *, finish: str | None = None
    ) -> Json:
        chat = self.wanted.kind == "chat"
        choice: Json = {
            "index": index,
            "delta" if chat else "text": delta,
            "finish_reason": finish,
            "logprobs": None,
        }
        if piece is not None and self.wanted.logprobs:
            tops = piece.top or [[] for _ in piece.tokens]
            offsets = self.choices[index].offsets[-len(piece.tokens) :]
            choice["logprobs"] = (
                self._entries(piece.tokens, piece.logprobs, tops)
                if chat
                else self._legacy(piece.tokens, piece.logprobs, tops, offsets)
            )
        if self.wanted.token_ids:
            choice["token_ids"] = piece.tokens if piece is not None else []
            if not chat:
                choice["prompt_token_ids"] = self.wanted.prompts[index // self.wanted.n]
        return {**self._frame(".chunk", [choice]), **({"usage": None} if self.wanted.usage else {})}

    def _message(self, index: int, choice: Choice) -> Json:
        message: Json = {
            "role": "assistant",
            "content": choice.content if choice.content or not choice.calls else None,
            "refusal": None,
        }
        if choice.calls:
            message["tool_calls"] = [_call(c) for c in choice.calls]
        tops = choice.tops or [[] for _ in choice.tokens]
        made = {
            "index": index,
            "message": message,
            "finish_reason": choice.finish,
            "logprobs": (
                self._entries(choice.tokens, choice.logprobs, tops)
                if self.wanted.logprobs
                else None
            ),
        }
        return {**made, "token_ids": choice.tokens} if self.wanted.token_ids else made

    def _text(self, index: int, choice: Choice) -> Json:
        prompt = self.wanted.prompts[index // self.wanted.n]
        before, given, tops = (
            self.wanted.echo[index // self.wanted.n]
            if self.wanted.echo is not None
            else ("", [], [])
        )
        made: Json = {
            "index": index,
            "text": before + choice.content,
            "finish_reason": choice.finish if choice.finish is not None else "length",
            "logprobs": None,
        }
        if self.wanted.logprobs:
            own = choice.tops or [[] for _ in choice.tokens]
            made["logprobs"] = self._legacy(
                choice.tokens, choice.logprobs, own, [len(before) + at for at in choice.offsets]
            )
            if self.wanted.echo is not None:
                starts = [
                    min(at, len(before))
                    for at in accumulate((len(self.spell([t])) for t in prompt[:-1]), initial=0)
                ]
                asked = self._legacy(prompt, [None, *given], [[], *tops], starts)
                made["logprobs"] = {
                    k: None if asked[k] is None else asked[k] + (made["logprobs"][k] or [])
                    for k in asked
                }
        if self.wanted.scored is not None:
            made["prompt_logprobs"] = self.wanted.scored[index // self.wanted.n]
        if self.wanted.token_ids:
            made |= {"token_ids": choice.tokens, "prompt_token_ids": prompt}
        return made

    def _entries(self, tokens: list[int], logprobs: list[float], tops: list[Top]) -> Json:
        """Log-probs in the manner of chat completions."""

        def entry(token: int, logprob: float) -> Json:
            text = self.spell([token])
            return {
                "token": text,
                "bytes": None if "\ufffd" in text else list(text.encode()),
                "logprob": logprob,
            }

        return {
            "content": [
                {**entry(t, p), "top_logprobs": [entry(i, q) for i, q in top if math.isfinite(q)]}
                for t, p, top in zip(tokens, logprobs, tops, strict=True)
            ],
            "refusal": None,
        }

    def _legacy(
        self,
        tokens: list[int],
        logprobs: Sequence[float | None],
        tops: list[Top],
        offsets: list[int],
    ) -> Json:
        """Log-probs in the manner of text completions: the likeliest by their text, of equal ones
        the likelier.
        """
        likeliest: list[Json | None] | None = None
        if self.wanted.top:
            likeliest = [
                {self.spell([i]): q for i, q in reversed(top) if math.isfinite(q)} or None
                for top in tops
            ]
        return {
            "tokens": [self.spell([t]) for t in tokens],
            "token_logprobs": list(logprobs),
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }

    def _usage(self) -> Json:
        given = sum(map(len, self.wanted.prompts))
        made = sum(len(c.tokens) for c in self.choices)
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _call(call: Call) -> Json:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {
        "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
