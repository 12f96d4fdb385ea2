"""From sampled ids to an answer: its text, the tool calls in it, and what could not be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from reinforge.core.engine import Completion
from reinforge.core.env import Call
from reinforge.core.row import Stop
from reinforge.core.token_text import token_text
from reinforge.data.chat import Renderer
from reinforge.envs.calls.base import ParsedAnswer
from reinforge.envs.calls.tool_template import ToolTemplate


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One answer of the model as it is understood."""

    completion: Completion
    text: str  # without control tokens, its tool calls included
    content: str  # without them
    calls: Sequence[Call] = ()
    errors: Sequence[str] = ()  # what is wrong with calls that could not be read
    thinking: str = ""  # what the model wrote in another channel: not part of the text


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads the answers of one model. Players of episodes and agent sessions make one each."""

    renderer: Renderer
    tool_template: ToolTemplate  # how tool calls are written

    def read(
        self,
        completion: Completion,
        *,
        call_id: Callable[[int], str],
        stop_strings: Sequence[str] = (),
    ) -> ModelAnswer:
        """`call_id` names the k-th call where the model gave it no id."""
        text = self.visible_text(completion, stop_strings)
        parsed = (
            self.tool_template.read(self.raw_text(completion))
            if self.tool_template.reads
            else ParsedAnswer(text)
        )
        if parsed.thinking is not None:
            text = parsed.content  # the answer alone
        calls = [replace(call, id=call.id or call_id(k)) for k, call in enumerate(parsed.calls)]
        return ModelAnswer(
            completion,
            text,
            content=parsed.content if calls or parsed.errors else text,
            calls=calls,
            errors=parsed.errors,
            thinking=parsed.thinking or "",
        )

    def visible_text(self, completion: Completion, stop_strings: Sequence[str] = ()) -> str:
        """The text without control tokens, up to the first stop string."""
        text = self.renderer.decode(completion.tokens)
        found = first_stop(text, stop_strings)
        return text if found is None else text[:found]

    def raw_text(self, completion: Completion) -> str:
        """The text with control tokens, which some formats write calls with, but without the one
        that ended it.
        """
        tokens = completion.tokens
        if completion.stop is Stop.EOS and tokens:
            ended = tokens[-1] in self.renderer.template.special_ids
            tokens = tokens[:-1] if ended else tokens
        return token_text(self.renderer.tokenizer, tokens)


def first_stop(text: str, stop_strings: Sequence[str]) -> int | None:
    """Where the first stop string begins; None where there is none."""
    found = [at for stop in stop_strings if (at := text.find(stop)) >= 0]
    return min(found, default=None)
