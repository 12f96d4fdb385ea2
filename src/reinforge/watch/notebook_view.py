"""What a notebook shows while a run goes: one output with progress, curves and the newest samples,
drawn anew in its place.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from reinforge.core.html import GREY, SampleLine, escape, sample_table
from reinforge.core.row import prompt_text
from reinforge.core.visible import visible
from reinforge.watch.curves import LINE, curve_images
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.evaluation_news import EvaluationNews
from reinforge.watch.notebook import NotebookOutput
from reinforge.watch.recorder import pick
from reinforge.watch.view import hours, numbers

if TYPE_CHECKING:
    from reinforge.core.sample import Group

SAMPLES = 4
EVERY = 0.5  # seconds between two drawings
# lines that are kept of what a run says
HEAD = 20
TAIL = 40
ROOM = "margin:6px 0"
SAID = f"{ROOM};white-space:pre-wrap;word-break:normal;opacity:0.8;font-size:12px"


class NotebookView:
    """A run in the output of a notebook's cell; `watch/view.py` is the same for a terminal.

    Whatever is told is drawn at once, or `every` seconds after the last drawing. Steps may be of
    milliseconds, and each drawing goes through the kernel's connection.
    """

    def __init__(
        self,
        output: NotebookOutput | None = None,
        every: float = EVERY,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.every = every
        self.clock = clock
        self._output = output or NotebookOutput()
        self._lock = threading.RLock()  # of all below: a timer draws in a thread of its own
        self._timer: threading.Timer | None = None
        self._drawn: float | None = None  # when
        self._title = ""
        self._total = self._first = self._step = 0
        self._began = clock()
        self._ended: float | None = None
        self._activity = ""
        self._latest: dict[str, float] = {}
        self._evaluations = EvaluationNews()
        self._series: dict[str, dict[float, float]] = {}  # values by step
        self._samples: list[SampleLine] = []
        self._sampled = 0  # the step that they are of
        self._troubles: list[str] = []
        self._said: list[str] = []  # lines

    # ---- what a run tells ----

    def start(self, total_steps: int, title: str, first_step: int = 0) -> None:
        """`first_step`: steps that an earlier part of the run has done already."""
        with self._lock:
            self._total = total_steps
            self._title = title
            self._first = self._step = first_step
            self._began = self.clock()
            self._ended = None
            self._evaluations.begin(first_step)
        self._changed()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._step = step
            self._latest = dict(metrics)
            for name, value in self._evaluations.news(step, metrics).items():
                if isinstance(value, int | float) and math.isfinite(value):
                    self._series.setdefault(name, {})[step] = value
        self._changed()

    def table(self, groups: Iterable[Group], limit: int = SAMPLES) -> None:
        with self._lock:
            self._samples = [
                (prompt_text(group.row.prompt), text, s.reward, str(s.stop), s.n_trained)
                for group, s, text in pick(groups, limit)
            ]
            self._sampled = self._step
        self._changed()

    def message(self, text: str) -> None:
        with self._lock:
            self._said = shortened([*self._said, *(visible(line) for line in text.split("\n"))])
        self._changed()

    def doing(self, text: str) -> None:
        with self._lock:
            self._activity = visible(text)
        self._changed()

    def troubles(self, found: Sequence[Trouble]) -> None:
        with self._lock:
            self._troubles = [visible(str(trouble)) for trouble in found]
        self._changed()

    def stop(self) -> None:
        with self._lock:
            self._activity = ""
            if self._ended is None:
                self._ended = self.clock()
            self._draw()

    # ---- drawing ----

    def _changed(self) -> None:
        """Draws now, or in a while; a run that has ended tells its last words at once."""
        with self._lock:
            wait = 0.0
            if self._drawn is not None and self._ended is None:
                wait = self._drawn + self.every - self.clock()
            if wait <= 0:
                self._draw()
            elif self._timer is None:
                self._timer = threading.Timer(wait, self._draw)
                self._timer.daemon = True
                self._timer.start()

    def _draw(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._drawn = self.clock()
            self._output.show(self._html(), self._text())

    def _progress(self) -> str:
        if not self._title:
            return self._activity
        now = self.clock() if self._ended is None else self._ended
        parts = [f"step {self._step} of {self._total}", hours(now - self._began)]
        done = self._step - self._first
        if self._ended is None and done > 0 and self._step < self._total:
            parts.append(f"{hours((now - self._began) / done * (self._total - self._step))} left")
        return ", ".join([*parts, self._activity] if self._activity else parts)

    def _text(self) -> str:
        """Everything but the curves and samples, in lines."""
        values = "  ".join(f"{label} {value}" for label, value in numbers(self._latest))
        head = f"{visible(self._title)}: {self._progress()}" if self._title else self._progress()
        troubles = [f"! {text}" for text in self._troubles]
        return "\n".join(line for line in (head, values, *troubles, *self._said) if line)

    def _html(self) -> str:
        parts = [self._head(), self._numbers()]
        parts += [
            f'<div style="{ROOM};font-weight:bold;color:#d64545">! {escape(text)}</div>'
            for text in self._troubles
        ]
        series = {name: sorted(points.items()) for name, points in self._series.items()}
        if curves := curve_images(series):
            parts.append(f'<div style="{ROOM}">{curves}</div>')
        if self._samples:
            parts.append(f'<div style="opacity:0.7">samples of step {self._sampled}</div>')
            parts.append(sample_table(self._samples))
        if self._said:
            parts.append(f'<pre style="{SAID}">{escape(chr(10).join(self._said))}</pre>')
        return f'<div style="max-width:1000px">{"".join(parts)}</div>'

    def _head(self) -> str:
        share = min(self._step / self._total, 1.0) if self._total else 0.0
        bar = (
            f'<div style="{ROOM};height:4px;width:100%;background:{GREY}">'
            f'<div style="height:4px;width:{share:.1%};background:{LINE}"></div></div>'
        )
        title = f"<b>{escape(visible(self._title))}</b> " if self._title else ""
        return f"<div>{title}{escape(self._progress())}</div>{bar if self._title else ''}"

    def _numbers(self) -> str:
        values = "".join(
            f'<span style="margin-right:14px">{escape(label)} <b>{escape(value)}</b></span>'
            for label, value in numbers(self._latest)
        )
        return f"<div>{values}</div>" if values else ""


def shortened(lines: list[str]) -> list[str]:
    """The first and the last lines of many."""
    if len(lines) <= HEAD + TAIL:
        return lines
    return [*lines[:HEAD], "...", *lines[-(TAIL - 1) :]]
