"""Hermes, Qwen2.5, Qwen3 and many others: `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`, one or more.
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.core.env import Call
from reinforge.envs.calls.base import (
    MalformedCall,
    ParsedAnswer,
    call_of,
    dumps,
    function,
    json_prefix,
    shown,
    tool_response,
)

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class Hermes:
    """A `CallFormat`: JSON in tags, as Hermes, Qwen and many others write it."""

    name = "hermes"
    marks = (OPEN,)
    text_arguments = False

    def parse(self, text: str) -> ParsedAnswer:
        """
        >>> call = '{"name": "add", "arguments": {"a": 1}}'
        >>> Hermes().parse(f'So: <tool_call>{call}</tool_call>').calls
        (Call(name='add', arguments={'a': 1}, id=''),)
        """
        content, mark, rest = text.partition(OPEN)
        calls: list[Call] = []
        errors: list[str] = []
        while mark:
            try:
                value, rest = json_prefix(rest, "the call")
                after = rest.lstrip()
                if not after.startswith(CLOSE) and after:  # the last one may end with the text
                    raise MalformedCall(
                        f"after the JSON object comes {shown(after)} instead of {CLOSE}"
                    )
                calls.append(call_of(value))
                rest = after.removeprefix(CLOSE)
            except MalformedCall as error:
                errors.append(str(error))
                rest = rest.partition(CLOSE)[2]
            between, mark, rest = rest.partition(OPEN)
            content += between if between.strip() else ""
        return ParsedAnswer(
            content.strip() if calls or errors else text, tuple(calls), tuple(errors)
        )

    def render(self, calls: Sequence[Call]) -> str:
        return "\n".join(f"{OPEN}\n{dumps(function(call))}\n{CLOSE}" for call in calls)

    def result(self, name: str, content: str) -> str:
        return tool_response(name, content)
