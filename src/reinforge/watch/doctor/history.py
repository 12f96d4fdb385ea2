"""What a run did so far, as the rules of the doctor read it: one column per metric, one entry per
step, and the evaluations beside them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from reinforge.core.faults import PREFIX as FAULTS
from reinforge.watch.columns import turn

# a metric of every step whose answers get rewards; a reward model's own scores are not rewards
SCORED = "reward/unscored"
TEACHERS = ("policy/teacher_kl", "distillation/")  # metrics of one
SHARES = "share/"
TIMES = "time/"
# what rules ask for; of everything else nothing is kept
KEPT = frozenset(
    {
        "train/loss",
        "train/grad_norm",
        "train/learning_rate",
        "train/skipped",
        "train/empty",
        "reward/mean",
        "reward/std",
        SCORED,
        "rewards/accuracy",
        "rewards/margin",
        "reward/accuracy",
        "response/length",
        "response/truncated",
        "response/truncated_reward",
        "response/repeated",
        "response/length_correlation",
        "groups/zero_variance",
        "groups/trained",
        "policy/entropy",
        "policy/kl",
        "policy/clip_fraction",
        "policy/ratio/max",
        "mismatch/mean",
        "mismatch/max",
        "mismatch/ess",
        "mismatch/outside_2x",
        "rollout/staleness",
        "tokens/stale",
        "tokens/sampled",
        "batch/signal",
        "critic/explained_variance",
        "critic/loss",
        "experts/dead",
        "train/router_aux_loss",
        "train/router_z_loss",
        "epoch",
        "memory/peak_gib",
    }
)
CLEARLY = 3.0  # standard errors of chance that are a rise or a fall
EVALUATIONS = ("eval/accuracy", "eval/reward", "eval/loss")


def finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class EvalScore:
    """One evaluation: the metric's value and its interval, where it has one."""

    step: int
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Values of one metric over neighbouring steps, for rules to compare."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def median(self) -> float:
        return sorted(self.values)[len(self.values) // 2]

    def __str__(self) -> str:
        """As evidence: `reward/mean 0.25 (steps 1 to 10)`."""
        return f"{self.name} {self.mean:.3g} ({span(self.steps[0], self.steps[-1])})"


def change(early: Window, late: Window) -> str:
    """As evidence: `reward/mean 0.25 (steps 1 to 10) -> 0.5 (steps 31 to 40)`."""
    return f"{early} -> {str(late).removeprefix(late.name).strip()}"


def span(first: int, last: int) -> str:
    """
    >>> span(1, 10), span(3, 3)
    ('steps 1 to 10', 'step 3')
    """
    return f"steps {first} to {last}" if first != last else f"step {first}"


def trend(window: Window) -> float:
    """How clearly values rise over their steps (below 0: fall), in standard errors of chance:
    Spearman's rank correlation with time, times the root of n - 1. Single spikes count little.

    >>> round(trend(Window("x", range(10), [float(i) for i in range(10)])), 3)
    3.0
    """
    n = len(window.values)
    if n < 3:
        return 0.0
    order = sorted(range(n), key=lambda i: window.values[i])
    ranks = [0.0] * n
    start = 0
    while start < n:  # equal values share their ranks
        end = start
        while end + 1 < n and window.values[order[end + 1]] == window.values[order[start]]:
            end += 1
        for i in order[start : end + 1]:
            ranks[i] = (start + end) / 2
        start = end + 1
    middle = (n - 1) / 2
    above = math.fsum((i - middle) * (rank - middle) for i, rank in enumerate(ranks))
    spread = math.fsum((i - middle) ** 2 for i in range(n)) * math.fsum(
        (rank - middle) ** 2 for rank in ranks
    )
    return above / math.sqrt(spread) * math.sqrt(n - 1) if spread else 0.0


@dataclass
class RunHistory:
    """The columns of a run. The doctor fills it line by line, rules read it."""

    config: Mapping[str, Any] = field(default_factory=dict)  # dotted keys
    ended: bool = False
    steps: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(default_factory=dict)  # NaN where a step has none
    scores: dict[str, list[EvalScore]] = field(default_factory=dict)
    faults: bool = False  # whether anything beside training went wrong
    taught: bool = False  # whether a teacher says what to learn, with rewards or without
    trackers: dict[str, str] = field(default_factory=dict)  # those that failed, and what they said
    # what was read since the last step: rules ask for the same metrics
    _windows: dict[str, Window | None] = field(default_factory=dict)
    _trends: dict[str, float] = field(default_factory=dict)

    # ---- filling ----

    def observe(self, lines: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Steps with their lines of metrics: of a step, or of an evaluation."""
        self._windows.clear()
        self._trends.clear()
        told = []
        for step, metrics in lines:
            self._score(step, metrics)
            if "train/skipped" in metrics:
                told.append((step, metrics))
        # most lines have the names of the line before: whole columns of them are added at once
        for names, block in groupby(told, key=lambda line: tuple(line[1])):
            self._add_block(names, list(block))

    def _score(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name in EVALUATIONS:
            if name in metrics and (value := finite(metrics[name])) is not None:
                low, high = (finite(metrics.get(f"{name}_{end}")) for end in ("low", "high"))
                self.scores.setdefault(name, []).append(EvalScore(step, value, low, high))

    def _add_block(
        self, names: Sequence[str], block: Sequence[tuple[int, Mapping[str, Any]]]
    ) -> None:
        before = len(self.steps)
        self.steps.extend([step for step, _ in block])
        kept = [name for name in names if name in KEPT or name.startswith((SHARES, TIMES))]
        turned = turn(names, [metrics for _, metrics in block])
        for name in kept:
            if name not in self.columns:
                self.columns[name] = array("d", [math.nan]) * before
            if turned is not None and math.isfinite(sum(turned[name])):
                self.columns[name].extend(turned[name])
            else:
                told = (finite(metrics[name]) for _, metrics in block)
                self.columns[name].extend(math.nan if v is None else v for v in told)
        if len(kept) < len(self.columns):
            for column in self.columns.values():
                column.extend([math.nan] * (len(self.steps) - len(column)))
        self.taught = self.taught or any(name.startswith(TEACHERS) for name in names)
        failing = [name for name in names if name.startswith(FAULTS)]
        self.faults = self.faults or any(metrics[name] for name in failing for _, metrics in block)

    def hear(self, event: Mapping[str, Any]) -> None:
        """One event."""
        if event.get("kind") == "sink_failed":
            self.trackers.setdefault(str(event.get("sink")), str(event.get("error")))
        if event.get("kind") in ("started", "resumed"):
            self.trackers.clear()  # that was another part of the run

    # ---- reading ----

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> Sequence[float]:
        """One value per step, NaN where it has none or none that is finite."""
        assert name in KEPT or name.startswith((SHARES, TIMES)), name
        found = self.columns.get(name)
        return [math.nan] * len(self.steps) if found is None else found

    def window(self, name: str) -> Window | None:
        """All finite values of a metric."""
        if name not in self._windows:
            self._windows[name] = self._read(name)
        return self._windows[name]

    def _read(self, name: str) -> Window | None:
        column = self.column(name)
        if not any(map(math.isnan, column)):
            return Window(name, list(self.steps), list(column)) if column else None
        known = [(s, v) for s, v in zip(self.steps, column, strict=True) if v == v]
        if not known:
            return None
        return Window(name, [s for s, _ in known], [v for _, v in known])

    def ends(self, name: str, fewest: int = 5) -> tuple[Window, Window] | None:
        """The first and the last quarter of a metric's values, at least `fewest` and at most 25
        each; None where there are not so many.
        """
        whole = self.window(name)
        if whole is None or len(whole.values) < 2 * fewest:
            return None
        n = min(25, max(fewest, len(whole.values) // 4))
        return (
            Window(name, whole.steps[:n], whole.values[:n]),
            Window(name, whole.steps[-n:], whole.values[-n:]),
        )

    def late(self, name: str, fewest: int = 5) -> Window | None:
        """The last quarter of a metric's values."""
        both = self.ends(name, fewest)
        return None if both is None else both[1]

    def evaluations(self) -> list[EvalScore]:
        """Of accuracy, or of the reward where that is not measured."""
        return self.scores.get("eval/accuracy") or self.scores.get("eval/reward") or []

    def trend(self, name: str) -> float:
        """How clearly a metric rises over the run, see `trend`; 0 where it is not measured, or its
        ends say otherwise.
        """
        whole = self.window(name)
        both = self.ends(name)
        if whole is None or both is None:
            return 0.0
        clear = self.clearness(whole)
        return clear if (both[1].mean - both[0].mean) * clear > 0 else 0.0

    def clearness(self, whole: Window) -> float:
        """`trend` of all values of a metric."""
        if whole.name not in self._trends:
            self._trends[whole.name] = trend(whole)
        return self._trends[whole.name]

    def rises(self, name: str = "reward/mean") -> bool:
        """Whether a metric ended clearly above its start."""
        return self.trend(name) > CLEARLY

    def improves(self) -> bool | None:
        """Whether evaluation ended above its start by more than the intervals allow (without
        intervals: at all); None where there are not two.
        """
        scores = self.evaluations()
        if len(scores) < 2:
            return None
        first, last = scores[0], scores[-1]
        if last.low is not None and first.high is not None:
            return last.low > first.value and last.value > first.high
        return last.value > first.value

    def surely_improves(self) -> bool:
        """The same where the intervals are known: without them a rise may be chance."""
        scores = self.evaluations()
        bounded = bool(scores) and scores[0].high is not None and scores[-1].low is not None
        return bounded and bool(self.improves())

    def worsens(self) -> bool:
        """Whether the last evaluation is clearly below the first: by their intervals, or, where
        there are none, by half.
        """
        scores = self.evaluations()
        if len(scores) < 2:
            return False
        first, last = scores[0], scores[-1]
        if last.high is None or first.low is None:
            return last.value < first.value / 2
        return last.high < first.low

    def setting(self, key: str, otherwise: Any = None) -> Any:
        """Of the configuration; `otherwise` where it does not say."""
        value = self.config.get(key)
        return otherwise if value is None else value

    @property
    def reward_names(self) -> list[str]:
        """In the order of the configuration."""
        names: list[str] = []
        while (name := self.config.get(f"rewards.{len(names)}.name")) is not None:
            names.append(str(name))
        return names

    def most_reward(self) -> float | None:
        """What an answer that gets everything is given: the sum of the positive weights."""
        weights = [
            float(self.setting(f"rewards.{i}.weight", 1.0)) for i in range(len(self.reward_names))
        ]
        return math.fsum(w for w in weights if w > 0) if weights else None
