"""The programs of docs/migrate-programs.md: no longer than those they stand for, shown whole, and
each runs on a tiny model and learns.

A program is edited as somebody would who tries it on a laptop: another model, a file of a few rows,
a larger learning rate, shorter answers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers import small_talk
from helpers.paths import ROOT
from reinforge.cli.main import main

PROGRAMS = ROOT / "recipes" / "migrate"
PAGE = ROOT / "docs" / "migrate-programs.md"
ROW = re.compile(r"^\| `([\w.]+)` \|.*\| (\d+) \| (\d+) \|$", re.MULTILINE)
BLOCK = re.compile(r"^```(?:python|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HELD = {  # lines of the originals, without blank ones and comments
    "trl_sft.py": 7,
    "trl_dpo.py": 7,
    "trl_kto.py": 9,
    "trl_reward_model.py": 7,
    "trl_two_rewards.py": 36,
    "trl_tools.py": 25,
    "trl_environment.py": 25,
    "llamafactory_alpaca_sft.yaml": 28,
    "llamafactory_sharegpt_lora.yaml": 29,
    "llamafactory_dpo.yaml": 31,
}
Lines = list[dict[str, Any]]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


QUESTIONS = [f"What is {i} and {i + 1}?" for i in range(16)]
CHAT = [
    {"messages": [said("user", q), said("assistant", f"{i} and {i + 1}.")]}
    for i, q in enumerate(QUESTIONS)
]
PAIRS = [
    {
        "chosen": [said("user", q), said("assistant", f"It is {i}.")],
        "rejected": [said("user", q), said("assistant", "No.")],
        "score_chosen": 8.0,
        "score_rejected": 2.0,
    }
    for i, q in enumerate(QUESTIONS)
]
JUDGED = [
    {
        "prompt": [said("user", q)],
        "completion": [said("assistant", f"It is {i}." if i % 2 else "No.")],
        "label": bool(i % 2),
    }
    for i, q in enumerate(QUESTIONS)
]
ALPACA = [
    {"instruction": q, "input": "Say it.", "output": f"{i}."} for i, q in enumerate(QUESTIONS)
]
IDENTITY = [{"instruction": "Who are you?", "input": "", "output": "I am small."}] * 2
TOOL = json.dumps([{"name": "add", "description": "Adds.", "parameters": {}}])
SHAREGPT = [
    {
        "conversations": [
            {"from": "human", "value": q},
            {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": i}})},
            {"from": "observation", "value": str(i)},
            {"from": "gpt", "value": f"It is {i}."},
        ],
        "tools": TOOL,
    }
    for i, q in enumerate(QUESTIONS)
]
RANKED = [
    {
        "conversations": [{"from": "human", "value": q}],
        "chosen": {"from": "gpt", "value": f"It is {i}."},
        "rejected": {"from": "gpt", "value": "No."},
    }
    for i, q in enumerate(QUESTIONS)
]


@dataclass(frozen=True)
class Edit:
    """What is changed in a program before it runs, and the files that it then finds."""

    texts: dict[str, str]  # every one stands in the program once; MODEL is the model's path
    files: dict[str, list[Any]] = field(default_factory=dict)


SHORT = {"max_new_tokens=512": "max_new_tokens=40, group_size=16"}
EDITS = {
    "trl_sft.py": Edit(
        {"Qwen/Qwen3-0.6B": "MODEL", "trl-lib/Capybara": "rows.jsonl", "2e-5": "1e-2"},
        {"rows.jsonl": CHAT},
    ),
    "trl_dpo.py": Edit(
        {
            "Qwen/Qwen3-0.6B": "MODEL",
            "trl-lib/ultrafeedback_binarized": "rows.jsonl",
            "1e-6": "3e-3",
        },
        {"rows.jsonl": PAIRS},
    ),
    "trl_kto.py": Edit(
        {
            "Qwen/Qwen2-0.5B-Instruct": "MODEL",
            "trl-lib/kto-mix-14k": "rows.jsonl",
            "1e-6": "3e-3",
        },
        {"rows.jsonl": JUDGED},
    ),
    "trl_reward_model.py": Edit(
        {
            "Qwen/Qwen3-0.6B": "MODEL",
            "trl-lib/ultrafeedback_binarized": "rows.jsonl",
            "1e-4": "3e-3",
        },
        {"rows.jsonl": PAIRS},
    ),
    "trl_two_rewards.py": Edit(
        {
            "Qwen/Qwen2.5-0.5B-Instruct": "MODEL",
            "1e-6": "4e-4",
            "prompts_per_step=4": "prompts_per_step=4, steps=8",
            **SHORT,
        }
    ),
    "trl_tools.py": Edit(
        {
            "Qwen/Qwen3-0.6B": "MODEL",
            "1e-6": "4e-4",
            "for a in range(2, 10) for b in range(2, 10)": "for a in (2, 3) for b in (2, 3)",
            "epochs=3, prompts_per_step=8": "epochs=8, prompts_per_step=4",
            **SHORT,
        }
    ),
    "trl_environment.py": Edit(
        {"Qwen/Qwen3-0.6B": "MODEL", "1e-6": "4e-4", "steps=1000": "steps=8", **SHORT}
    ),
    "llamafactory_alpaca_sft.yaml": Edit(
        {
            "Qwen/Qwen3-4B-Instruct-2507": "MODEL",
            "backend: deepspeed": "backend: local",
            "  deepspeed: {stage: 3}\n": "",
            "1.0e-5": "1.0e-2",
            "warmup: 20": "warmup: 1",
            "prompts_per_step: 16": "prompts_per_step: 6",
            "max_length: 2048": "max_length: 128",
        },
        {"data/identity.json": IDENTITY, "data/alpaca_en_demo.json": ALPACA},
    ),
    "llamafactory_sharegpt_lora.yaml": Edit(
        {
            "Qwen/Qwen3-4B-Instruct-2507": "MODEL",
            "1.0e-4": "2.0e-2",
            "warmup: 37": "warmup: 1",
            "max_length: 2048": "max_length: 200",
        },
        {"data/glaive_toolcall_en_demo.json": SHAREGPT},
    ),
    "llamafactory_dpo.yaml": Edit(
        {
            "Qwen/Qwen3-4B-Instruct-2507": "MODEL",
            "5.0e-6": "1.0e-2",
            "warmup: 37": "warmup: 1",
            "max_length: 2048": "max_length: 200",
        },
        {"data/dpo_en_demo.json": RANKED},
    ),
}


def counted(text: str) -> int:
    """Lines that are neither blank nor a comment."""
    lines = [line.strip() for line in text.splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def edited(name: str, model: Path) -> str:
    text = (PROGRAMS / name).read_text()
    for old, new in EDITS[name].texts.items():
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new.replace("MODEL", str(model)))
    return text


def run(name: str, model: Path) -> Lines:
    """Runs the edited program where it finds its rows; the metrics of its only run."""
    for file, rows in EDITS[name].files.items():
        Path(file).parent.mkdir(exist_ok=True)
        whole = json.dumps(rows) if file.endswith(".json") else "\n".join(map(json.dumps, rows))
        Path(file).write_text(whole)
    text = edited(name, model)
    if name.endswith(".yaml"):
        Path(name).write_text(text)
        assert main(["train", name]) == 0
    else:
        exec(compile(text, name, "exec"), {"__name__": "__main__"})
    [metrics] = Path("runs").rglob("metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_talk.make_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_talk.make_taught_model(tmp_path_factory.mktemp("taught"))


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_program_is_here_and_on_the_page() -> None:
    assert {path.name for path in PROGRAMS.iterdir() if path.is_file()} == set(HELD) == set(EDITS)
    page = PAGE.read_text()
    shown = set(BLOCK.findall(page))
    for name, theirs in HELD.items():
        text = (PROGRAMS / name).read_text()
        assert counted(text) <= theirs, name
        assert text in shown, f"{name} is not on the page as it is"
    told = {name: (int(theirs), int(ours)) for name, theirs, ours in ROW.findall(page)}
    assert told == {n: (HELD[n], counted((PROGRAMS / n).read_text())) for n in HELD}


@pytest.mark.parametrize(
    ("name", "fall"),
    [
        ("trl_sft.py", 1.0),
        ("trl_dpo.py", 0.1),
        ("trl_kto.py", 0.02),
        ("trl_reward_model.py", 0.2),
        ("llamafactory_alpaca_sft.yaml", 1.0),
        ("llamafactory_sharegpt_lora.yaml", 0.5),
        ("llamafactory_dpo.yaml", 0.1),
    ],
)
def test_the_loss_falls(name: str, fall: float, model: Path) -> None:
    """By so much, from the first step of the three epochs to the last."""
    lines = run(name, model)
    losses = [line["train/loss"] for line in lines]
    assert lines[-1]["epoch"] == pytest.approx(3.0, abs=0.2)
    assert losses[0] - losses[-1] > fall, losses


@pytest.mark.parametrize(
    ("name", "rise", "components"),
    [
        ("trl_two_rewards.py", 0.35, ["math_reward", "code_reward"]),
        pytest.param("trl_tools.py", 0.1, ["right"], marks=pytest.mark.long),
        pytest.param("trl_environment.py", 0.2, ["env"], marks=pytest.mark.long),
    ],
)
def test_the_reward_rises(name: str, rise: float, components: list[str], taught: Path) -> None:
    """Half of what the model was shown is right: GRPO finds out which. With five seeds the least
    rises were 0.67, 0.22 and 0.40.
    """
    lines = run(name, taught)
    rewards = [line["reward/mean"] for line in lines]
    assert len(lines) == 8 and all(line["reward/unscored"] == 0 for line in lines)
    assert sum(rewards[-3:]) / 3 - rewards[0] > rise, rewards
    for component in components:
        assert lines[-1][f"reward/{component}"] > lines[0][f"reward/{component}"]
    if name != "trl_two_rewards.py":
        assert lines[-1]["env/calls"] > 0.7 and lines[-1]["env/failed"] == 0
