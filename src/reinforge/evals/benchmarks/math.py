"""MATH: problems of competitions (Hendrycks et al. 2021, 2103.03874), by default the 500 of
MATH-500 (Lightman et al. 2023, 2305.20050).
"""

from __future__ import annotations

from reinforge.core.errors import InputError
from reinforge.evals.benchmarks.math_judge import MathJudge
from reinforge.evals.benchmarks.preset import (
    HubSplit,
    Judgement,
    Preset,
    Record,
    spoken,
    text_column,
)
from reinforge.rewards.math import boxed


class Math(Preset):
    """`problem` and `solution`, whose last \\boxed{} is the answer."""

    name = "math"
    rows = HubSplit("HuggingFaceH4/MATH-500", "test")
    examples = HubSplit("EleutherAI/hendrycks_math", "train", "algebra")
    columns = ("problem", "solution")
    id_column = "unique_id"
    fewshot = 4
    max_new_tokens = 1024
    stops = ("Problem:",)
    metrics = ("accuracy",)
    groups = ("level", "subject", "type")
    judged_by = "the reward `math`, on the final answer (the last `\\boxed{}` if there is one)"

    def question(self, record: Record) -> str:
        return f"Problem:\n{text_column(record, 'problem')}\n\nSolution:"

    def worked(self, record: Record) -> str:
        return f" {text_column(record, 'solution')}"

    def instruction(self, record: Record) -> str:
        return (
            f"{text_column(record, 'problem')}\n\nThink step by step, and write the final answer in"
            " \\boxed{}."
        )

    def gold(self, record: Record) -> str:
        answer = boxed(text_column(record, "solution"))
        if answer is None or not answer.strip():
            raise InputError("solution has no \\boxed{answer}.")
        return answer.strip()

    def judge(self, *, chat: bool) -> MathAnswerJudge:
        return MathAnswerJudge(self)


class MathAnswerJudge:
    def __init__(self, preset: Math):
        self.preset = preset
        self.math = MathJudge()

    async def __call__(self, record: Record, text: str) -> Judgement:
        gold = self.preset.gold(record)
        verdict, answer, why = await self.math(record["problem"], spoken(text), gold)
        return Judgement({"accuracy": verdict}, answer, why)

    def close(self) -> None:
        pass  # its processes are shared, and end with this one
