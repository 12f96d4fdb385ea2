"""An index of samples.jsonl: where each line begins, and the columns that people filter by.

Texts stay in the file: a search goes through its bytes, and of a page only the lines that are shown
are read. So 100,000 samples cost a few megabytes, and a filter some milliseconds. To make the index
takes longer: until it is there, the newest samples come from the end of the file.
"""

from __future__ import annotations

import json
import mmap
import re
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reinforge.ui.errors import NoSuchRun
from reinforge.ui.texts import sound
from reinforge.watch.logs import LogTail, parse_line
from reinforge.watch.why import advantage_of

FILE = "samples.jsonl"
TEXT_BEGINS = b', "prompt": '
TEXT_ENDS = b', "reward": '  # no text has these: a quote inside of one is escaped
EVALUATION, IDLE, BROKEN = 1, 2, 4  # broken: a line that is no JSON object, and no sample
NONE = -1
FAR = 2**62  # no number of a sample
BLOCK = 64  # lines that are added at once
PIECE = 1 << 18  # bytes that are read at once from the end of the file
SOON = 4 << 20  # bytes that are indexed while somebody waits
ORDERS = ("newest", "oldest", "reward", "-reward", "length", "-length", "advantage", "-advantage")


@dataclass(frozen=True)
class SampleFilter:
    """What `GET /api/samples` asks for. None: whatever it is."""

    step: int | None = None
    step_min: int | None = None
    prompt: str | None = None  # the id of a row
    text: str | None = None  # part of a prompt or a completion
    reward_min: float | None = None
    reward_max: float | None = None
    length_min: int | None = None
    length_max: int | None = None
    stop: str | None = None
    component: str | None = None  # name, name>=0.5, name<1, name=0
    evaluation: bool | None = None
    unscored: bool | None = None
    idle: bool | None = None  # whether it taught nothing
    repeated: bool | None = None  # whether another answer of its step has the same text


