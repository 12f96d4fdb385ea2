"""Environment factories of TRL: `trl:file.py:Class`. An instance has `reset(**row)`, which may
return words for the end of the prompt, public methods that are the model's tools, and perhaps
`get_reward()`.

TRL's reward functions go under `rewards` as they are. One that asks for `environments` looks into
the instances, so it is given here as `rewards: [file.py:function]`.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from reinforge.core.env import Action, Call, Message, Observation, Step
from reinforge.core.row import Row
from reinforge.envs.adapters.common import number, row_messages
from reinforge.envs.tools import Tool, ToolError, tool
from reinforge.rewards.load import load_function

NOT_TOOLS = ("reset", "get_reward")


class TrlEnv:
    """`rewards`: reward functions that want the environment; their sum and get_reward() are the
    reward. `make`: arguments of the factory.
    """

    def __init__(
        self, id: str, *, rewards: list[str] | None = None, make: dict[str, Any] | None = None
    ):
        self.factory = load_function(id, "env.name")
        self.rewards = [load_function(name, "env.options.rewards") for name in rewards or []]
        self.make = make or {}
        self.env: Any = None
        self.row: Row | None = None
        self.tools: dict[str, Tool] = {}
        self.messages: list[Message] = []  # of the completion, as TRL's reward functions see it

    async def reset(self, row: Row, seed: int) -> Observation:
        self.env = self.factory(**self.make)
        self.row = row
        names = [
            n
            for n, _ in inspect.getmembers(type(self.env), predicate=inspect.isfunction)
            if n not in NOT_TOOLS and not n.startswith("_")
        ]
        self.tools = {name: tool(getattr(self.env, name)) for name in names}
        prompt = row_messages(row)
        added = await _done(self.env.reset(**{"prompt": prompt, **row.columns}))
        if added is not None:
            prompt = [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}{added}"}]
        return Observation(prompt, [t.schema for t in self.tools.values()] or None)

    async def step(self, action: Action) -> Step:
        self.messages.append({"role": "assistant", "content": action.content})
        if action.errors:
            words = "The tool call could not be read: " + "; ".join(action.errors)
            return await self._on([{"role": "user", "content": words}], action)
        if not action.calls:
            return Step(None, await self._score(), done=True)
        return await self._on([await self._answer(call) for call in action.calls], action)

    async def close(self) -> None: ...

    async def _on(self, heard: list[Message], action: Action) -> Step:
        self.messages += heard
        if action.last:
            return Step(None, await self._score(), done=True, truncated=True)
        return Step(Observation(heard))

    async def _answer(self, call: Call) -> Message:
        """What a tool raises is told to the model, as TRL does."""
        found = self.tools.get(call.name)
        try:
            if found is None:
                raise ToolError(f"there is no tool {call.name}; there are: {', '.join(self.tools)}")
            result = await _done(found.function(**found.checked(call.arguments)))
            text = result if isinstance(result, str) else json.dumps(result, default=str)
        except Exception as error:
            text = json.dumps({"error": str(error)})
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}

    async def _score(self) -> float | None:
        """None: rewards of the config alone say what the episode is worth."""
        assert self.row is not None
        scores: list[Any] = []
        if hasattr(self.env, "get_reward"):
            scores.append(await _done(self.env.get_reward()))
        given = {
            "prompts": [row_messages(self.row)],
            "completions": [self.messages],
            "environments": [self.env],
            **{k: [v] for k, v in self.row.columns.items()},
        }
        for function in self.rewards:
            wanted = inspect.signature(function).parameters
            takes_all = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
            found = await _done(
                function(**{k: v for k, v in given.items() if takes_all or k in wanted})
            )
            scores.append(found[0])
        known = [number(s, "a reward") for s in scores if s is not None]
        return sum(known) if known else None


async def _done(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
