"""A tiny chat model that has been shown a few answers, right ones and wrong ones, so that a short
run of reinforcement learning has something to prefer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict
from reinforge.models.tiny import make_tiny_model
from reinforge.offline.export import export

Message = dict[str, Any]
SUMS = {"What is 2+2?": ("4", "5"), "What is 3*4?": ("12", "7")}
PROGRAMS = {
    "Write a function that adds a and b.": ("def f(a, b): return a + b", "No."),
    "Write a function that multiplies a and b.": ("def f(a, b): return a * b", "No."),
}
FACTORS = [(a, b) for a in (2, 3) for b in (2, 3)]
TARGETS = range(1, 7)


def _tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def _called(question: str, name: str, arguments: dict[str, int], result: int) -> list[Message]:
    """A question, a call, its result, and an answer that repeats the result."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": json.dumps(result)},
        {"role": "assistant", "content": str(result)},
    ]


def conversations() -> list[dict[str, Any]]:
    """Of every question as many right answers as wrong ones."""
    rows: list[dict[str, Any]] = []
    for question, answers in {**SUMS, **PROGRAMS}.items():
        for answer in answers:
            asked = {"role": "user", "content": question}
            rows.append({"messages": [asked, {"role": "assistant", "content": answer}]})
    for a, b in FACTORS:
        question = f"What is {a} times {b}?"
        for name, result in (("multiply", a * b), ("add", a + b + 1)):
            messages = _called(question, name, {"a": a, "b": b}, result)
            rows.append({"messages": messages, "tools": _tools("multiply", "add")})
    for n in TARGETS:
        for step in (n, n % len(TARGETS) + 1):
            messages = _called(f"Increment the counter by {n}.", "increment", {"step": step}, step)
            rows.append({"messages": messages, "tools": _tools("increment")})
    return rows


def make_model(path: Path, *, context: int = 256) -> Path:
    """A random chat model whose tokenizer has words for these conversations."""
    text = [json.dumps(row) for row in conversations()]
    text += [message["content"] for row in conversations() for message in row["messages"]]
    return make_tiny_model(
        path,
        width=64,
        layers=2,
        heads=4,
        kv_heads=2,
        context=context,
        text=text,
        vocabulary=500,
        spread=0.08,
        chat=True,
    )


def make_taught_model(folder: Path, *, steps: int = 200) -> Path:
    """The model after SFT on the conversations."""
    model = make_model(folder / "random")
    config = config_from_dict(
        {
            "model": {"path": str(model), "device": "cpu"},
            "algorithm": {"name": "sft"},
            "data": {"source": "python"},
            "train": {
                "steps": steps,
                "prompts_per_step": 28,
                "learning_rate": 4e-3,
                "schedule": {"kind": "cosine", "warmup": 10},
            },
            "run": {"dir": str(folder / "sft"), "checkpoint": {"every": 0}},
        }
    )
    train_config(config, CallerObjects(data=conversations()), SilentView())
    return export(folder / "sft", folder / "taught")
