"""What speaks against a run.

`RunHealth` decides it, from the run's metrics and events, for everybody who tells it: the screen,
the end of `train`, summary.json, the report, `reinforge runs show`. Also the report's table of
faults, and its banners.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.core.faults import PREFIX as FAULTS
from reinforge.watch.logs import read_lines
from reinforge.watch.transcripts import cut, escape

WHY = 300  # characters of a reason
# steps that a run must have done before its share of bad ones says anything; a run that has ended
# needs none
ENOUGH = 5
MOST_UNSCORED = 0.1  # share of answers without a reward that is still no trouble
MOST_SKIPPED = 0.05  # share of steps whose gradient was not finite, likewise
ROUNDING = 1e-9  # relative spread of rewards that are equal and were averaged
# a metric of every step whose answers get rewards; a reward model's own scores are not rewards
SCORED = "reward/unscored"
EVALUATIONS = ("eval/accuracy",)  # what must not collapse
TEACHERS = ("policy/teacher_kl", "distillation/")  # metrics of one


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that kept a run from learning, or from telling: what it is, with its numbers, and
    what to do next.
    """

    kind: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} {self.fix}"


@dataclass(frozen=True, slots=True)
class EvalScore:
    """One evaluation: the metric's value and its interval, where it has one."""

    step: int
    value: float
    low: float | None
    high: float | None


