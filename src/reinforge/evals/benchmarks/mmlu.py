"""MMLU: questions with four choices, of 57 subjects (Hendrycks et al. 2021, 2009.03300)."""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.core.errors import InputError
from reinforge.evals.benchmarks.preset import (
    HubSplit,
    Judgement,
    Preset,
    Record,
    spoken,
    text_column,
)
from reinforge.rewards.verifiable import chosen

LETTERS = "ABCDEFGHIJ"


class Mmlu(Preset):
    """`question`, `choices` and `answer`, the place of the right one or its letter; `subject`, if
    there is one, names the examples and the header.

    A plain prompt is answered by the likeliest letter, a chat by the letter that is written.
    """

    name = "mmlu"
    rows = HubSplit("cais/mmlu", "test", "all")
    examples = HubSplit("cais/mmlu", "dev", "all")
    columns = ("question", "choices", "answer")
    fewshot = 5
    same = "subject"
    max_new_tokens = 1024
    metrics = ("accuracy",)
    groups = ("subject",)
    judged_by = "plain: the letter with the highest log-prob; chat: the letter that is settled on"

    def question(self, record: Record) -> str:
        return f"{self._asked(record)}\nAnswer:"

    def worked(self, record: Record) -> str:
        return f" {self.gold(record)}"

    def instruction(self, record: Record) -> str:
        return (
            f"{self._asked(record)}\n\nChoose one. End with a line `Answer: ` and the letter of"
            " your choice."
        )

    def reply(self, record: Record) -> str:
        return f"Answer: {self.gold(record)}"

    def header(self, record: Record) -> str:
        subject = record.get("subject")
        about = f" about {str(subject).replace('_', ' ')}" if subject else ""
        return f"The following are multiple choice questions (with answers){about}.\n\n"

    def options(self, record: Record) -> list[str]:
        return [f" {letter}" for letter in LETTERS[: len(_choices(record))]]

    def picked(self, record: Record, likelihoods: Sequence[float]) -> Judgement:
        gold = self.gold(record)
        letters = LETTERS[: len(likelihoods)]
        # the first of equal ones, as everywhere
        best = letters[max(range(len(letters)), key=lambda i: likelihoods[i])]
        why = f"{best} is the likeliest of " + ", ".join(
            f"{letter} {value:.3f}" for letter, value in zip(letters, likelihoods, strict=True)
        )
        return Judgement({"accuracy": float(best == gold)}, best, f"{why}; right is {gold}")

    def gold(self, record: Record) -> str:
        count = len(_choices(record))
        answer = record["answer"]
        if isinstance(answer, str) and answer.strip() in LETTERS[:count] and answer.strip():
            return answer.strip()
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < count:
            return LETTERS[answer]
        raise InputError(
            f"answer is {answer!r:.80}, neither a place from 0 to {count - 1} nor a letter."
        )

    def judge(self, *, chat: bool) -> ChoiceJudge:
        return ChoiceJudge(self)

    def _asked(self, record: Record) -> str:
        shown = "".join(
            f"\n{letter}. {choice}"
            for letter, choice in zip(LETTERS, _choices(record), strict=False)
        )
        return text_column(record, "question").strip() + shown


class ChoiceJudge:
    """Reads the letter that a completion settles on, as the reward `choice` does."""

    def __init__(self, preset: Mmlu):
        self.preset = preset

    async def __call__(self, record: Record, text: str) -> Judgement:
        gold = self.preset.gold(record)
        letter = chosen(spoken(text))
        why = "it settles on no letter" if letter is None else f"it says {letter}"
        return Judgement({"accuracy": float(letter == gold)}, letter, f"{why}; right is {gold}")

    def close(self) -> None:
        pass


def _choices(record: Record) -> Sequence[str]:
    choices = record["choices"]
    if (
        not isinstance(choices, list | tuple)
        or not 2 <= len(choices) <= len(LETTERS)
        or not all(isinstance(choice, str) for choice in choices)
    ):
        raise InputError(f"choices is {choices!r:.80}, not a list of 2 to {len(LETTERS)} texts.")
    return choices
