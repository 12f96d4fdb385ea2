"""GSM8K: word problems with whole numbers as answers (Cobbe et al. 2021, 2110.14168)."""

from __future__ import annotations

import re

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

MARK = "####"  # before the final number of a solution
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_ANY = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


class Gsm8k(Preset):
    """`question` and `answer`, a solution that ends in `#### 42`."""

    name = "gsm8k"
    rows = HubSplit("openai/gsm8k", "test", "main")
    examples = HubSplit("openai/gsm8k", "train", "main")
    columns = ("question", "answer")
    fewshot = 5
    max_new_tokens = 512
    stops = ("Question:",)
    metrics = ("accuracy", "strict_match", "flexible_extract")
    judged_by = "the reward `math`, on what follows the last `####`, else on the final answer"

    def question(self, record: Record) -> str:
        return f"Question: {text_column(record, 'question')}\nAnswer:"

    def worked(self, record: Record) -> str:
        return f" {text_column(record, 'answer')}"

    def instruction(self, record: Record) -> str:
        return (
            f"{text_column(record, 'question')}\n\nThink step by step, and write the final number"
            " in \\boxed{}."
        )

    def gold(self, record: Record) -> str:
        number = text_column(record, "answer").rpartition(MARK)[2].strip()
        if not re.fullmatch(r"[-+]?\$?[0-9][0-9,]*(\.[0-9]+)?", number):
            raise InputError(f"answer ends in {number!r:.80}, not in `#### number`.")
        return number

    def judge(self, *, chat: bool) -> Gsm8kJudge:
        return Gsm8kJudge(self)


class Gsm8kJudge:
    """Our verdict, and the two that are usually reported: the number after the first `#### `, and
    the last number anywhere, compared as texts.
    """

    def __init__(self, preset: Gsm8k):
        self.preset = preset
        self.math = MathJudge()

    async def __call__(self, record: Record, text: str) -> Judgement:
        gold = self.preset.gold(record)
        said = spoken(text)
        place = said.rpartition(MARK)[2].strip().split("\n")[0] if MARK in said else said
        verdict, answer, why = await self.math(record["question"], place, gold)
        strict = _MARKED.search(said)
        anywhere = _ANY.findall(said)
        scores = {
            "accuracy": verdict,
            "strict_match": float(strict is not None and _same(strict.group(1), gold)),
            "flexible_extract": float(bool(anywhere) and _same(anywhere[-1], gold)),
        }
        return Judgement(scores, answer, why)

    def close(self) -> None:
        pass  # its processes are shared, and end with this one


def _same(found: str, gold: str) -> bool:
    return _bare(found) == _bare(gold)


def _bare(number: str) -> str:
    return number.replace(",", "").replace("$", "").removesuffix(".")
