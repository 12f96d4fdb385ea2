"""DeepSeek V3, R1 and V3.1: calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, name
and arguments parted by `<｜tool▁sep｜>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reinforge.core.env import Call
from reinforge.envs.calls.base import MalformedCall, ParsedAnswer, dumps, json_of, object_of

BEGIN = "<｜tool▁calls▁begin｜>"
END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"
FENCE = re.compile(r"```(?:json)?\s*\n?(.*?)\n?\s*(?:```|$)", re.DOTALL)


class DeepSeek:
    """A `CallFormat`: DeepSeek's."""

    name = "deepseek"
    marks = (BEGIN, CALL)
    text_arguments = True

    def parse(self, text: str) -> ParsedAnswer:
        """
        >>> call = 'add<｜tool▁sep｜>{"a": 1}'
        >>> DeepSeek().parse(f'<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>').calls
        (Call(name='add', arguments={'a': 1}, id=''),)
        """
        first = min((at for mark in self.marks if (at := text.find(mark)) >= 0), default=-1)
        if first < 0:
            return ParsedAnswer(text)
        calls: list[Call] = []
        errors: list[str] = []
        for part in text[first:].replace(BEGIN, "").partition(END)[0].split(CALL)[1:]:
            try:
                calls.append(_call(part.partition(CALL_END)[0]))
            except MalformedCall as error:
                errors.append(str(error))
        if not calls and not errors:
            errors.append(f"there is no {CALL} after {BEGIN}")
        return ParsedAnswer(text[:first].strip(), tuple(calls), tuple(errors))

    def render(self, calls: Sequence[Call]) -> str:
        return (
            BEGIN
            + "".join(f"{CALL}{c.name}{SEP}{dumps(dict(c.arguments))}{CALL_END}" for c in calls)
            + END
        )

    def result(self, name: str, content: str) -> str:
        return f"<｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜>"


def _call(body: str) -> Call:
    """`name<sep>{...}` (V3.1), or `function<sep>name` and a fenced block (V3, R1)."""
    kind, sep, rest = body.partition(SEP)
    if not sep:
        raise MalformedCall(f"the call has no {SEP} between its name and its arguments")
    fenced = FENCE.search(rest)
    name, arguments = (
        (rest[: fenced.start()].strip(), fenced.group(1)) if fenced else (kind.strip(), rest)
    )
    name = name or kind.strip()
    if not name:
        raise MalformedCall("the call has no name")
    return Call(
        name,
        object_of(
            json_of(arguments, f"the arguments of {name}") if arguments.strip() else {}, name
        ),
    )
