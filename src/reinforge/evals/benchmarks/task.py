"""A benchmark that is ready to be asked: its rows, their examples and the form of its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.core.engine import Sampling
from reinforge.core.row import Row
from reinforge.evals.benchmarks.preset import AnswerJudge, Preset, Record, until
from reinforge.evals.benchmarks.rows import BenchmarkRow, GivenRows, RowsOption, read_examples


@dataclass(frozen=True)
class BenchmarkTask:
    """Rows with their prompts, and how their answers are sampled and judged. `make_task` makes it;
    `reinforge benchmark` and the evaluations of a run ask it.
    """

    preset: Preset
    rows: Sequence[BenchmarkRow]
    examples: Sequence[Sequence[Record]]  # of every row
    chat: bool
    sampling: Sampling
    settings: Mapping[str, Any]  # what the numbers depend on, in words, for the result

    @property
    def by_likelihood(self) -> bool:
        """Whether answers are the likeliest of given ones, and nothing is generated."""
        return not self.chat and bool(self.preset.options(self.rows[0].record))

    def row(self, i: int) -> Row:
        """The prompt of a row as engines take it."""
        row = self.rows[i]
        if self.chat:
            return Row(row.id, self.preset.chat(row.record, self.examples[i]))
        return Row(row.id, self.preset.plain(row.record, self.examples[i]))

    def record(self, i: int, prompt: Any) -> dict[str, Any]:
        """What the record of an answer begins with."""
        record = self.rows[i].record
        groups = {name: record[name] for name in self.preset.groups if record.get(name) is not None}
        return {
            "id": self.rows[i].id,
            "prompt": prompt,
            "gold": self.preset.gold(record),
            **({"groups": groups} if groups else {}),
        }

    async def judged(self, judge: AnswerJudge, i: int, completion: str) -> dict[str, Any]:
        """What the record of a generated answer ends with."""
        text = completion if self.chat else until(completion, self.preset.stops)
        found = await judge(self.rows[i].record, text)
        return {
            "answer": found.answer,
            "scores": dict(found.scores),
            "why": found.why,
            **({"weights": dict(found.weights)} if found.weights else {}),
        }


def make_task(
    preset: Preset,
    rows: Sequence[BenchmarkRow],
    *,
    chat: bool,
    shots: GivenRows | None = None,
    fewshot: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    shots_given_by: RowsOption | None = None,
) -> BenchmarkTask:
    """Reads the examples; raises InputError where there are none. Without `fewshot`: as many as the
    preset's plain prompt has, and none in a chat.
    """
    count = (0 if chat else preset.fewshot) if fewshot is None else fewshot
    sampling = Sampling(
        max_new_tokens or preset.max_new_tokens,
        temperature,
        top_p=top_p,
        stop_strings=() if chat else preset.stops,
    )
    settings = {
        "prompt": "chat" if chat else "plain",
        "fewshot": count,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
    }
    examples = read_examples(preset, shots, count, rows, shots_given_by)
    return BenchmarkTask(preset, rows, examples, chat, sampling, settings)
