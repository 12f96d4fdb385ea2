"""What a run has come to, for the program that trained it. Nothing heavy comes with this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.core.errors import InputError
from reinforge.core.html import escape
from reinforge.watch.curves import curve_images
from reinforge.watch.doctor.page import diagnosis
from reinforge.watch.logs import read_lines
from reinforge.watch.report import curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

# what `plot` draws, where the run has it and nothing is named
PLOTTED = (
    "reward/mean",
    "train/loss",
    "eval/reward",
    "eval/accuracy",
    "eval/loss",
    "response/length",
    "policy/kl",
    "train/grad_norm",
)
MOST_PLOTS = 4
TOLD = ("reward/mean", "train/loss", "eval/reward", "eval/accuracy", "eval/loss")  # in the repr


@dataclass(frozen=True, repr=False)
class RunResult:
    """What `train_config` and `reinforge.train` return about a run that has ended."""

    run_dir: Path
    metrics: dict[str, float]  # the newest value of each
    steps: int
    stopped: str | None = None  # why it ended before its time
    report: Path | None = None  # report.html
    module: Any = field(default=None, compare=False)  # the caller's own, trained in place

    def __repr__(self) -> str:
        parts = [f"{self.steps} steps"]
        parts += [f"{name} {self.metrics[name]:.4g}" for name in TOLD if name in self.metrics]
        if self.stopped is not None:
            parts.append(self.stopped)
        return f"<run {self.run_dir}: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows of it: the numbers, and the curves that are looked at first."""
        series = {
            name: [(step or 0.0, value) for step, _, value, *_ in points if value is not None]
            for name, points in curves(read_lines(self.run_dir / "metrics.jsonl")).items()
        }
        return f"<div>{escape(repr(self)[1:-1])}</div><div>{curve_images(series)}</div>"

    def diagnosis(self) -> str:
        """What `reinforge runs diagnose` says of the run: what is wrong first, and whether it
        learns.
        """
        return diagnosis(self.run_dir)

    @property
    def model(self) -> Any:
        """The trained model, as transformers or peft has it: the object that was given, or the
        newest checkpoint.
        """
        return self._trained[0]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the run used."""
        return self._trained[1]

    @cached_property
    def _trained(self) -> tuple[Any, Any]:
        from reinforge.build.saved_model import open_module

        return open_module(self.run_dir, self.module)

    @cached_property
    def history(self) -> DataFrame:
        """All metrics: a row for every step (0: before the first), a column for every name."""
        try:
            import pandas
        except ImportError:
            raise InputError(
                "a table of metrics needs pandas, which is not installed.",
                where="result.history",
                fix="pip install pandas, or read metrics.jsonl in the run's directory.",
            ) from None
        steps: dict[int, dict[str, float]] = {}
        for line in read_lines(self.run_dir / "metrics.jsonl"):
            steps.setdefault(int(line.pop("step")), {}).update(line)
        return pandas.DataFrame.from_dict(steps, orient="index").rename_axis("step").sort_index()

    def plot(self, *metrics: str) -> Figure:
        """A picture of metrics over steps: of those named, or of the usual ones."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise InputError(
                "a plot needs matplotlib, which is not installed.",
                where="result.plot",
                fix="pip install matplotlib, or open the run's report.html.",
            ) from None
        history = self.history
        names = list(metrics) or [n for n in PLOTTED if n in history.columns][:MOST_PLOTS]
        _check_names(names, list(history.columns))
        figure = Figure(figsize=(4.5 * len(names), 3.2), layout="constrained")
        axes = figure.subplots(1, len(names), squeeze=False)[0]
        for axis, name in zip(axes, names, strict=True):
            series = history[name].dropna()
            axis.plot(series.index, series.values, marker="." if len(series) < 40 else "")
            axis.set_title(name)
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
        return figure


def _check_names(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 3)
            raise InputError(
                f"the run has no metric {name!r}.",
                where="result.plot",
                fix=f"Did you mean {' or '.join(near)}?" if near else "See result.history.columns.",
            )
    if not names:
        raise InputError(
            "the run has logged nothing yet.", where="result.plot", fix="Let it train a step."
        )
