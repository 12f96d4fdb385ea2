"""Calls as tags.

Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.
GLM 4.5: `<tool_call>name <arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`. A value
is JSON where it can be read as JSON, otherwise text; which it should be is for the tool's schema to
say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reinforge.core.env import Call
from reinforge.envs.calls.base import (
    MalformedCall,
    ParsedAnswer,
    literal,
    shown,
    tool_response,
    written,
)

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
GLM_NAME = re.compile(r"\s*([\w.-]+)\s*(.*)", re.DOTALL)
GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


@dataclass(frozen=True)
class TagFormat:
    """A `CallFormat` of tags around tags: those of Qwen's coders and of GLM are two."""

    name: str
    read: Callable[[str], Call]
    write: Callable[[Call], str]
    marks: tuple[str, ...] = (OPEN,)
    text_arguments: bool = False

    def parse(self, text: str) -> ParsedAnswer:
        first = min((at for mark in self.marks if (at := text.find(mark)) >= 0), default=-1)
        if first < 0:
            return ParsedAnswer(text)
        calls: list[Call] = []
        errors: list[str] = []
        for part in [p for p in text[first:].split(OPEN) if p.strip()] or [""]:
            body, _, after = part.partition(CLOSE)
            try:
                calls.append(self.read(body))
                if after.strip():
                    raise MalformedCall(f"after the call comes {shown(after.strip())}")
            except MalformedCall as error:
                errors.append(str(error))
        return ParsedAnswer(text[:first].strip(), tuple(calls), tuple(errors))

    def render(self, calls: Sequence[Call]) -> str:
        return "\n".join(self.write(call) for call in calls)

    def result(self, name: str, content: str) -> str:
        return tool_response(name, content)


def _qwen(body: str) -> Call:
    found = FUNCTION.match(body)
    if found is None:
        raise MalformedCall(f"the call must begin with <function=name>, not {shown(body.strip())}")
    name = found.group(1)
    rest = found.group(2).partition("</function>")[0]
    arguments = {
        key: literal(value.removeprefix("\n").removesuffix("\n"))
        for key, value in PARAMETER.findall(rest)
    }
    left = PARAMETER.sub("", rest).strip()
    if left:
        raise MalformedCall(
            f"in the call of {name} this is no <parameter=key>value</parameter>: {shown(left)}"
        )
    return Call(name, arguments)


def _glm(body: str) -> Call:
    found = GLM_NAME.match(body)
    if found is None:
        raise MalformedCall(
            f"the call must begin with the name of a tool, not {shown(body.strip())}"
        )
    name, rest = found.groups()
    left = GLM_PAIR.sub("", rest).strip()
    if left:
        raise MalformedCall(
            f"in the call of {name} this is no <arg_key>key</arg_key><arg_value>value</arg_value>:"
            f" {shown(left)}"
        )
    return Call(name, {key.strip(): literal(value) for key, value in GLM_PAIR.findall(rest)})


def _write_qwen(call: Call) -> str:
    parameters = "".join(
        f"<parameter={k}>\n{written(v)}\n</parameter>\n" for k, v in call.arguments.items()
    )
    return f"{OPEN}\n<function={call.name}>\n{parameters}</function>\n{CLOSE}"


def _write_glm(call: Call) -> str:
    pairs = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{written(v)}</arg_value>\n"
        for k, v in call.arguments.items()
    )
    return f"{OPEN}{call.name}\n{pairs}{CLOSE}"


QWEN_XML = TagFormat("qwen_xml", _qwen, _write_qwen, (OPEN, "<function="))
GLM = TagFormat("glm", _glm, _write_glm)
