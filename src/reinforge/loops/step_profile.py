"""What the time and the memory of a few steps went into (`train.profile`): a torch trace with a
table, a history of GPU memory, or ranges for NVIDIA's Nsight Systems.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

from reinforge.config.profile import ProfileConfig
from reinforge.core.errors import InputError

FOLDER = "profile"
ROWS = 40  # of the table
RANGE = "phase "  # how the names of phases begin in a trace
OPENED_BY = {
    ".gz": "ui.perfetto.dev and chrome://tracing open it; a table is beside it",
    ".pickle": "pytorch.org/memory_viz draws it",
}
ALLOCATIONS = 1_000_000  # the newest that a history of memory keeps


class StepWatcher(Protocol):
    """Watches the steps from `start` to `stop`. `StepProfile` has one for each thing that was asked
    for.
    """

    def start(self) -> None: ...

    def stop(self, stem: Path) -> Path | None:
        """What it wrote: a file whose name begins like `stem`."""

    def named(self, name: str) -> AbstractContextManager[object]:
        """A phase of a step, as a range."""


class TorchTrace:
    """torch's profiler: a trace, and a table of the operations that took most."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        every = _ExperimentalConfig(profile_all_threads=True)  # training may have one of its own
        self.profiler = profile(activities=activities, acc_events=True, experimental_config=every)

    def start(self) -> None:
        self.profiler.start()

    def stop(self, stem: Path) -> Path:
        self.profiler.stop()
        trace = stem.with_name(f"{stem.name}.trace.json.gz")
        self.profiler.export_chrome_trace(str(trace))
        first = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self.profiler.key_averages().table(sort_by=first, row_limit=ROWS)
        stem.with_name(f"{stem.name}.table.txt").write_text(f"{table}\n", encoding="utf-8")
        return trace

    def named(self, name: str) -> AbstractContextManager[object]:
        return record_function(f"{RANGE}{name}")


class NsightRanges:
    """For `nsys profile --capture-range=cudaProfilerApi`: begin and end of the steps, and phases as
    NVTX ranges. Nsight writes the file.
    """

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()

    def stop(self, stem: Path) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()

    def named(self, name: str) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(f"{RANGE}{name}")


class MemoryHistory:
    """Which line of code allocated what of the GPU's memory, and when it was freed."""

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)

    def stop(self, stem: Path) -> Path:
        snapshot = stem.with_name(f"{stem.name}.memory.pickle")
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
        return snapshot

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        yield  # a history has no ranges


class StepProfile:
    """Watches some steps of a run, and evaluations and checkpoints between them. `Run` makes it,
    and says where steps begin and end.
    """

    def __init__(self, cfg: ProfileConfig | None, run_dir: Path):
        if cfg is not None:
            _check(cfg)
        self.cfg = cfg
        self.folder = run_dir / FOLDER
        self.seen = 0  # steps of this start
        self.began: int | None = None  # the first step that is profiled
        self._watchers: list[StepWatcher] = []

    def begin_step(self, step: int) -> None:
        """`step` comes next, counted from 1."""
        if self.cfg is None or self.began is not None or self.seen < self.cfg.after:
            return
        self.began = step
        self._watchers = [TorchTrace() if self.cfg.tool == "torch" else NsightRanges()]
        if self.cfg.memory:
            self._watchers.append(MemoryHistory())
        for watcher in self._watchers:
            watcher.start()

    def end_step(self, step: int) -> list[Path]:
        """`step` is done. What was written, if it was the last one of the profile."""
        self.seen += 1
        if self.cfg is None or self.began is None or step < self.began + self.cfg.steps - 1:
            return []
        return self.write(step)

    def write(self, step: int) -> list[Path]:
        """Ends the profile with this step; nothing where none is open."""
        watchers = self._watchers
        self._watchers = []
        if watchers:
            self.folder.mkdir(exist_ok=True)
        stem = self.folder / f"steps-{self.began}-{step}"
        written = [watcher.stop(stem) for watcher in watchers]
        return [path for path in written if path is not None]

    def named(self, name: str, inner: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """A phase, as a range while somebody watches."""
        return _ranged(self._watchers[0].named(name), inner) if self._watchers else inner


@contextmanager
def _ranged(
    outer: AbstractContextManager[object], inner: AbstractContextManager[None]
) -> Iterator[None]:
    with outer, inner:
        yield


def _check(cfg: ProfileConfig) -> None:
    """What only a GPU has is refused before the run begins."""
    wanted = {"train.profile.tool": cfg.tool == "nsys", "train.profile.memory": cfg.memory}
    for key, on in wanted.items():
        if on and not torch.cuda.is_available():
            raise InputError(
                "this looks at an NVIDIA GPU, and torch finds none.",
                where=key,
                fix="Leave it out: the trace of `tool: torch` is written on a CPU too.",
            )
