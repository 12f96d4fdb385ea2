"""The section `eval`: how often and how the held-out rows are answered."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, FiniteFloat

from reinforge.config.base import Count, Fraction, Natural, NonNegative, Section
from reinforge.config.structured import StructuredConfig


class EarlyStopConfig(Section):
    metric: str = Field("eval/accuracy", description="An evaluation metric.")
    mode: Literal["max", "min"] = Field(
        "max", description="Whether more or less of the metric is better."
    )
    patience: Count = Field(3, description="Evaluations without improvement before the run stops.")
    threshold: FiniteFloat | None = Field(
        None, description="Also stop as soon as the metric reaches this."
    )


# those of evals/benchmarks/table.py
BenchmarkName = Literal["gsm8k", "math", "mmlu", "ifeval", "humaneval"]


class BenchmarkConfig(Section):
    """A known benchmark that the evaluations of a run ask too: docs/benchmarks.md."""

    task: BenchmarkName = Field(description="Which one.")
    rows: str | None = Field(
        None,
        description=(
            "A file with the columns of the original data set, a directory of them, or a hub id."
            " Default: the hub."
        ),
    )
    shots: str | None = Field(
        None, description="The same for the examples of few-shot prompts. Default: the hub."
    )
    limit: Count | None = Field(None, description="Ask only the first this many rows.")
    chat: bool | None = Field(
        None,
        description=(
            "Ask in a conversation, or with a text to continue. Default: by whether prompts are"
            " rendered with a chat template (data.chat)."
        ),
    )
    fewshot: Natural | None = Field(
        None, description="Examples in the prompt. Default: plain the usual, chat none."
    )
    max_new_tokens: Count | None = Field(
        None, description="Longest answer. Default: the benchmark's."
    )


class EvalConfig(Section):
    every: Natural = Field(
        0,
        description=(
            "Steps between evaluations; 0 = only at the start and the end. Needs data.eval."
        ),
    )
    at_start: bool = Field(True, description="Also evaluate before the first step.")
    temperature: NonNegative = Field(0.0, description="0 = greedy.")
    top_p: Fraction = Field(1.0, description="Nucleus of the evaluation's sampling.")
    samples: Count = Field(1, description="Completions per held-out prompt.")
    max_new_tokens: Count | None = Field(None, description="Default: rollout.max_new_tokens.")
    structured: StructuredConfig | None = Field(
        None,
        description="The form that every answer must have. Default: rollout.structured.",
    )
    benchmarks: list[BenchmarkConfig] = Field(
        [],
        description=(
            "Known benchmarks that every evaluation asks too, greedily: `eval/gsm8k/accuracy`."
        ),
    )
    early_stop: EarlyStopConfig | None = None
