"""Answers that are mathematics, judged by the reward `math`."""

from __future__ import annotations

from reinforge.config.rewards import RewardConfig
from reinforge.core.row import Row
from reinforge.rewards.build import build_rewards
from reinforge.rewards.math import final_answer


class MathJudge:
    """Whether a text ends in an answer equal to the gold one. Judges of presets hold one."""

    def __init__(self) -> None:
        (self.reward,) = build_rewards([RewardConfig(name="math")])

    async def __call__(
        self, question: str, text: str, gold: str
    ) -> tuple[float | None, str | None, str]:
        """The verdict, the answer that was found, and why."""
        answer = final_answer(text)
        row = Row("row", question, {"answer": gold})
        (verdict,) = (await self.reward.outcome([row], [text])).scores
        return verdict, answer, _why(verdict, answer, gold)


def _why(verdict: float | None, answer: str | None, gold: str) -> str:
    if verdict is None:
        return f"{answer!r:.80} and {gold!r:.80} could not be compared"
    if answer is None:
        return "there is no answer"
    return f"{answer!r:.80} is {'' if verdict else 'not '}{gold!r:.80}"
