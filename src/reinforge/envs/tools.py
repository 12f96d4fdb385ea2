"""Python functions as tools: type hints and docstring become the JSON schema that the model sees,
and what the model passes is checked against it before anything is called.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from reinforge.core.errors import InputError

Schema = dict[str, Any]
SIMPLE: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
    list: {"type": "array"},
    dict: {"type": "object"},
}
NAMES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
SECTION = re.compile(
    r"^\s*(args|arguments|parameters|returns|raises|example|examples)\s*:\s*$", re.IGNORECASE
)
ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class ToolError(Exception):
    """What went wrong, for the model to read."""


class ToolUnavailable(Exception):
    """The tool itself cannot work now.

    That says nothing about the model, and its episode is not scored.
    """

    kind = "error"


class NoSandbox(ToolUnavailable):
    """... because the program could not be contained."""

    kind = "sandbox"


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    `pure`: fast and repeatable, called in place and never journalled.
    """

    name: str
    description: str
    parameters: Schema  # of an object
    function: Callable[..., Any]
    pure: bool = False

    @property
    def schema(self) -> Schema:
        """As chat templates and the OpenAI API want it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them. Raises ToolError."""
        known: Schema = self.parameters["properties"]
        unknown = [name for name in arguments if name not in known]
        missing = [name for name in self.parameters["required"] if name not in arguments]
        if unknown:
            raise ToolError(
                f"{self.name} has no argument {', '.join(unknown)}; it has:"
                f" {', '.join(known) or 'none'}"
            )
        if missing:
            raise ToolError(f"{self.name} needs the argument {', '.join(missing)}")
        return {
            name: fitted(value, known[name], f"{self.name}: {name}")
            for name, value in arguments.items()
        }


def tool(function: Callable[..., Any], *, name: str | None = None, pure: bool = False) -> Tool:
    """A plain or async function as a tool.

    >>> def add(a: int, b: int = 0) -> int:
    ...     '''Adds.'''
    ...     return a + b
    >>> tool(add).parameters["properties"], tool(add).parameters["required"]
    ({'a': {'type': 'integer'}, 'b': {'type': 'integer', 'default': 0}}, ['a'])
    """
    label: str = name or str(getattr(function, "__name__", type(function).__name__))
    called = function if inspect.isroutine(function) else function.__call__  # type: ignore[operator]
    try:
        hints = typing.get_type_hints(called)
    except NameError as error:
        raise InputError(
            f"the type hints of {label} cannot be read: {error}.",
            where=f"tool {label}",
            fix="Import what they name.",
        ) from None
    description, documented = _described(inspect.getdoc(called) or "")
    properties: Schema = {}
    required: list[str] = []
    for key, parameter in inspect.signature(called).parameters.items():
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise InputError(
                f"{label} takes {parameter}, which no schema can say.",
                where=f"tool {label}",
                fix="Name every argument.",
            )
        properties[key] = schema_of(hints.get(key, Any), f"tool {label}, argument {key}")
        if key in documented:
            properties[key] = {**properties[key], "description": documented[key]}
        if parameter.default is parameter.empty:
            required.append(key)
        elif _is_json(parameter.default):
            properties[key] = {**properties[key], "default": parameter.default}
    return Tool(
        label,
        description,
        {"type": "object", "properties": properties, "required": required},
        function,
        pure,
    )


def schema_of(hint: Any, where: str) -> Schema:
    """JSON schema of a type hint."""
    if hint in SIMPLE:
        return dict(SIMPLE[hint])
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin is Literal:
        kinds = {type(v) for v in inner}
        return {**(SIMPLE.get(kinds.pop(), {}) if len(kinds) == 1 else {}), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        options = [schema_of(t, where) for t in inner if t is not type(None)]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if origin in (list, tuple, set) or hint in (tuple, set):
        return {"type": "array", **({"items": schema_of(inner[0], where)} if inner else {})}
    if origin is dict:
        return {
            "type": "object",
            **({"additionalProperties": schema_of(inner[1], where)} if len(inner) == 2 else {}),
        }
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint)
        return {
            "type": "object",
            "properties": {k: schema_of(v, where) for k, v in hints.items()},
            "required": sorted(hint.__required_keys__),
        }
    raise InputError(
        f"{hint!r} is no type that JSON has.",
        where=where,
        fix="Use str, int, float, bool, list, dict, Literal or Optional.",
    )


def fitted(value: Any, schema: Schema, what: str) -> Any:
    """The value, made to fit where nothing is lost by it (formats without types write 5 for "5").

    Raises ToolError.
    """
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            try:
                return fitted(value, option, what)
            except ToolError:
                continue
        raise ToolError(f"{what} is {_said(value)}, which fits nothing it may be")
    kind = schema.get("type")
    if kind == "string" and isinstance(value, int | float) and not isinstance(value, bool):
        value = json.dumps(value)
    elif kind in ("integer", "number") and isinstance(value, str):
        value = _number(value)
    elif kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    elif kind == "boolean" and isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if kind is not None and not _is(value, kind):
        raise ToolError(f"{what} must be {NAMES[kind]}, not {_said(value)}")
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{what} must be one of {json.dumps(schema['enum'])}, not {_said(value)}")
    if kind == "array" and "items" in schema:
        return [fitted(v, schema["items"], what) for v in value]
    return value


def _number(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, KINDS[kind])


def _said(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:60] + "..."


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _described(text: str) -> tuple[str, dict[str, str]]:
    """The docstring before its sections, and what `Args:` says of each argument."""
    summary: list[str] = []
    arguments: dict[str, str] = {}
    section = ""
    last = ""
    for line in text.splitlines():
        heading = SECTION.match(line)
        if heading:
            section = heading.group(1).lower()
            last = ""
        elif not section:
            summary.append(line)
        elif section in ("args", "arguments", "parameters"):
            found = ARGUMENT.match(line)
            if found:
                last = found.group(1)
                arguments[last] = found.group(2).strip()
            elif last and line.strip():
                arguments[last] += " " + line.strip()
    return " ".join(" ".join(summary).split()), arguments
