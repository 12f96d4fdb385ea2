"""What the terminal shows while a run goes: a bar with the numbers that matter, or plain lines when
nobody is watching.

Text from models and data never reaches the terminal as it is: control characters are shown, markup
is not interpreted.
"""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from reinforge.core.row import prompt_text
from reinforge.core.visible import visible
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.evaluation_news import EVALUATED, NOTHING_SCORED, EvaluationNews
from reinforge.watch.recorder import pick

if TYPE_CHECKING:
    from reinforge.core.sample import Group

LABEL = re.compile(r"\w* {2,}")  # at the beginning of a line, or the room where one would be
# metric, short label, format
SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("train/loss", "loss", "{:z.4f}"),
    ("rewards/accuracy", "accuracy", "{:.1%}"),
    ("rewards/margin", "margin", "{:.3g}"),
    ("reward/accuracy", "accuracy", "{:.1%}"),
    ("policy/kl", "kl", "{:z.4f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("response/length", "length", "{:.0f}"),
    ("train/grad_norm", "grad", "{:.3g}"),
    ("experts/load_max", "busiest expert", "{:.2g}x"),
    ("tokens_per_second", "tok/s", "{:,.0f}"),
    ("eval/accuracy", "eval", "{:.1%}"),
    ("eval/loss", "eval loss", "{:.4f}"),
)