class SampleIndex:
    """The samples of one run. Every reader calls `refresh` first, which reads what was appended."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / FILE
        self._lock = threading.RLock()
        self._tail = LogTail(self.path)
        self._counting = threading.Lock()
        self._counted = LogTail(self.path)
        self._count = 0  # lines that `_counted` has seen
        self._begin()

    def _begin(self) -> None:
        self.offsets = array("q")
        self._begins = array("q")  # of the texts in the file
        self._ends = array("q")
        self._steps = array("q")
        self._rewards = array("d")
        self._advantages = array("d")
        self._lengths = array("q")
        self._stops = array("q")
        self._rows = array("q")
        self._flags = array("B")  # EVALUATION, IDLE, BROKEN
        self._texts = array("q")  # hashes of step and completion
        self._components: dict[str, array[float]] = {}
        self.stop_names: list[str] = []
        self._stop_codes: dict[str, int] = {}
        self._row_codes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.offsets)

    def is_near(self) -> bool:
        """Whether `refresh` has so little to read that it can be waited for."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return True
        return size - self._tail.offset <= SOON

    def newest(self, most: int) -> tuple[int, list[tuple[int, dict[str, Any]]]]:
        """How many lines there are, and the last samples, each with the number of its line. Read
        from the end of the file, while another thread may be at the index.
        """
        with self._counting:
            for at, part in self._counted.parts():
                self._count = part.count(b"\n") + (self._count if at else 0)
            end = self._counted.offset
            count = self._count if end else 0
        found = []
        for back, raw in enumerate(_last_lines(self.path, end, most), start=1):
            line = parse_line(raw)
            if line is not None:
                found.append((count - back, sound(line)))
        return count, found

    def refresh(self) -> None:
        with self._lock:
            block: list[tuple[int, bytes]] = []
            for offset, raw in self._tail.read():
                if self._tail.restarted and offset == 0:
                    self._begin()
                block.append((offset, raw))
                if len(block) == BLOCK:
                    self._add(block)
                    block = []
            if self._tail.restarted and self._tail.offset == 0:
                self._begin()
            self._add(block)

    def _add(self, block: Sequence[tuple[int, bytes]]) -> None:
        """Lines of the file, column by column."""
        told = [parse_line(raw) for _, raw in block]
        lines = [line or {} for line in told]
        training = [_object(line.get("training")) for line in lines]
        stops = [str(line.get("stop")) for line in lines]
        for stop in dict.fromkeys(stops):
            if stop not in self._stop_codes:
                self._stop_codes[stop] = len(self.stop_names)
                self.stop_names.append(stop)
        rows = self._row_codes
        before = len(self.offsets)
        self.offsets.extend([at for at, _ in block])
        self._begins.extend([at + raw.find(TEXT_BEGINS) for at, raw in block])
        self._ends.extend([at + raw.find(TEXT_ENDS) for at, raw in block])
        self._steps.extend([_whole(line.get("step")) for line in lines])
        self._rewards.extend([_number(line.get("reward")) for line in lines])
        self._advantages.extend([_number(advantage_of(trained)) for trained in training])
        self._lengths.extend([_whole(line.get("length")) for line in lines])
        self._stops.extend([self._stop_codes[stop] for stop in stops])
        self._rows.extend([rows.setdefault(str(line.get("row")), len(rows)) for line in lines])
        self._flags.extend(
            [
                EVALUATION * bool(line.get("eval"))
                | IDLE * bool(trained.get("no_signal"))
                | BROKEN * (line is not read)
                for line, trained, read in zip(lines, training, told, strict=True)
            ]
        )
        self._texts.extend(
            [hash((str(line.get("step")), str(line.get("completion")))) for line in lines]
        )
        parts = [_object(line.get("components")) for line in lines]
        for name in dict.fromkeys(name for part in parts for name in part):
            self._components.setdefault(name, array("d", [np.nan]) * before)
        for name, column in self._components.items():
            column.extend([_number(part.get(name)) for part in parts])

    # ---- asking ----

    def facets(self) -> dict[str, Any]:
        """What there is to filter by."""
        with self._lock:
            whole = (_view(self._flags) & BROKEN) == 0
            counts = Counter(_view(self._stops)[whole].tolist())
            return {
                "steps": np.unique(_view(self._steps)[whole]).tolist(),
                "stops": {self.stop_names[code]: n for code, n in counts.items()},
                "components": list(self._components),
                "evaluations": int((_view(self._flags) & EVALUATION).sum()),
            }

    def select(self, wanted: SampleFilter, order: str = "newest") -> NDArray[np.int64]:
        """The numbers of the lines that fit, in order."""
        with self._lock:
            if not len(self):
                return np.zeros(0, dtype=np.int64)
            found = np.flatnonzero(self._mask(wanted))
            return found[self._order(found, order)]

    def _mask(self, wanted: SampleFilter) -> NDArray[np.bool_]:
        steps = _view(self._steps)
        rewards = _view(self._rewards)
        lengths = _view(self._lengths)
        flags = _view(self._flags)
        mask = (flags & BROKEN) == 0
        if wanted.step is not None:
            mask &= steps == wanted.step
        if wanted.step_min is not None:
            mask &= steps >= wanted.step_min
        if wanted.prompt is not None:
            mask &= _view(self._rows) == self._row_codes.get(wanted.prompt, NONE)
        if wanted.reward_min is not None:
            mask &= rewards >= wanted.reward_min
        if wanted.reward_max is not None:
            mask &= rewards <= wanted.reward_max
        if wanted.length_min is not None:
            mask &= lengths >= wanted.length_min
        if wanted.length_max is not None:
            mask &= lengths <= wanted.length_max
        if wanted.stop is not None:
            mask &= _view(self._stops) == self._stop_codes.get(wanted.stop, NONE)
        if wanted.component is not None:
            mask &= self._of_component(wanted.component)
        if wanted.evaluation is not None:
            mask &= (flags & EVALUATION).astype(bool) == wanted.evaluation
        if wanted.unscored is not None:
            mask &= np.isnan(rewards) == wanted.unscored
        if wanted.idle is not None:
            mask &= (flags & IDLE).astype(bool) == wanted.idle
        if wanted.repeated is not None:
            _, place, counts = np.unique(
                _view(self._texts), return_inverse=True, return_counts=True
            )
            mask &= (counts[place] > 1) == wanted.repeated
        if wanted.text:
            mask &= self._with_text(wanted.text)
        return mask

    def _of_component(self, asked: str) -> NDArray[np.bool_]:
        """`name` has a score, or one that fits: `name>=0.5`, `name<1`, `name=0`."""
        name, sign, value = _comparison(asked)
        values = _view(self._components.get(name, array("d", [np.nan]) * len(self)))
        compare = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}
        if not sign:
            return ~np.isnan(values)
        found: NDArray[np.bool_] = compare.get(sign, np.equal)(values, value)
        return found

    def _with_text(self, text: str) -> NDArray[np.bool_]:
        """Lines whose prompt or completion has it, letter by letter."""
        # as the recorder writes it
        needle = json.dumps(text)[1:-1].encode()
        offsets = _view(self.offsets)
        mask = np.zeros(len(self), dtype=bool)
        with self.path.open("rb") as file, _mapped(file) as data:
            found = [match.start() for match in re.finditer(re.escape(needle), data)]
        at = np.array(found, dtype=np.int64)
        lines = np.searchsorted(offsets, at, side="right") - 1
        known = (at >= _view(self._begins)[lines]) & (at < _view(self._ends)[lines])
        mask[lines[known]] = True
        return mask

    def _order(self, found: NDArray[np.int64], order: str) -> NDArray[np.int64]:
        name = order.lstrip("-")
        if name in ("newest", "oldest"):
            ahead = np.arange(len(found))
            return ahead if name == "oldest" else ahead[::-1]
        columns: dict[str, Any] = {
            "reward": self._rewards,
            "length": self._lengths,
            "advantage": self._advantages,
        }
        values = _view(columns[name])[found].astype(float)
        values = -values if order.startswith("-") else values
        return np.argsort(values, kind="stable")  # NaN is last either way

    def read(self, line: int) -> dict[str, Any]:
        """The whole line of a number."""
        with self._lock:
            if not 0 <= line < len(self):
                raise NoSuchRun(
                    f"there is no sample {line}.",
                    where="line",
                    fix=f"The run has recorded {len(self)}, from 0 on.",
                )
            with self.path.open("rb") as file:
                file.seek(self.offsets[line])
                found: dict[str, Any] | None = parse_line(file.readline())
            if found is None:
                raise NoSuchRun(
                    f"line {line} of samples.jsonl is no sample.",
                    where="line",
                    fix="The run's other samples can be read.",
                )
            whole: dict[str, Any] = sound(found)
            return whole


