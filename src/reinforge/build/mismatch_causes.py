"""Which difference explains the log-probs that an engine told: every cause is a guess of how the
engine computed, and the guess that gives its numbers is the cause.

The search begins with the trainer's own way of computing. In each round every cause may change one
thing; what comes closest to the engine's numbers is taken, and where something is left the next
round changes another thing on top of it. Where no cause alone explains half, two together may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from reinforge.build.readings import FP8, LogprobReader, LogprobReading, VersionWeights, part_of
from reinforge.core.errors import InputError

# mean |difference| in nats that float32 has for other reasons than a cause: sums in another order
SINGLE = 2e-4
ROUNDING = 3.0  # times what the trainer's own precision rounds, two sides may be apart
EXPLAINS = 0.5  # share of the difference that a cause must take away to be one
ROUNDS = 3  # causes at once, at most
LAGS = 3  # steps back for which weights are looked at one by one
TEMPERATURES = [0.1 * 1.15**i for i in range(27)]  # 0.1 to 3.8
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995)
TOP_K = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 200)
MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True, slots=True)
class MismatchCause:
    """One cause: what it would mean, and how much of the difference it leaves unexplained."""

    name: str  # dtype, temperature, filter, template, stale weights, routing
    reading: LogprobReading  # the engine's way of computing, if this is it
    left: float  # nats per token
    before: float  # ... without it

    @property
    def explained(self) -> float:
        """Share of the difference that it takes away; below 0 it makes it worse."""
        return 1.0 - self.left / self.before if self.before else 0.0


@dataclass(frozen=True, slots=True)
class CauseSearch:
    """What `find_causes` found."""

    apart: float  # nats per token between the engine's numbers and the trainer's
    limit: float  # up to which that is rounding
    rounding: float | None  # of the trainer's precision on these tokens; None: not measured
    causes: list[MismatchCause]  # that explain it together, the one that explains most first
    ranked: list[MismatchCause]  # all that were tried alone, the best first
    left: float  # what nothing explains

    @property
    def reading(self) -> LogprobReading | None:
        """How the engine computed, as far as it is known."""
        return self.causes[-1].reading if self.causes else None


def distance(reader: LogprobReader, reading: LogprobReading) -> float:
    """Mean |engine - reading| in nats over all tokens; infinite where the reading is impossible."""
    mean = float((reader.recorded - reader.logprobs(reading)).abs().double().mean())
    return mean if math.isfinite(mean) else math.inf


def find_causes(reader: LogprobReader) -> CauseSearch:
    base = reader.trainers
    apart = distance(reader, base)
    rounding = measured_rounding(reader, base)
    limit = SINGLE if rounding is None else max(SINGLE, ROUNDING * rounding)
    causes: list[MismatchCause] = []
    ranked: list[MismatchCause] = []
    left = apart
    for number in range(ROUNDS):
        if left <= limit:
            break
        found = sorted(_one_round(reader, base, left, causes), key=lambda c: c.left)
        if number == 0:
            ranked = found
        taken = found[:1] if found and found[0].explained >= EXPLAINS else []
        if not taken and number == 0:
            taken = _pair(reader, found, left)
        if not taken:
            break
        causes += taken
        base = taken[-1].reading
        left = taken[-1].left
    return CauseSearch(apart, limit, rounding, causes, ranked, left)


def _pair(
    reader: LogprobReader, found: Sequence[MismatchCause], left: float
) -> list[MismatchCause]:
    """Two causes that explain together what neither explains alone; none where there are none."""
    pairs = [
        (first, second)
        for first in found
        for second in _one_round(reader, first.reading, first.left, [first])
    ]
    if not pairs:
        return []
    best = min(pairs, key=lambda pair: pair[1].left)
    return list(best) if best[1].left <= (1 - EXPLAINS) * left else []


def measured_rounding(reader: LogprobReader, base: LogprobReading) -> float | None:
    """How far the trainer's log-probs are from those of its weights in float32; None where they are
    computed in float32.
    """
    if base.precision == "float32":
        return None
    precise = reader.logprobs(replace(base, precision="float32"))
    return float((reader.logprobs(base) - precise).abs().double().mean())


def _one_round(
    reader: LogprobReader,
    base: LogprobReading,
    left: float,
    taken: Sequence[MismatchCause],
) -> Iterator[MismatchCause]:
    """The best reading of every cause that is not taken yet."""
    for name, tries in TRIES.items():
        if any(cause.name == name for cause in taken):
            continue
        best: tuple[float, LogprobReading] | None = None
        for reading in tries(reader, base):
            try:
                found = distance(reader, reading)
            except InputError:  # this model cannot be computed so
                continue
            if best is None or found < best[0]:
                best = (found, reading)
        if best is not None and math.isfinite(best[0]):
            yield MismatchCause(name, best[1], best[0], left)


# ---- what each cause changes ----


def _precisions(reader: LogprobReader, base: LogprobReading) -> Iterator[LogprobReading]:
    for precision in ("bfloat16", "float16", "float32", FP8):
        if precision != base.precision:
            yield replace(base, precision=precision)


def _temperatures(reader: LogprobReader, base: LogprobReading) -> Iterator[LogprobReading]:
    """The temperature that fits best, a round one where that fits as well."""

    def at(temperature: float) -> float:
        return distance(reader, replace(base, temperature=temperature))

    start = min(TEMPERATURES, key=at)
    fitted = _lowest(at, start / 1.15, start * 1.15)
    best = at(fitted)
    told = (1.0, reader.cfg.eval.temperature or 1.0, round(fitted, 2), round(fitted, 1))
    good = [t for t in told if t > 0 and at(t) <= 1.02 * best + 1e-6]
    temperature = good[0] if good else fitted
    if temperature != base.temperature:
        yield replace(base, temperature=temperature)


def _lowest(value: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum between `low` and `high` has it."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(24):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if value(left) < value(right):
            high = right
        else:
            low = left
    return (low + high) / 2


def _filters(reader: LogprobReader, base: LogprobReading) -> Iterator[LogprobReading]:
    """A filter that is counted in makes what was sampled likelier, never less likely."""
    gaps = reader.recorded - reader.logprobs(base)
    if float((gaps < -1e-3).double().mean()) > 0.02:
        return
    yield from (replace(base, top_p=value) for value in TOP_P)
    yield from (replace(base, top_k=value) for value in TOP_K)
    yield from (replace(base, min_p=value) for value in MIN_P)


def _templates(reader: LogprobReader, base: LogprobReading) -> Iterator[LogprobReading]:
    yield from (replace(base, prompt=name) for name in reader.prompts if name != base.prompt)


def _versions(reader: LogprobReader, base: LogprobReading) -> Iterator[LogprobReading]:
    """All weights of another version; then single parts of the model that stayed behind."""
    newest = int(reader.claimed.max())
    older = sorted((v for v in reader.weights if v != newest), reverse=True)
    yield from (replace(base, version=version) for version in older)
    names = reader.weights[newest]
    parts = list(dict.fromkeys(part_of(name) for name in names))
    before = [version for version in older if version < newest]
    for version in dict.fromkeys([*before[:1], *before[-1:]]):
        yield from (replace(base, version=version, part=part) for part in parts)


def _routes(reader: LogprobReader, base: LogprobReading) -> Iterator[LogprobReading]:
    if reader.has_routes:
        yield replace(base, routed=not base.routed)


TRIES: dict[str, Callable[[LogprobReader, LogprobReading], Iterator[LogprobReading]]] = {
    "template": _templates,
    "stale weights": _versions,
    "temperature": _temperatures,
    "filter": _filters,
    "dtype": _precisions,
    "routing": _routes,
}


def changed_parameters(newer: VersionWeights, older: VersionWeights) -> list[str]:
    """Names of the parameters that differ, in the order of the model."""
    return [name for name, tensor in newer.items() if not torch.equal(tensor, older[name])]
