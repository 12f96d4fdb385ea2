"""What the time of a few steps went into: a trace and a table (`train.profile`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from reinforge.config.profile import ProfileConfig

FOLDER = "profile"
ROWS = 40  # of the table
RANGE = "phase "  # how the names of phases begin in a trace


class StepProfile:
    """torch's profiler over some steps of a run. `Run` makes it, and says where steps begin and
    end. Evaluations and checkpoints between steps are left out.
    """

    def __init__(self, cfg: ProfileConfig | None, run_dir: Path):
        self.cfg = cfg
        self.folder = run_dir / FOLDER
        self.seen = 0  # steps of this start
        self.began: int | None = None  # the first step that is profiled
        self._profiler: profile | None = None

    def begin_step(self, step: int) -> None:
        """`step` comes next, counted from 1."""
        if self.cfg is None or self.began is not None or self.seen < self.cfg.after:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.began = step
        self._profiler = profile(activities=activities, acc_events=True)
        self._profiler.start()

    def end_step(self, step: int) -> Path | None:
        """`step` is done. The trace, if it was the last one of it."""
        self.seen += 1
        if self.cfg is None or self.began is None or step < self.began + self.cfg.steps - 1:
            return None
        return self.write(step)

    def write(self, step: int) -> Path | None:
        """Ends the profile with this step; nothing where none is open."""
        profiler = self._profiler
        if profiler is None:
            return None
        self._profiler = None
        profiler.stop()
        self.folder.mkdir(exist_ok=True)
        stem = self.folder / f"steps-{self.began}-{step}"
        trace = stem.with_name(f"{stem.name}.trace.json.gz")
        profiler.export_chrome_trace(str(trace))
        first = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=first, row_limit=ROWS)
        stem.with_name(f"{stem.name}.table.txt").write_text(f"{table}\n", encoding="utf-8")
        return trace

    def named(self, name: str, inner: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """A phase, as a range in the trace while there is one."""
        return inner if self._profiler is None else _ranged(name, inner)


@contextmanager
def _ranged(name: str, inner: AbstractContextManager[None]) -> Iterator[None]:
    with record_function(f"{RANGE}{name}"), inner:
        yield
