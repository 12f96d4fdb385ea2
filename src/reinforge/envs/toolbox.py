"""Conversations with tools: the model calls, hears the results, and goes on until it answers
without a call.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from reinforge.core.env import Action, Call, Message, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.core.threads import in_thread
from reinforge.envs.mcp import McpConnection, connect, server_of
from reinforge.envs.shipped import shipped
from reinforge.envs.single import messages_of
from reinforge.envs.tools import Tool, ToolError, ToolUnavailable, tool
from reinforge.rewards.build import load_function
from reinforge.rewards.verifiable import exact_number

ToolSource = str | Callable[..., Any] | Tool | Mapping[str, Any]


class ToolEnv:
    """`tools`: names of shipped ones (calculator, search, python), `file.py:function`, functions,
    or MCP servers (`{mcp: {...}}`). What a shipped tool needs is an option of its name, e.g.
    `search: {path: docs}`. A tool that takes longer than `tool_seconds`, raises, or is called
    wrongly answers with what went wrong. The final answer is scored by the config's rewards.
    """

    def __init__(
        self,
        tools: Sequence[ToolSource] = (),
        system: str | None = None,
        tool_seconds: float = 30.0,
        max_characters: int = 8000,
        search: dict[str, Any] | None = None,
        python: dict[str, Any] | None = None,
    ):
        options = {"search": search or {}, "python": python or {}}
        given = [tools] if isinstance(tools, str) else tools
        self.servers = [server_of(_mcp(g)) for g in given if isinstance(g, Mapping)]
        self.own = [as_tool(g, options) for g in given if not isinstance(g, Mapping)]
        self.tools = _by_name(self.own)
        self.connections: list[McpConnection] = []
        self.system = system
        self.tool_seconds = tool_seconds
        self.max_characters = max_characters
        self.pure = not self.servers and all(t.pure for t in self.tools.values())
        self.row: Row | None = None
        self.called = 0

    async def reset(self, row: Row, seed: int) -> Observation:
        self.connections = [connect(server) for server in self.servers]
        offered = await asyncio.gather(*(c.tools() for c in self.connections))
        self.tools = _by_name([*self.own, *(t for tools in offered for t in tools)])
        self.row = row
        messages = messages_of(row)
        if self.system is not None and (not messages or messages[0].get("role") != "system"):
            messages = [{"role": "system", "content": self.system}, *messages]
        return Observation(messages, [t.schema for t in self.tools.values()])

    async def step(self, action: Action) -> Step:
        if not action.calls and not action.errors:
            return Step(
                None, self.score(action), done=True, metrics={"used_tools": float(self.called > 0)}
            )
        if action.last:
            return Step(
                None, done=True, truncated=True, metrics={"used_tools": float(self.called > 0)}
            )
        if action.errors:
            said = "\n".join(f"- {error}" for error in action.errors)
            return Step(
                Observation(
                    [
                        {
                            "role": "user",
                            "content": (
                                f"The tool call could not be read, and nothing was called:\n{said}"
                            ),
                        }
                    ]
                )
            )
        self.called += len(action.calls)
        results = await asyncio.gather(*(self._answer(call) for call in action.calls))
        return Step(Observation(list(results)))

    def score(self, action: Action) -> float | None:
        """The environment's own reward of the final answer; None: that is for the
        config's rewards.
        """
        return None

    async def close(self) -> None:
        for connection in self.connections:
            if not connection.server.shared:
                await connection.close()

    async def _answer(self, call: Call) -> Message:
        try:
            text = await self._call(call)
        except ToolError as error:
            text = f"error: {error}"
        except (ToolUnavailable, InputError):
            raise  # not the model's doing: the episode cannot be scored
        except TimeoutError:
            text = f"error: {call.name} took longer than {self.tool_seconds:g} s"
        except Exception as error:
            text = f"error: {type(error).__name__}: {error}"
        if len(text) > self.max_characters:
            text = (
                f"{text[: self.max_characters]}\n... ({len(text) - self.max_characters} characters"
                " more)"
            )
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}

    async def _call(self, call: Call) -> str:
        found = self.tools.get(call.name)
        if found is None:
            raise ToolError(
                f"there is no tool {call.name}; there are: {', '.join(self.tools) or 'none'}"
            )
        given = found.checked(call.arguments)
        if found.pure:
            result = found.function(**given)
        else:
            async with asyncio.timeout(self.tool_seconds):
                result = await (
                    found.function(**given)
                    if _is_async(found.function)
                    else in_thread(partial(found.function, **given))
                )
        return (
            result
            if isinstance(result, str)
            else json.dumps(result, ensure_ascii=False, default=str)
        )


class CalculatorEnv(ToolEnv):
    """A question with a number as its answer (column `answer`), and a calculator.

    Reward 1 where the last number of the final answer is right.
    """

    def __init__(self, system: str | None = None, tolerance: float = 0.0):
        super().__init__(["calculator"], system)
        self.tolerance = tolerance

    def score(self, action: Action) -> float | None:
        assert self.row is not None
        answer = self.row.columns.get("answer")
        if answer is None:
            raise InputError(
                "has no column answer.",
                where=f"row {self.row.id}",
                fix="Name it with data.columns, e.g. {answer: solution}.",
            )
        return exact_number([action.text], [answer], tolerance=self.tolerance)[0]


def _mcp(given: Mapping[str, Any]) -> Mapping[str, Any]:
    if list(given) != ["mcp"] or not isinstance(given["mcp"], Mapping):
        raise InputError(
            f"{dict(given)} is no tool.",
            where="env.options.tools",
            fix="Write {mcp: {command: [python, server.py]}}.",
        )
    return given["mcp"]  # type: ignore[no-any-return]


def _by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    named = {t.name: t for t in tools}
    if len(named) < len(tools):
        twice = sorted({t.name for t in tools if sum(t.name == other.name for other in tools) > 1})
        raise InputError(
            f"two tools are named {', '.join(twice)}.",
            where="env.options.tools",
            fix="Leave one out; of a server with mcp.only.",
        )
    return named


def as_tool(given: str | Callable[..., Any] | Tool, options: dict[str, dict[str, Any]]) -> Tool:
    if isinstance(given, Tool):
        return given
    if callable(given):
        return tool(given)
    found = shipped(given, options.get(given, {}))
    if found is None and ":" not in given:
        raise InputError(
            f"there is no tool {given!r}.",
            where="env.options.tools",
            fix=(
                "Shipped are calculator, search and python; your own: file.py:function; a server:"
                " {mcp: {...}}."
            ),
        )
    return found or tool(load_function(given, "env.options.tools"))


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
