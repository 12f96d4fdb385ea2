"""An agent with a calculator, as one writes it against the OpenAI API.

It knows nothing of training.

`agent: recipes/agents/calculator_agent.py:agent` calls the function; `agent: [python,
recipes/agents/calculator_agent.py]` runs the file, with the row on stdin. With any other endpoint
it answers too:

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...
    echo '{"prompt": "12*34=", "answer": "408"}' | python recipes/agents/calculator_agent.py
"""

from __future__ import annotations

import ast
import asyncio
import json
import operator
import re
import sys
from typing import Any

TURNS = 3
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
PARAMETERS = {
    "type": "object",
    "properties": {
        "expression": {"type": "string", "description": "The expression, e.g. (12 + 7) * 3"}
    },
    "required": ["expression"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Works out an arithmetic expression.",
            "parameters": PARAMETERS,
        },
    }
]


def calculator(expression: str) -> int:
    def value(node: Any) -> int:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, int)
            and abs(node.value) < 10**12
        ):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only whole numbers, + - * and parentheses")

    return value(ast.parse(expression[:200].strip().removesuffix("="), mode="eval").body)


def use_tool(call: Any) -> str:
    try:
        if call.function.name != "calculator":
            return f"error: there is no tool {call.function.name}"
        return str(calculator(json.loads(call.function.arguments)["expression"]))
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"error: {error}"


async def agent(client: Any, row: dict[str, Any]) -> dict[str, float]:
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    used = False
    for _ in range(TURNS):
        reply = await client.chat.completions.create(
            model="gpt-4o-mini", messages=messages, tools=TOOLS
        )
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        used = True
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": use_tool(call)}
            for call in message.tool_calls
        ]
    numbers = re.findall(r"-?\d+", message.content or "")
    solved = not message.tool_calls and bool(numbers) and numbers[-1] == str(row["answer"])
    return {"reward": float(solved), "used_tools": float(used)}


if __name__ == "__main__":
    from openai import AsyncOpenAI

    print(json.dumps(asyncio.run(agent(AsyncOpenAI(), json.load(sys.stdin)))))
