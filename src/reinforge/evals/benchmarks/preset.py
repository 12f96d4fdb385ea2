"""What a benchmark is. The presets beside this file are the ones that come with reinforge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from reinforge.core.errors import InputError

Record = Mapping[str, Any]  # a row as its data set has it
Message = dict[str, Any]
THOUGHT = "</think>"
BETWEEN = "\n\n"  # examples of a plain prompt


@dataclass(frozen=True, slots=True)
class HubSplit:
    """A split of a data set on the hub, where a preset's rows are if nobody names others."""

    dataset: str
    split: str
    subset: str | None = None

    def __str__(self) -> str:
        return f"{self.dataset}{f' ({self.subset})' if self.subset else ''}, split {self.split}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge says of one answer. The runner writes it into the record of the row."""

    scores: Mapping[str, float | None]  # by metric, from 0 to 1; None: could not be judged
    answer: str | None  # what was taken for the answer
    why: str
    # of a score in its metric's mean, where it is the share of several things (1: it is one)
    weights: Mapping[str, int] = field(default_factory=dict)


class AnswerJudge(Protocol):
    """Judges answers to the rows of one preset. `Preset.judge` makes it; whoever asked for it
    closes it.
    """

    async def __call__(self, record: Record, text: str) -> Judgement: ...

    def close(self) -> None: ...


class Preset(ABC):
    """A benchmark: rows, prompts and a judge. One object each, in the table `PRESETS`.

    A prompt is plain (examples and a beginning, for a model to continue) or chat (an instruction in
    a conversation).
    """

    name: ClassVar[str]
    rows: ClassVar[HubSplit]
    examples: ClassVar[HubSplit | None] = None  # where those of a few-shot prompt come from
    columns: ClassVar[tuple[str, ...]]  # that every row has
    id_column: ClassVar[str | None] = None
    fewshot: ClassVar[int] = 0  # examples in a plain prompt; a chat prompt has none unless asked
    same: ClassVar[str | None] = None  # examples are those with the same value of this column
    max_new_tokens: ClassVar[int]
    stops: ClassVar[tuple[str, ...]] = ()  # what ends the answer to a plain prompt
    metrics: ClassVar[tuple[str, ...]]  # the first is the one that is reported
    groups: ClassVar[tuple[str, ...]] = ()  # columns whose values get numbers of their own
    judged_by: ClassVar[str]  # in words, for the page

    @abstractmethod
    def question(self, record: Record) -> str:
        """What a plain prompt asks, up to where the answer begins."""

    @abstractmethod
    def instruction(self, record: Record) -> str:
        """What a user says in a chat."""

    @abstractmethod
    def gold(self, record: Record) -> str:
        """The right answer, for records; raises InputError (without a place) where the row has
        none.
        """

    @abstractmethod
    def judge(self, *, chat: bool) -> AnswerJudge: ...

    def worked(self, record: Record) -> str:
        """The answer of an example, as it follows its question in a plain prompt."""
        raise _no_examples(self.name)

    def reply(self, record: Record) -> str:
        """The answer of an example in a chat."""
        return self.worked(record).strip()

    def header(self, record: Record) -> str:
        """What stands before the examples of a plain prompt."""
        return ""

    def options(self, record: Record) -> list[str]:
        """Continuations of a plain prompt of which the likeliest is the answer; none: the answer is
        generated.
        """
        return []

    def picked(self, record: Record, likelihoods: Sequence[float]) -> Judgement:
        """What the log-probs of `options` say."""
        raise AssertionError(f"{self.name} has no options")

    def plain(self, record: Record, examples: Sequence[Record]) -> str:
        shown = "".join(self.question(e) + self.worked(e) + BETWEEN for e in examples)
        return self.header(record) + shown + self.question(record)

    def chat(self, record: Record, examples: Sequence[Record]) -> list[Message]:
        turns: list[Message] = []
        for example in examples:
            turns.append({"role": "user", "content": self.instruction(example)})
            turns.append({"role": "assistant", "content": self.reply(example)})
        return [*turns, {"role": "user", "content": self.instruction(record)}]


def _no_examples(name: str) -> InputError:
    return InputError(f"{name} has no few-shot form.", where="--fewshot", fix="Leave it out.")


def spoken(text: str) -> str:
    """What a model that thinks aloud says after it has thought."""
    return text.rpartition(THOUGHT)[2] if THOUGHT in text else text


def until(text: str, stops: Sequence[str]) -> str:
    """Up to the first of the stop strings."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def text_column(record: Record, name: str) -> str:
    value = record[name]
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} is {value!r:.80}, not text.")
    return value
