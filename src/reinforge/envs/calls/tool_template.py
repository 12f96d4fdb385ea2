"""Messages with tools, for any chat template: through its own place for them, or as text where it
has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reinforge.core.env import Action, Call, Message, Observation
from reinforge.core.errors import InputError
from reinforge.envs.calls.base import CallFormat, ParsedAnswer, dumps, schema
from reinforge.envs.names import FORMATS


@dataclass(frozen=True)
class ToolTemplate:
    """How tools and their calls go through a chat template. `tool_template_of` makes it for the
    players of episodes and for agent sessions.

    `native`: the template has a place for tools and a role for their answers.

    `system`: it has one for a system message. Without a format calls are text like any other.
    """

    format: CallFormat | None = None
    native: bool = False
    system: bool = True

    @property
    def reads(self) -> bool:
        return self.format is not None

    def read(self, text: str) -> ParsedAnswer:
        return ParsedAnswer(text) if self.format is None else self.format.parse(text)

    def first_observation(self, observation: Observation) -> Observation:
        """The first observation as the template can take it."""
        tools = observation.tools
        if tools and self.format is None:
            raise InputError(
                "the chat template has tools, but writes calls in a way that is not known.",
                where="env.calls",
                fix=f"Name the format: {', '.join(FORMATS)}.",
            )
        if not tools or self.native:
            return Observation(self.reply_messages(observation.messages), tools or None)
        assert self.format is not None
        text = described(tools, self.format)
        messages = self.reply_messages(observation.messages)
        if messages and messages[0].get("role") == "system":
            return Observation(
                [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
            )
        if not self.system and messages:
            return Observation(
                [{**messages[0], "content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:]]
            )
        return Observation([{"role": "system", "content": text}, *messages])

    def reply_messages(self, messages: list[Message]) -> list[Message]:
        """New messages; answers of tools become the user's where the template has no
        role for them.
        """
        if self.native or self.format is None:
            return messages
        return [
            (
                {
                    "role": "user",
                    "content": self.format.result(
                        str(m.get("name") or ""), str(m.get("content") or "")
                    ),
                }
                if m.get("role") == "tool"
                else m
            )
            for m in messages
        ]

    def assistant_message(self, text: str, action: Action) -> Message:
        """The model's turn as a message: with tool calls where the template knows them and all
        could be read.
        """
        thought = {"thinking": action.thinking} if action.thinking else {}
        if not action.calls or action.errors or not self.native or self.format is None:
            return {"role": "assistant", "content": text, **thought}
        as_text = self.format.text_arguments

        def one(name: str, arguments: Mapping[str, Any], id: str) -> dict[str, Any]:
            return {
                "type": "function",
                "id": id,
                "function": {
                    "name": name,
                    "arguments": dumps(dict(arguments)) if as_text else dict(arguments),
                },
            }

        content = "" if thought else action.content
        return {
            "role": "assistant",
            "content": content,
            **thought,
            "tool_calls": [one(c.name, c.arguments, c.id) for c in action.calls],
        }


def described(tools: list[dict[str, Any]], format: CallFormat) -> str:
    """The tools, and how to call them, in words."""
    listed = "\n".join(dumps(schema(tool)) for tool in tools)
    example = format.render([Call("name_of_the_tool", {"argument": "value"})])
    return f"You may call these tools:\n{listed}\nTo call one, write:\n{example}"
