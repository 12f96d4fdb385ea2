"""Where the seconds of a step go, and the memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

MEASURED = ("generate", "train")  # phases whose memory is worth a metric
# the phases in which a role works; it waits in the others
ROLES = {"trainer": ("annotate", "train"), "engine": ("generate",)}


class PhaseTimer:
    """`with phases("generate"):` adds up seconds by phase.

    A phase inside another takes its time away from the outer one, so that phases never count a
    second twice. Work that a GPU does later belongs to the phase that waits for it.

    `peak` gives the GiB of the worst moment since it was asked last, or None where there is no such
    number.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        peak: Callable[[], float | None] = lambda: None,
    ):
        self.clock = clock
        self.peak = peak
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._stack: list[str] = []
        self._since = self._start = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._settle()
        self._stack.append(name)
        try:
            yield
        finally:
            self._settle()
            self._stack.pop()

    def _settle(self) -> None:
        """Books the time since the last change on the innermost open phase."""
        now = self.clock()
        peak = self.peak()
        phase = self._stack[-1] if self._stack else "other"
        if self._stack:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        if peak is not None:
            self._peaks[phase] = max(peak, self._peaks.get(phase, 0.0))
        self._since = now

    def take(self) -> dict[str, float]:
        """`time/<phase>` in seconds and `share/<phase>` of the time since the last take; what no
        phase covered is `other`. Where there is a `peak`, also `memory/generate_gib`,
        `memory/train_gib` and `memory/peak_gib` of all phases.
        """
        self._settle()
        total = self._since - self._start
        seconds = self._seconds | {"other": max(total - sum(self._seconds.values()), 0.0)}
        peaks = self._peaks
        self._peaks = {}
        self._seconds = {}
        self._start = self._since
        times = {f"time/{name}": value for name, value in seconds.items()}
        memory = {f"memory/{name}_gib": peaks[name] for name in MEASURED if name in peaks}
        memory |= {"memory/peak_gib": max(peaks.values())} if peaks else {}
        return (
            times
            | {
                f"share/{name}": value / total if total > 0 else 0.0
                for name, value in seconds.items()
            }
            | memory
        )


def efficiency(
    timing: Mapping[str, float],
    tokens: float,
    rates: Mapping[str, float] | None,
    ahead: bool = False,
) -> dict[str, float]:
    """How well a step of `tokens` used its devices.

    `rates`: devices that train, engines that have others, peak_flops of one, flops_per_token of a
    training pass. `ahead`: rollouts go on in other phases too, so nothing is known of the engine's
    waiting.

    >>> spent = {"time/generate": 6.0, "time/train": 3.0, "time/other": 1.0}
    >>> given = {"devices": 3, "peak_flops": 1e3, "flops_per_token": 5.0}
    >>> for name, value in efficiency(spent, 900, given).items():
    ...     print(name, value)
    efficiency/idle_trainer 0.7
    efficiency/idle_engine 0.4
    efficiency/tokens_per_second_per_device 30.0
    efficiency/train_mfu 0.5
    """
    seconds = {
        name.removeprefix("time/"): value
        for name, value in timing.items()
        if name.startswith("time/")
    }
    total = sum(seconds.values())
    if total <= 0:
        return {}
    busy = {
        role: sum(seconds.get(name, 0.0) for name in names)
        for role, names in ROLES.items()
        if seconds.keys() & set(names) and not (ahead and role == "engine")
    }
    found = {f"efficiency/idle_{role}": round(1 - value / total, 6) for role, value in busy.items()}
    if rates:
        found["efficiency/tokens_per_second_per_device"] = (
            tokens / total / (rates["devices"] + rates.get("engines", 0))
        )
        if trained := seconds.get("train", 0.0):
            found["efficiency/train_mfu"] = (
                tokens
                * rates["flops_per_token"]
                / (trained * rates["devices"] * rates["peak_flops"])
            )
    return found
