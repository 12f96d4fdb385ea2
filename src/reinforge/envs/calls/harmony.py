"""gpt-oss (harmony): messages with channels. A call is a message to a recipient:
`<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>`; the answer is
the channel `final`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reinforge.core.env import Call
from reinforge.envs.calls.base import (
    MalformedCall,
    ParsedAnswer,
    dumps,
    json_of,
    object_of,
    tool_response,
)

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
ENDS = re.compile(r"<\|(?:end|call|return)\|>")
TO = re.compile(r"\bto=([\w.-]+)")


class Harmony:
    """A `CallFormat`: that of gpt-oss, with channels."""

    name = "harmony"
    marks = (CHANNEL, START)
    text_arguments = False

    def parse(self, text: str) -> ParsedAnswer:
        """
        >>> head = '<|channel|>commentary to=functions.add <|constrain|>json'
        >>> Harmony().parse(head + '<|message|>{"a": 1}').calls
        (Call(name='add', arguments={'a': 1}, id=''),)
        """
        if CHANNEL not in text and MESSAGE not in text:
            return ParsedAnswer(text)
        final: list[str] = []
        thinking: list[str] = []
        calls: list[Call] = []
        errors: list[str] = []
        for part in re.split(re.escape(START) + "|" + ENDS.pattern, text):
            header, mark, body = part.partition(MESSAGE)
            to = TO.search(header)
            if to is None:
                if mark:
                    (thinking if "analysis" in header else final).append(body)
                elif not mark and header.strip() and CHANNEL in header:
                    errors.append(f"a message has no {MESSAGE}")
                continue
            name = to.group(1).removeprefix("functions.")
            try:
                if not mark:
                    raise MalformedCall(f"the call of {name} has no {MESSAGE} and no arguments")
                calls.append(
                    Call(
                        name,
                        object_of(
                            json_of(body, f"the arguments of {name}") if body.strip() else {}, name
                        ),
                    )
                )
            except MalformedCall as error:
                errors.append(str(error))
        return ParsedAnswer(
            "".join(final).strip(), tuple(calls), tuple(errors), "\n".join(thinking).strip()
        )

    def render(self, calls: Sequence[Call]) -> str:
        written = [
            f"{CHANNEL}commentary to=functions.{c.name}"
            f" <|constrain|>json{MESSAGE}{dumps(dict(c.arguments))}"
            for c in calls
        ]
        return f"<|call|>{START}assistant".join(written)

    def result(self, name: str, content: str) -> str:
        return tool_response(name, content)
