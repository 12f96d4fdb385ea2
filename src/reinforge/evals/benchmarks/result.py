"""What came out of a benchmark: the metrics of its records, with confidence intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reinforge.evals.benchmarks.preset import Preset
from reinforge.evals.statistics import pass_at_k, wilson

SOLVED = 0.999  # a score of at least this counts as solved, in pass@k
KS = (5, 10, 50, 100)  # of pass@k, besides the number of samples itself


@dataclass(frozen=True)
class MetricValue:
    """A mean over rows and its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, rows: int) -> MetricValue:
        """The rows are the independent trials, not their samples."""
        return cls(value, *wilson(value * rows, rows))


@dataclass(frozen=True)
class BenchmarkResult:
    """What a model scores on one benchmark. `reinforge.benchmark` returns one for each task."""

    task: str
    metric: str  # the one that is usually reported
    metrics: Mapping[str, MetricValue]  # each with `value`, `low` and `high`
    rows: int  # how many were asked
    samples: int  # answers to each row
    unscored: int  # answers that could not be judged
    cut: int  # answers that ended at the limit of new tokens
    # the same for the values of columns such as `subject`
    groups: Mapping[str, Mapping[str, MetricValue]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # what the numbers depend on
    # prompt, completion, answer, scores and why of every answer
    records: Sequence[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def value(self) -> float:
        """Of the metric that is usually reported."""
        return self.metrics[self.metric].value


def result_of(
    preset: Preset, records: Sequence[dict[str, Any]], samples: int, settings: Mapping[str, Any]
) -> BenchmarkResult:
    """Of all records of a task, `samples` in a row for each of its rows."""
    rows = [records[at : at + samples] for at in range(0, len(records), samples)]
    metrics = {name: _mean(rows, name) for name in preset.metrics}
    main = preset.metrics[0]
    if samples > 1:
        metrics |= _pass_at(rows, main, samples)
    return BenchmarkResult(
        preset.name,
        main,
        metrics,
        len(rows),
        samples,
        sum(record["scores"].get(main) is None for record in records),
        sum(record["stop"] == "length" for record in records),
        {column: found for column in preset.groups if (found := _grouped(rows, column, main))},
        settings,
        records,
    )


def _mean(rows: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> MetricValue:
    """Of rows' means. What could not be judged is left out, and not a 0."""
    total = weight = 0.0
    scored = 0
    for row in rows:
        found = [r for r in row if r["scores"].get(metric) is not None]
        if not found:
            continue
        own = found[0].get("weights", {}).get(metric, 1)
        total += own * sum(r["scores"][metric] for r in found) / len(found)
        weight += own
        scored += 1
    return MetricValue.of(total / weight if weight else 0.0, scored)


def _pass_at(
    rows: Sequence[Sequence[Mapping[str, Any]]], metric: str, samples: int
) -> dict[str, MetricValue]:
    """Of the rows of which all samples could be judged."""
    whole = [row for row in rows if all(r["scores"].get(metric) is not None for r in row)]
    solved = [sum(r["scores"][metric] >= SOLVED for r in row) for row in whole]
    ks: Iterable[int] = [*(k for k in KS if k < samples), samples]
    return {f"pass@{k}": MetricValue.of(pass_at_k(solved, samples, k), len(whole)) for k in ks}


def _grouped(
    rows: Sequence[Sequence[Mapping[str, Any]]], column: str, metric: str
) -> dict[str, MetricValue]:
    by: dict[str, list[Sequence[Mapping[str, Any]]]] = {}
    for row in rows:
        if (value := row[0].get("groups", {}).get(column)) is not None:
            by.setdefault(str(value), []).append(row)
    return {name: _mean(members, metric) for name, members in sorted(by.items())}
