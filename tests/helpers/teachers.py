"""A tiny chat model that answers sums, right and wrong, and asks questions about short documents:
what `reinforge data make` needs of a teacher.
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

SUMS = {"2+2=": "4", "3+4=": "7", "5+1=": "6"}
WRONG = "9"
DOCUMENTS = {
    "owl.md": ("The owl hunts at night.", "When does the owl hunt?", "At night."),
    "fox.txt": ("The fox lives in a den.", "Where does the fox live?", "In a den."),
}
TEMPLATE = "{text} Ask {n}!"  # short, as the model is


def asked(text: str, n: int = 1) -> str:
    return TEMPLATE.replace("{text}", text).replace("{n}", str(n))


def reply(question: str, answer: str) -> str:
    return json.dumps({"pairs": [{"question": question, "answer": answer}]})


def conversations() -> list[dict[str, Any]]:
    """Of every sum as many right answers as wrong ones."""
    told = [(sum_, answer) for sum_, right in SUMS.items() for answer in (right, WRONG)]
    told += [(asked(text), reply(*pair)) for text, *pair in DOCUMENTS.values() for _ in range(2)]
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in told
    ]


def make_teacher(folder: Path, *, steps: int = 80, seed: int = 0) -> str:
    """The model after SFT on the conversations."""
    texts = [m["content"] for row in conversations() for m in row["messages"]]
    model = make_tiny_model(
        folder / "random",
        seed=seed,
        width=64,
        layers=2,
        heads=4,
        kv_heads=2,
        context=192,
        text=texts,
        vocabulary=400,
        spread=0.08,
        chat=True,
    )
    config = config_from_dict(
        {
            "model": {"path": str(model), "device": "cpu"},
            "algorithm": {"name": "sft"},
            "data": {"source": "python"},
            "train": {
                "steps": steps,
                "prompts_per_step": len(conversations()),
                "learning_rate": 4e-3,
                "schedule": {"kind": "cosine", "warmup": 10},
            },
            "run": {"dir": str(folder / "sft"), "checkpoint": {"every": 0}},
        }
    )
    train_config(config, CallerObjects(data=conversations()), SilentView())
    return str(export(folder / "sft", folder / "teacher"))