def _last_lines(path: Path, end: int, most: int) -> list[bytes]:
    """The last lines of the part of a file that ends there, the last one first."""
    if end == 0:
        return []
    with path.open("rb") as file:
        begin, data = end, b""
        while begin and data.count(b"\n") <= most:
            begin = max(0, end - 2 * (end - begin) - PIECE)
            file.seek(begin)
            data = file.read(end - begin)
    lines = data.split(b"\n")[:-1]
    whole = lines if begin == 0 else lines[1:]
    return whole[::-1][:most]


def _comparison(asked: str) -> tuple[str, str, float]:
    """
    >>> _comparison("math>=0.5"), _comparison("math"), _comparison("a=b")
    (('math', '>=', 0.5), ('math', '', 0.0), ('a=b', '', 0.0))
    """
    match = re.fullmatch(r"(.*?)(<=|>=|<|>|=)(-?[\d.]+(?:e-?\d+)?)", asked, re.DOTALL)
    if match is None:
        return asked, "", 0.0
    try:
        return match[1], match[2], float(match[3])
    except ValueError:
        return asked, "", 0.0


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < FAR else np.nan


def _whole(value: Any) -> int:
    return value if type(value) is int and abs(value) < FAR else NONE


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _view(column: Any) -> NDArray[Any]:
    """The column as it is now. A copy: an array that somebody looks into cannot grow."""
    return np.array(column, dtype=column.typecode)


def _mapped(file: Any) -> Any:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
