"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and since 2025
`[TOOL_CALLS]name[ARGS]{...}`, repeated for each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reinforge.core.env import Call
from reinforge.envs.calls.base import (
    MalformedCall,
    ParsedAnswer,
    call_of,
    dumps,
    function,
    json_prefix,
    object_of,
    shown,
)

MARK = "[TOOL_CALLS]"
ARGS = "[ARGS]"
ID = "[CALL_ID]"


class Mistral:
    """A `CallFormat`: a mark and a JSON list, as Mistral writes it."""

    name = "mistral"
    marks = (MARK,)
    text_arguments = False

    def parse(self, text: str) -> ParsedAnswer:
        """
        >>> Mistral().parse('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]').calls
        (Call(name='add', arguments={'a': 1}, id=''),)
        """
        content, mark, rest = text.partition(MARK)
        if not mark:
            return ParsedAnswer(text)
        calls: list[Call] = []
        try:
            while mark:
                if rest.lstrip().startswith(("[", "{")) and not rest.lstrip().startswith(ID):
                    value, rest = json_prefix(rest, "the list of calls")
                    calls += [
                        _with_id(item) for item in (value if isinstance(value, list) else [value])
                    ]
                else:
                    call, rest = _named(rest)
                    calls.append(call)
                between, mark, rest = rest.partition(MARK)
                if between.strip():
                    raise MalformedCall(f"after the calls comes {shown(between.strip())}")
            if not calls:
                raise MalformedCall("the list of calls is empty")
        except MalformedCall as error:
            return ParsedAnswer(content.strip(), tuple(calls), (str(error),))
        return ParsedAnswer(content.strip(), tuple(calls))

    def render(self, calls: Sequence[Call]) -> str:
        return MARK + dumps([function(c) for c in calls])

    def result(self, name: str, content: str) -> str:
        return f"[TOOL_RESULTS]{dumps({'content': content})}[/TOOL_RESULTS]"


def _named(rest: str) -> tuple[Call, str]:
    name, args, body = rest.partition(ARGS)
    if not args:
        brace = rest.find("{")
        if brace < 0:
            raise MalformedCall(
                f"after {MARK} comes {shown(rest.strip())}, neither a JSON list of calls nor a name"
                " with arguments"
            )
        name = rest[:brace]
        body = rest[brace:]
    name, _, id = name.partition(ID)
    value, rest = json_prefix(body, f"the arguments of {name.strip()}")
    if not name.strip():
        raise MalformedCall("the call has no name")
    return Call(name.strip(), object_of(value, name.strip()), id.strip()), rest


def _with_id(item: Any) -> Call:
    call = call_of(item)
    return replace(call, id=item["id"]) if isinstance(item.get("id"), str) else call
