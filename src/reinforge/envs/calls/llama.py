"""Llama 3.1 and 3.3: the whole turn is `{"name": ..., "parameters": {...}}`, perhaps after
`<|python_tag|>`; several are separated by `;`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reinforge.core.env import Call
from reinforge.envs.calls.base import (
    MalformedCall,
    ParsedAnswer,
    call_of,
    dumps,
    json_prefix,
    shown,
    tool_response,
)

TAG = "<|python_tag|>"
CALL = re.compile(r'\{\s*"(name|type|function)"\s*:')


class LlamaJson:
    """A `CallFormat`: bare JSON, as Llama 3 writes it."""

    name = "llama_json"
    marks = (TAG, '{"name"')
    text_arguments = False

    def parse(self, text: str) -> ParsedAnswer:
        """
        >>> LlamaJson().parse('{"name": "add", "parameters": {"a": 1}}').calls
        (Call(name='add', arguments={'a': 1}, id=''),)
        """
        content, tag, body = text.partition(TAG)
        body = (body if tag else content).strip()
        if not tag:
            if not CALL.match(body):  # an answer, even one in JSON
                return ParsedAnswer(text)
            content = ""
        calls: list[Call] = []
        try:
            while body:
                value, body = json_prefix(body, "the call")
                nested = value.get("function") if isinstance(value, dict) else None
                calls.append(call_of(nested if isinstance(nested, dict) else value))
                body = body.strip()
                if body and not body.startswith((";", "{")):
                    raise MalformedCall(
                        f"after the call comes {shown(body)}; separate calls with ;"
                    )
                body = body.removeprefix(";").strip()
        except MalformedCall as error:
            return ParsedAnswer(content.strip(), tuple(calls), (str(error),))
        if not calls:
            return ParsedAnswer(content.strip(), (), (f"there is nothing after {TAG}",))
        return ParsedAnswer(content.strip(), tuple(calls))

    def render(self, calls: Sequence[Call]) -> str:
        return "; ".join(dumps({"name": c.name, "parameters": dict(c.arguments)}) for c in calls)

    def result(self, name: str, content: str) -> str:
        return tool_response(name, content)