def hanging(line: str, width: int) -> list[str]:
    """A line as several that fit. What follows a label goes on under itself; a word that is longer,
    such as a path, stays whole.

    >>> hanging("cost   one two three", 14), hanging("one two three", 8), hanging("", 8)
    (['cost   one two', '       three'], ['one two', 'three'], [''])
    """
    label = LABEL.match(line)
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * (label.end() if label else 0),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def hours(seconds: float) -> str:
    """
    >>> hours(61.9), hours(7322)
    ('0:01:01', '2:02:02')
    """
    whole = int(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def numbers(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, value) of the metrics worth a glance, in reading order."""
    return [
        (label, NOTHING_SCORED if _of_nothing(key, metrics) else form.format(metrics[key]))
        for key, label, form in SHOWN
        if metrics.get(key) is not None
    ]


def _of_nothing(key: str, metrics: Mapping[str, float]) -> bool:
    return key == "eval/accuracy" and math.isnan(metrics[key])


def shares(metrics: Mapping[str, float]) -> str:
    """`generate 61%  train 30%`: the phases of the last step, the largest first.

    They add up to at most 100%.
    """
    parts = {
        key.removeprefix("share/"): value
        for key, value in metrics.items()
        if key.startswith("share/") and value >= 0.005
    }
    return "  ".join(
        f"{name} {value:.0%}" for name, value in sorted(parts.items(), key=lambda item: -item[1])
    )


class SteadyConsole(Console):
    """A console whose reader may go away (`reinforge train ... | head`): rich would end the program
    then, and this one leaves it to whoever prints.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Activity:
    """What the run is busy with, and for how long: a line that moves while nothing else does."""

    def __init__(self, text: str, clock: Callable[[], float]):
        self.text = text
        self.clock = clock
        self.since = clock()
        self._spinner = Spinner("dots")

    def __rich__(self) -> Table:
        seconds = int(self.clock() - self.since)
        line = Text(visible(self.text)).append(f"  {seconds} s" if seconds else "", style="dim")
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(self._spinner, line)
        return grid


class View:
    """start, then update every step, doing, table and message now and then, stop.

    On a terminal it is live; elsewhere (a file, a pipe, CI) it prints one line per step, at most
    every `plain_seconds`, and always the first, the last, evaluations and those whose samples are
    shown. `doing` may come before
    start: on a terminal it is there until something else is done, elsewhere it is a line of its own
    until the first step is over.
    """

    def __init__(
        self,
        console: Console | None = None,
        plain_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.console = console or SteadyConsole(highlight=False)
        self.plain_seconds = plain_seconds
        self.clock = clock
        self._live: Live | None = None
        self._bar: Progress | None = None
        self._activity: Activity | None = None
        self._troubles: list[str] = []
        self._warned: set[str] = set()  # kinds of trouble that were printed
        self._latest: dict[str, float] = {}
        self._total = self._first = 0
        self._printed: float | None = None
        self._evaluations = EvaluationNews()
        self._step: int | None = None
        self._left_out: str | None = None  # the line of the newest step, if it was not printed
        self._began = clock()

    def start(self, total_steps: int, title: str, first_step: int = 0) -> None:
        """`first_step`: steps that an earlier part of the run has done already."""
        self._total, self._first, self._began, self._printed = (
            total_steps,
            first_step,
            self.clock(),
            None,
        )
        self._evaluations.begin(first_step)
        if not self.console.is_terminal:
            self._print(
                Text(
                    visible(
                        f"{title}: {total_steps} steps"
                        + (f", continuing after {first_step}" if first_step else "")
                    )
                )
            )
            return
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            speed_estimate_period=3600,  # steps can take minutes
            expand=True,
        )
        self._task = self._bar.add_task(visible(title), total=total_steps, completed=first_step)
        self._show()

    def _print(self, what: RenderableType, *, soft_wrap: bool = False) -> None:
        """Above the live part, where there is one.

        A terminal or pipe that is gone shows nothing, and that is no reason to end the run.
        """
        with suppress(OSError):
            self.console.print(what, soft_wrap=soft_wrap)

    def _show(self) -> None:
        """Draws the live part anew; a terminal that is gone is left alone here too."""
        with suppress(OSError):
            if self._live is None:
                self._live = Live(
                    self._panel(),
                    console=self.console,
                    refresh_per_second=4,
                    transient=self._bar is None,
                )
                self._live.start()
            else:
                self._live.transient = self._bar is None
                self._live.update(self._panel())

    def _panel(self) -> Table:
        grid = Table.grid(expand=True)
        if self._bar is not None:
            grid.add_row(self._bar)
        line = Text()
        for label, value in numbers(self._latest):
            line.append(f"{label} ", style="dim").append(f"{value}   ", style="bold")
        if line:
            grid.add_row(line)
        if text := shares(self._latest):
            grid.add_row(Text(visible(text), style="dim"))
        for text in self._troubles:
            grid.add_row(Text(f"! {visible(text)}", style="bold red"))
        if self._activity is not None:
            grid.add_row(self._activity)
        return grid

    def doing(self, text: str) -> None:
        """What the run is busy with from now on."""
        if self._activity is not None and self._activity.text == text:
            return
        self._activity = Activity(text, self.clock)
        if self.console.is_terminal:
            self._show()
        elif self._step is None or self._step <= self._first:  # later the steps themselves are told
            self._print(Text(visible(text)), soft_wrap=True)

    def troubles(self, found: Sequence[Trouble]) -> None:
        """What speaks against the run, all of it: each kind is printed once, and stays under the
        bar for as long as it holds.
        """
        for trouble in found:
            if trouble.kind not in self._warned:
                self._warned.add(trouble.kind)
                self.message(f"warning: {trouble}")
        self._troubles = [trouble.what for trouble in found]
        if self._live:
            self._show()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest = {
            key: value for key, value in self._latest.items() if not key.startswith("share/")
        } | dict(metrics)
        if self._live and self._bar is not None:
            self._step = step
            self._bar.update(self._task, completed=step)
            self._show()
            return
        now = self.clock()
        news = self._evaluations.news(step, metrics)
        evaluated = any(key.startswith(EVALUATED) for key in news)
        self._step = step
        values = "  ".join(f"{label} {value}" for label, value in numbers(news))
        self._left_out = f"step {step}/{self._total}  {values}  {self._eta(step, now)}".rstrip()
        if self._printed is None or evaluated or now - self._printed >= self.plain_seconds:
            self._print_step()

    def _print_step(self) -> None:
        """The line of the newest step, unless it was printed."""
        if self._left_out is not None:
            self._printed = self.clock()
            self._print(Text(self._left_out), soft_wrap=True)
            self._left_out = None

    def _eta(self, step: int, now: float) -> str:
        done = step - self._first
        if done <= 0 or step >= self._total:
            return ""
        return f"eta {hours((now - self._began) / done * (self._total - step))}"

    def table(self, groups: Iterable[Group], limit: int = 4) -> None:
        """Prompts, completions and rewards, printed above the live lines."""
        rows = pick(groups, limit)
        if not self.console.is_terminal:
            self._print_step()  # samples come after the step that they are of
            for group, sample, text in rows:
                reward = "unscored" if sample.reward is None else f"{sample.reward:.3g}"
                line = (
                    f"  [{reward}] {visible(prompt_text(group.row.prompt)[-200:], 120)} ->"
                    f" {visible(text, 200)}"
                )
                self._print(Text(line), soft_wrap=True)
            return
        table = Table(show_lines=True, expand=True)
        for name, ratio in (("prompt", 4), ("completion", 6)):
            table.add_column(name, ratio=ratio, overflow="fold")
        for name in ("reward", "stop", "length"):
            table.add_column(name, justify="right", no_wrap=True)
        for group, sample, text in rows:
            reward = "–" if sample.reward is None else f"{sample.reward:.3g}"
            prompt = prompt_text(group.row.prompt)
            shown = visible(prompt if len(prompt) <= 300 else "…" + prompt[-299:])
            table.add_row(
                Text(shown),
                Text(visible(text, 500)),
                Text(reward),
                Text(str(sample.stop)),
                Text(str(sample.n_trained)),
            )
        self._print(table)

    def message(self, text: str) -> None:
        """Lines of text. A terminal breaks them between words; in a file they stay as they are."""
        lines = [visible(line) for line in text.split("\n")]
        if self.console.is_terminal:
            lines = [part for line in lines for part in hanging(line, self.console.width)]
        self._print(Text("\n".join(lines)), soft_wrap=True)

    def stop(self) -> None:
        self._print_step()
        self._activity = None
        if self._live:
            self._show()
            with suppress(OSError):
                self._live.stop()
            self._live = self._bar = None


class BarView(View):
    """Only the bar, and only at a terminal, where it is gone when the run is over: for a run that
    serves another purpose, whose result whoever started it tells. Elsewhere a line every
    `plain_every` steps, or none.
    """

    def __init__(self, console: Console | None = None, plain_every: int = 0):
        super().__init__(console)
        self.plain_every = plain_every

    def start(self, total_steps: int, title: str, first_step: int = 0) -> None:
        self._total = total_steps
        if self.console.is_terminal:
            super().start(total_steps, title, first_step)

    def doing(self, text: str) -> None:
        if self.console.is_terminal:
            super().doing(text)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.console.is_terminal:
            super().update(step, metrics)
        elif self.plain_every and step % self.plain_every == 0:
            self._print(Text(f"step {step}/{self._total}"))

    def table(self, groups: Iterable[Group], limit: int = 4) -> None: ...

    def message(self, text: str) -> None: ...

    def troubles(self, found: Sequence[Trouble]) -> None: ...

    def stop(self) -> None:
        self._bar = None  # what is left of the live part is wiped
        super().stop()
