"""HumanEval: functions from their signature and docstring (Chen et al. 2021, 2107.03374), run in
the sandbox.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from reinforge.core.errors import InputError
from reinforge.evals.benchmarks.preset import (
    HubSplit,
    Judgement,
    Preset,
    Record,
    spoken,
    text_column,
)
from reinforge.rewards.code import CodeReward, fenced, parse_tests

LOAD = "--tasks humaneval"


class HumanEval(Preset):
    """`prompt`, a signature with a docstring; `test`, which defines `check`; `entry_point`."""

    name = "humaneval"
    rows = HubSplit("openai/openai_humaneval", "test")
    columns = ("prompt", "test", "entry_point")
    id_column = "task_id"
    max_new_tokens = 1024
    stops = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")
    metrics = ("pass@1",)
    judged_by = "its tests, in the sandbox, which the solution cannot reach (docs/sandbox.md)"

    def question(self, record: Record) -> str:
        return text_column(record, "prompt")

    def instruction(self, record: Record) -> str:
        return (
            "Complete this Python function. Answer with the whole function in one code block.\n\n"
            f"```python\n{text_column(record, 'prompt').rstrip()}\n```"
        )

    def gold(self, record: Record) -> str:
        entry = text_column(record, "entry_point")
        if not entry.isidentifier():
            raise InputError(f"entry_point is {entry!r:.80}, not the name of a function.")
        text_column(record, "test")
        return f"{entry} passes its tests"

    def judge(self, *, chat: bool) -> ProgramJudge:
        return ProgramJudge(chat=chat)


class ProgramJudge:
    """Runs a completion with the tests of its row."""

    def __init__(self, *, chat: bool):
        self.chat = chat
        self.reward = CodeReward(where=LOAD).open()

    async def __call__(self, record: Record, text: str) -> Judgement:
        entry = record["entry_point"]
        program = (
            from_chat(record["prompt"], entry, spoken(text))
            if self.chat
            else record["prompt"] + text
        )
        tests = parse_tests([record["test"]], entry, "asserts", LOAD)
        (verdict,) = await self.reward.judge([(program, tests)])
        score = self.reward.score(verdict)
        passes = "passes" if score else "could not be judged" if score is None else "fails"
        said = ": ".join(word for word in (verdict.status, verdict.reason) if word)
        return Judgement({"pass@1": score}, program, f"{passes} ({said})")

    def close(self) -> None:
        pool: Any = self.reward.pool
        if pool is not None:
            pool.close()


def from_chat(prompt: str, entry: str, text: str) -> str:
    """The program of an answer in a chat: what the prompt defines beside the function, and the last
    block of code that defines it. A block that does not is taken for its body.
    """
    blocks = fenced(text) or [text]
    defines = re.compile(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(entry)}\s*\(", re.MULTILINE)
    whole = [block for block in blocks if defines.search(block)]
    if not whole:
        return prompt + blocks[-1]
    return "\n".join([*_beside(prompt), whole[-1]])


def _beside(prompt: str) -> list[str]:
    """The prompt as a module, if it is one: its imports and helpers; the function is defined once
    more behind it.
    """
    for text in (prompt, f"{prompt.rstrip()}\n    pass\n"):
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return [text]
    return []
