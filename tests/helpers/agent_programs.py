"""Agents as their authors wrote them: against the openai client, with no thought of training."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from reinforge.core.env import Action, Observation, Step
from reinforge.core.sample import Row

HINTS = 3  # turns of the game


def hint(text: str, number: int) -> str:
    found = re.findall(r"\d+", text)
    return "write a number" if not found else "higher" if int(found[-1]) < number else "lower"


async def guess(client: Any, row: dict[str, Any]) -> dict[str, float]:
    """A game of several turns.

    The reward has a signal in nearly every group: the share of odd characters.
    """
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    said = ""
    for _ in range(HINTS):
        reply = await client.chat.completions.create(
            model="gpt-4o", messages=messages, temperature=1.0
        )
        messages.append(reply.choices[0].message)
        said += reply.choices[0].message.content or ""
        messages.append({"role": "user", "content": hint(said, int(row["answer"]))})
    return {"reward": sum(ord(ch) % 2 for ch in said) / max(1, len(said)), "length": len(said)}


def guess_sync(client: Any, row: dict[str, Any]) -> float:
    """The same in a thread, with streams, and with an answer that it strips."""
    messages: list[dict[str, str]] = [{"role": "user", "content": row["prompt"]}]
    said = ""
    for _ in range(HINTS):
        stream = client.chat.completions.create(model="gpt-4o", messages=messages, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        messages += [
            {"role": "assistant", "content": text.strip()},
            {"role": "user", "content": hint(text, int(row["answer"]))},
        ]
        said += text
    return sum(ord(ch) % 2 for ch in said) / max(1, len(said))


async def guess_number(client: Any, row: dict[str, Any]) -> float:
    """What the environment guess_number does, as an agent: the caller keeps the number."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for used in range(1, 6):
        reply = await client.chat.completions.create(model="gpt-4o", messages=messages)
        text = reply.choices[0].message.content
        found = re.findall(r"-?\d+", text)
        guess = int(found[-1][:18]) if found else None
        if guess == int(row["number"]):
            return 1.0
        if used < 5:
            hint = (
                "write a number"
                if guess is None
                else "higher"
                if guess < int(row["number"])
                else "lower"
            )
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return 0.0


def plain(text: str) -> float:
    """The share of letters, digits and other characters of ASCII."""
    return sum(ord(ch) < 128 for ch in text) / max(1, len(text))


async def plain_twice(client: Any, row: dict[str, Any]) -> float:
    """Two turns, and a reward that any model can learn."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    first = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
    messages += [first, {"role": "user", "content": "again"}]
    second = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
    return plain(first.content + second.content)


class PlainTwice:
    """The same as an environment."""

    pure = True

    def __init__(self) -> None:
        self.said = ""

    async def reset(self, row: Row, seed: int) -> Observation:
        return Observation([{"role": "user", "content": row.prompt}])

    async def step(self, action: Action) -> Step:
        self.said += action.text
        if action.turn == 0:
            return Step(Observation([{"role": "user", "content": "again"}]))
        return Step(None, plain(self.said), done=True)

    async def close(self) -> None: ...


async def crowd(client: Any, row: dict[str, Any]) -> float:
    """Three conversations at once, and then a second question in one of them."""

    async def ask(messages: list[Any]) -> str:
        reply = await client.chat.completions.create(model="m", messages=messages, max_tokens=4)
        return reply.choices[0].message.content or ""

    first = [{"role": "user", "content": row["prompt"]}]
    texts = await asyncio.gather(
        *(ask([{"role": "system", "content": str(i)}, *first]) for i in range(3))
    )
    await asyncio.gather(
        *(
            ask(
                [
                    {"role": "system", "content": "0"},
                    *first,
                    {"role": "assistant", "content": texts[0]},
                    {"role": "user", "content": again},
                ]
            )
            for again in ("and?", "so?")
        )
    )
    return float(len("".join(texts)) % 3)


async def silent(client: Any, row: dict[str, Any]) -> None:
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": row["prompt"]}]
    )


async def lazy(client: Any, row: dict[str, Any]) -> float:
    return 1.0


async def crashing(client: Any, row: dict[str, Any]) -> float:
    await silent(client, row)
    raise ZeroDivisionError("the agent's own bug")


async def hanging(client: Any, row: dict[str, Any]) -> float:
    await silent(client, row)
    await asyncio.sleep(3600)
    return 1.0


def blocking(client: Any, row: dict[str, Any]) -> float:
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": row["prompt"]}])
    time.sleep(20)
    return 1.0


async def nonsense(client: Any, row: dict[str, Any]) -> str:
    await silent(client, row)
    return "very good"