@dataclass
class RunHealth:
    """Counts what a run's lines of metrics and events say, one after the other, and names the
    troubles there are so far.

    A step is idle if its gradient was 0. Where every advantage is 0, a KL, an entropy or a router's
    term may still give one.
    """

    steps: int = 0
    idle: int = 0
    idle_reward: float = 0.0  # summed over idle steps
    best_reward: float = -math.inf  # the highest mean of a step
    solved_steps: int = 0  # steps at the end that were idle because every answer got that
    solved_from: int = 0  # the first of them
    skipped: int = 0
    unscored: float = 0.0  # share of each step, summed
    scored_steps: int = 0  # steps that have rewards
    faults: bool = False  # whether anything beside training went wrong
    # means of steps in which all answers got the same reward
    rewards: set[float] = field(default_factory=set)
    varied: bool = False  # whether any step had answers with different rewards
    taught: bool = False  # whether a teacher says what to learn, with rewards or without
    scores: dict[str, list[EvalScore]] = field(default_factory=dict)
    trackers: dict[str, str] = field(default_factory=dict)  # those that failed, and what they said

    @classmethod
    def of(cls, run_dir: Path) -> RunHealth:
        """The health of a run directory, as its logs tell it."""
        health = cls()
        for line in read_lines(run_dir / "metrics.jsonl"):
            health.observe(int(line.get("step") or 0), line)
        for event in read_lines(run_dir / "events.jsonl"):
            health.hear(event)
        return health

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics: of a step, or of an evaluation."""
        for name in EVALUATIONS:
            if (value := _finite(metrics.get(name))) is not None:
                bounds = (_finite(metrics.get(f"{name}_{end}")) for end in ("low", "high"))
                self.scores.setdefault(name, []).append(EvalScore(step, value, *bounds))
        if "train/skipped" in metrics:
            self._observe_step(step, metrics)

    def _observe_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.steps += 1
        self.skipped += bool(metrics["train/skipped"])
        mean = _finite(metrics.get("reward/mean")) if SCORED in metrics else None
        spread = _finite(metrics.get("reward/std")) or 0.0
        differ = mean is not None and spread > ROUNDING * max(1.0, abs(mean))
        if "train/grad_norm" in metrics:
            still = metrics["train/grad_norm"] == 0
        else:
            still = bool(metrics.get("train/empty")) or metrics.get("batch/signal") == 0
        if still:
            self.idle += 1
            self.idle_reward += mean or 0.0
        self.faults = self.faults or any(
            name.startswith(FAULTS) and value for name, value in metrics.items()
        )
        self.taught = self.taught or any(name.startswith(TEACHERS) for name in metrics)
        if SCORED in metrics:
            self.scored_steps += 1
            self.unscored += _finite(metrics[SCORED]) or 0.0
        self._follow_best(step, mean, alike=still and not differ)
        if mean is not None:
            self.varied = self.varied or differ
            self.rewards.add(float(f"{mean:.9g}"))

    def _follow_best(self, step: int, mean: float | None, *, alike: bool) -> None:
        """`alike`: the step was idle, and all answers got the same."""
        rounding = ROUNDING * max(1.0, abs(mean or 0.0))
        if mean is None or not alike or mean < self.best_reward - rounding:
            self.solved_steps = 0
        elif self.solved_steps == 0 or mean > self.best_reward + rounding:
            self.solved_from = step
            self.solved_steps = 1
        else:
            self.solved_steps += 1
        if mean is not None:
            self.best_reward = max(self.best_reward, mean)

    def hear(self, event: Mapping[str, Any]) -> None:
        """One event."""
        if event.get("kind") == "sink_failed":
            self.trackers.setdefault(str(event.get("sink")), str(event.get("error")))
        if event.get("kind") in ("started", "resumed"):
            self.trackers.clear()  # that was another part of the run

    def troubles(self, *, ended: bool = False) -> list[Trouble]:
        """Those there are now, the gravest first.

        While the run goes on, shares need a few steps before they mean anything.
        """
        # threads add to them
        found = [self._tracker(name, error) for name, error in list(self.trackers.items())]
        if self.steps >= (1 if ended else ENOUGH):
            found = [*self._of_steps(), *found]
        return [*self._collapsed(), *found]

    def _of_steps(self) -> list[Trouble]:
        found = []
        if self.skipped > MOST_SKIPPED * self.steps:
            found.append(
                Trouble(
                    "nonfinite",
                    f"{self.skipped} of {self.steps} steps had a gradient that was not finite (NaN"
                    " or infinity) and did not change the weights.",
                    "Lower train.learning_rate, and look at the rewards.",
                )
            )
        unscored = self.unscored / max(1, self.scored_steps)
        if unscored > MOST_UNSCORED:
            found.append(
                Trouble(
                    "unscored",
                    f"{unscored:.0%} of the answers got no reward: they could not be scored, and"
                    " taught nothing.",
                    (
                        "Why is in events.jsonl (kind fault)."
                        if self.faults
                        else "Nothing failed: the rewards returned None for them."
                    )
                    + " `reinforge check rewards CONFIG` tries each reward.",
                )
            )
        if not self.varied and len(self.rewards) == 1 and not self.taught:
            found.append(self._constant())
        elif self.idle * 2 > self.steps:
            found.append(self._solved() if self._is_solved() else self._idle())
        return found

    def _constant(self) -> Trouble:
        return Trouble(
            "constant_reward",
            f"Every answer in {_steps(self.steps)} got the same reward,"
            f" {next(iter(self.rewards)):.4g}: there was nothing to learn from.",
            "Look at samples.jsonl: does the reward read the answer, is the task far too hard or"
            " already solved? `reinforge check rewards CONFIG` tries each reward.",
        )

    def _is_solved(self) -> bool:
        """Whether most steps are a row at the end in which every answer got at least the highest
        mean that any step had, after others that had something to learn.
        """
        return self.varied and self.solved_steps * 2 > self.steps

    def _solved(self) -> Trouble:
        return Trouble(
            "solved",
            f"Solved after step {self.solved_from - 1}, as far as rewards tell: every answer since"
            f" got {self.best_reward:.4g}, more than the mean of any step before, and"
            f" {_steps(self.solved_steps)} had nothing to learn from.",
            "If that is all there is to get, take harder prompts, or let eval.early_stop end such a"
            " run; if not, samples.jsonl shows what the answers settled on.",
        )

    def _idle(self) -> Trouble:
        share = f"{self.idle} of {_steps(self.steps)} taught nothing"
        if not self.scored_steps:
            return Trouble(
                "no_gradient",
                f"{share}: the gradient was exactly 0.",
                "Look at data.loss_on, at the rows and at train.learning_rate.",
            )
        return Trouble(
            "no_gradient",
            f"{share}: all answers to a prompt got the same reward (mean"
            f" {self.idle_reward / self.idle:.3g} in those steps), which gives no gradient.",
            "Take easier prompts where the reward is low and harder ones where it is high, a larger"
            " algorithm.group_size or a higher rollout.temperature; algorithm.dynamic_sampling"
            " replaces such groups.",
        )

    def _collapsed(self) -> list[Trouble]:
        found = []
        for name, scores in self.scores.items():
            best = max(scores, key=lambda score: score.value)
            last = scores[-1]
            apart = (
                last.value < best.value / 2
                if last.high is None or best.low is None
                else last.high < best.low
            )
            if apart:
                found.append(
                    Trouble(
                        "collapse",
                        f"{name} fell from {best.value:.1%} (step {best.step}) to {last.value:.1%}"
                        f" (step {last.step}).",
                        "Lower train.learning_rate or raise algorithm.kl.coefficient;"
                        " run.checkpoint.best=eval/accuracy keeps the best weights.",
                    )
                )
        return found

    def _tracker(self, name: str, error: str) -> Trouble:
        return Trouble(
            "tracker",
            f"{name} takes no metrics any more: {cut(error, WHY)}",
            "The run goes on, and metrics.jsonl has all of them.",
        )


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _steps(n: int) -> str:
    return f"{n} steps" if n != 1 else "1 step"


def trouble_banner(troubles: Iterable[Trouble]) -> str:
    """HTML over the numbers of a run that could not learn, or could not tell."""
    return "".join(
        f'<div class=warning data-kind="{escape(t.kind)}"><b>{escape(t.what)}</b>'
        f" {escape(t.fix)}</div>"
        for t in troubles
    )


def fault_rows(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each kind of fault, most frequent first: how many, in how many steps, from when
    to when, and a reason.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for e in events:
        if e.get("kind") != "fault":
            continue
        key = (str(e.get("fault")), str(e.get("during")))
        row = rows.setdefault(
            key,
            {
                "fault": key[0],
                "during": key[1],
                "count": 0,
                "steps": 0,
                "first": e.get("step"),
                "why": "",
            },
        )
        row |= {
            "count": row["count"] + int(e.get("count") or 0),
            "steps": row["steps"] + 1,
            "last": e.get("step"),
            "why": row["why"] or e.get("why") or "",
        }
    return sorted(rows.values(), key=lambda row: (-row["count"], row["fault"]))


def fault_table(events: Iterable[Mapping[str, Any]]) -> str:
    """HTML; nothing where nothing went wrong."""
    rows = fault_rows(events)
    if not rows:
        return ""
    head = "".join(
        f"<th>{name}</th>"
        for name in ("fault", "during", "count", "steps", "first", "last", "the first said")
    )
    body = "".join(
        f"<tr><td class=key>{escape(r['fault'])}</td><td>{escape(r['during'])}</td>"
        + "".join(
            f"<td class=number>{escape(r[name])}</td>"
            for name in ("count", "steps", "first", "last")
        )
        + f"<td class=text>{escape(cut(str(r['why']), WHY))}</td></tr>"
        for r in rows
    )
    return (
        "<h2>Faults</h2><div class=panel><table"
        f" id=faults><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def banner(uncontained: Sequence[str]) -> str:
    """HTML over the numbers of a run whose rewards could be tampered with."""
    if not uncontained:
        return ""
    return (
        f"<div class=warning><b>Uncontained.</b> {escape(', '.join(uncontained))} ran what the"
        " model wrote without a sandbox (allow_unsafe): programs could read and change whatever"
        " the run could, its rewards included.</div>"
    )
