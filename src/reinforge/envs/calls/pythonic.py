"""Calls as Python: `[add(a=1, b=2), search(query="x")]` (Llama 3.2 and 4, Gemma, ToolACE). Parsed
as syntax and never run: arguments are literals.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from reinforge.core.env import Call
from reinforge.envs.calls.base import MalformedCall, ParsedAnswer, shown, tool_response

LIST = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
MOST = 20_000  # characters that are parsed: Python's parser is no match for megabytes


@dataclass(frozen=True)
class Pythonic:
    """`tags`: pairs that may enclose the list. After an opening tag the brackets may be missing."""

    name: str = "pythonic"
    tags: tuple[tuple[str, str], ...] = ()
    text_arguments: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (*(opening for opening, _ in self.tags), "[")

    def parse(self, text: str) -> ParsedAnswer:
        """
        >>> Pythonic().parse("[add(a=1, b=-2)]").calls
        (Call(name='add', arguments={'a': 1, 'b': -2}, id=''),)
        """
        for opening, closing in self.tags:
            content, tag, body = text.partition(opening)
            if tag:
                return self._read(
                    content.strip(), body.partition(closing)[0].strip() if closing else body.strip()
                )
        body = text.strip()
        return self._read("", body) if LIST.match(body) else ParsedAnswer(text)

    def _read(self, content: str, body: str) -> ParsedAnswer:
        try:
            return ParsedAnswer(content, tuple(_call(node) for node in _nodes(body)))
        except MalformedCall as error:
            return ParsedAnswer(content, (), (str(error),))

    def render(self, calls: Sequence[Call]) -> str:
        listed = ", ".join(
            f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})" for c in calls
        )
        opening, closing = self.tags[0] if self.tags else ("", "")
        return f"{opening}[{listed}]{closing}"

    def result(self, name: str, content: str) -> str:
        return tool_response(name, content)


def _nodes(body: str) -> list[ast.expr]:
    if len(body) > MOST:
        raise MalformedCall(f"the calls are {len(body)} characters long; at most {MOST} are read")
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedCall(
            f"the calls are not a Python list of calls: {getattr(error, 'msg', error)} in"
            f" {shown(body)}"
        ) from None
    nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    if not nodes:
        raise MalformedCall("the list of calls is empty")
    return nodes


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        raise MalformedCall(f"{shown(ast.unparse(node))} is no call")
    name = ast.unparse(node.func).removesuffix(".call")
    if node.args:
        raise MalformedCall(f"the arguments of {name} must be named: {name}(argument=value)")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise MalformedCall(f"the arguments of {name} must be named one by one")
        try:
            arguments[keyword.arg] = ast.literal_eval(_constants(keyword.value))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise MalformedCall(
                f"the argument {keyword.arg} of {name} must be a literal, not"
                f" {shown(ast.unparse(keyword.value))}"
            ) from None
    return Call(name, arguments)


def _constants(node: ast.expr) -> ast.expr:
    """JSON's true, false and null are literals too."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])
    return node


PYTHONIC = Pythonic()
LFM2 = Pythonic("lfm2", (("<|tool_call_start|>", "<|tool_call_end|>"),))
LLAMA_PYTHONIC = Pythonic(
    "llama_pythonic", (("<|python_start|>", "<|python_end|>"), ("<|python_tag|>", ""))
)
