"""How a model writes tool calls: a format reads them from text and writes them as text.

What is malformed becomes a sentence that says what was wrong, for the model to read; nothing a
model writes raises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reinforge.core.env import Call

DEEPEST = 64  # levels of nesting in arguments


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """What an answer of the model says: its text, and the tool calls in it. `CallFormat.parse`
    makes it.
    """

    content: str  # the text without the calls
    calls: tuple[Call, ...] = ()
    errors: tuple[str, ...] = ()  # what is wrong with those that could not be read
    # where the format has a channel for it; `content` is then the answer alone
    thinking: str | None = None


class CallFormat(Protocol):
    """One way in which models write tool calls. `envs/calls/` has one class for each; rollouts and
    servers read answers with it and write calls back into the conversation.
    """

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Each begins a call."""
        ...

    @property
    def text_arguments(self) -> bool:
        """Whether the family's chat templates want arguments as JSON text."""
        ...

    def parse(self, text: str) -> ParsedAnswer:
        """Reads a whole turn, control tokens spelled out, the stop token left away."""
        ...

    def render(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them. `parse` reads them back."""
        ...

    def result(self, name: str, content: str) -> str:
        """A tool's answer as text, for templates that have no role for it."""
        ...


class MalformedCall(ValueError):
    """What a parser could not read. The text goes to the model."""


def call_of(
    value: Any, *, name: str = "name", arguments: Sequence[str] = ("arguments", "parameters")
) -> Call:
    """A call from a JSON object. Arguments may be an object, JSON text of one, or absent."""
    if not isinstance(value, dict):
        raise MalformedCall(
            f"a call must be a JSON object with a name and arguments, not {_kind(value)}"
        )
    if not isinstance(value.get(name), str) or not value[name]:
        raise MalformedCall(f'the call has no "{name}"')
    given: Any = next((value[key] for key in arguments if key in value), {})
    return Call(value[name], object_of(given, value[name]))


def object_of(given: Any, tool: str) -> dict[str, Any]:
    """Arguments as an object."""
    if isinstance(given, str):
        given = json_of(given, f"the arguments of {tool}") if given.strip() else {}
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise MalformedCall(f"the arguments of {tool} must be a JSON object, not {_kind(given)}")
    return given


def json_of(text: str, what: str) -> Any:
    """The one JSON value that the text is."""
    value, rest = json_prefix(text, what)
    if rest.strip():
        raise MalformedCall(
            f"{what}: there is more text after the JSON value: {shown(rest.strip())}"
        )
    return value


def json_prefix(text: str, what: str) -> tuple[Any, str]:
    """The JSON value that the text begins with, and the rest.

    Not up to the next mark: a string may spell it.
    """
    body = text.lstrip()
    try:
        value, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(body)
    except RecursionError:
        raise MalformedCall(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise MalformedCall(f"{what} is not valid JSON: {error}") from None
    if _depth(value) > DEEPEST:
        raise MalformedCall(f"{what} is nested too deeply")
    return value, body[end:]


def literal(text: str) -> Any:
    """JSON where it is JSON, otherwise the text: how XML formats write values."""
    try:
        return json_of(text, "value")
    except MalformedCall:
        return text


def written(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def function(call: Call) -> dict[str, Any]:
    return {"name": call.name, "arguments": dict(call.arguments)}


def shown(text: str, most: int = 60) -> str:
    return repr(text if len(text) <= most else text[:most] + "...")


def tool_response(name: str, content: str) -> str:
    return f"<tool_response>\n{content}\n</tool_response>"


def schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function part of a tool's JSON schema."""
    return dict(tool.get("function", tool))


def _kind(value: Any) -> str:
    return {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "a boolean",
        type(None): "null",
    }.get(type(value), "a number")


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _depth(value: Any) -> int:
    deepest = 0
    layer = [value]
    while layer and deepest <= DEEPEST:
        layer = [
            v
            for x in layer
            if isinstance(x, dict | list)
            for v in (x.values() if isinstance(x, dict) else x)
        ]
        deepest += 1
    return deepest
