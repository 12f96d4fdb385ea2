"""IFEval: instructions that a program can check (Zhou et al. 2023, 2311.07911)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reinforge.core.errors import InputError
from reinforge.evals.benchmarks.instructions import arguments, follows, variants
from reinforge.evals.benchmarks.preset import (
    HubSplit,
    Judgement,
    Preset,
    Record,
    spoken,
    text_column,
)


class IfEval(Preset):
    """`prompt`, `instruction_id_list` and `kwargs`, one object for each instruction."""

    name = "ifeval"
    rows = HubSplit("google/IFEval", "train")
    columns = ("prompt", "instruction_id_list", "kwargs")
    id_column = "key"
    max_new_tokens = 1280
    metrics = ("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose")
    judged_by = "checkers of the 25 kinds of instructions, on the answer and on 8 variants of it"

    def question(self, record: Record) -> str:
        return text_column(record, "prompt")

    def instruction(self, record: Record) -> str:
        return text_column(record, "prompt")

    def gold(self, record: Record) -> str:
        return ", ".join(kind for kind, _ in instructions_of(record))

    def judge(self, *, chat: bool) -> InstructionJudge:
        return InstructionJudge()


class InstructionJudge:
    """A prompt is followed if all of its instructions are."""

    async def __call__(self, record: Record, text: str) -> Judgement:
        said = spoken(text)
        wanted = instructions_of(record)
        strict = [follows(kind, given, said) for kind, given in wanted]
        loose = [
            any(follows(kind, given, variant) for variant in variants(said))
            for kind, given in wanted
        ]
        count = len(wanted)
        scores = {
            "prompt_strict": float(all(strict)),
            "prompt_loose": float(all(loose)),
            "instruction_strict": sum(strict) / count,
            "instruction_loose": sum(loose) / count,
        }
        broken = [kind for (kind, _), ok in zip(wanted, strict, strict=True) if not ok]
        why = f"does not follow {', '.join(broken)}" if broken else "follows all instructions"
        weights = {"instruction_strict": count, "instruction_loose": count}
        return Judgement(scores, said, why, weights)

    def close(self) -> None:
        pass


def instructions_of(record: Record) -> list[tuple[str, dict[str, Any]]]:
    """The kinds of a row and what it says to each."""
    kinds = record["instruction_id_list"]
    given = record["kwargs"]
    if isinstance(given, str):  # how some copies keep it
        try:
            given = json.loads(given)
        except ValueError:
            raise InputError(f"kwargs is {given!r:.80}, which is no JSON.") from None
    lists = isinstance(kinds, list | tuple) and isinstance(given, list | tuple)
    if not lists or not kinds or len(kinds) != len(given):
        raise InputError(
            "instruction_id_list and kwargs are no lists of the same length.",
            fix="Give one object of kwargs for each instruction, {} where it needs none.",
        )
    for one in given:
        if isinstance(one, Mapping) or one is None:
            continue
        raise InputError(f"kwargs has {one!r:.80}, which is no object.")
    return [(kind, arguments(kind, one)) for kind, one in zip(kinds, given, strict=True)]
