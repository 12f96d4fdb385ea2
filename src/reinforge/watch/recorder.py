"""The run's own record: metrics.jsonl, events.jsonl, samples.jsonl, groups.jsonl, anchors.jsonl,
config.json, versions.json.

A checkpoint stores the byte offsets of the logs. A resumed run cuts them back to there, so
that a step that is done again is not in the log twice.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from reinforge.core.redact import redact, redact_settings
from reinforge.core.row import prompt_text
from reinforge.version import __version__
from reinforge.watch import sinks as trackers
from reinforge.watch.sample_table import EVALUATION, TRAINING, SampleTable
from reinforge.watch.sinks import HANDOVER, Sink, SinkThread
from reinforge.watch.transcripts import turns_of

if TYPE_CHECKING:
    from reinforge.core.sample import Group, Sample

# at INFO and DEBUG: nobody sees them who did not ask for them
EVENTS = logging.getLogger("reinforge.events")
METRICS = logging.getLogger("reinforge.metrics")
# what trackers keep of the run at its end
RECORD = ("config.json", "versions.json", "summary.json", "report.html")
ANCHORS = "anchors.jsonl"
REWARD_FILES = "rewards.json"  # where rewards stand that are not ours
LOGS = ("metrics.jsonl", "events.jsonl", "samples.jsonl", "groups.jsonl", ANCHORS)
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "datasets",
    "numpy",
    "triton",
    "flash-attn-4",
    "ray",
    "deepspeed",
    "megatron-core",
)


def versions() -> dict[str, str]:
    """What the run was made with. Reads package metadata only: nothing is imported."""
    found = {
        "reinforge": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def pick(groups: Iterable[Group], limit: int) -> list[tuple[Group, Sample, str]]:
    """At most `limit` samples, one of each group before a second of any."""
    rows = [
        [(g, s, text or "") for s, text in zip_longest(g.samples, g.texts[: len(g.samples)])]
        for g in groups
    ]
    return [row for turn in zip_longest(*rows) for row in turn if row is not None][:limit]


def asked_text(group: Group) -> str:
    """The prompt of a group to read. In a conversation it is what the policy was asked first: a
    game fills its numbers into the text of a row.
    """
    prompt = group.row.prompt
    messages = next(iter(group.transcripts.values()), [])
    asked = takewhile(lambda message: message.get("role") != "assistant", messages)
    said = [message.get("content") for message in asked if message.get("role") == "user"]
    if isinstance(prompt, str) and said and isinstance(said[-1], str):
        return said[-1]
    return prompt_text(prompt)


def sample_records(
    step: int,
    groups: Iterable[Group],
    limit: int,
    evaluation: bool = False,
    training: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """A few samples as samples.jsonl has them, with all their turns where there are several.

    `training`: what the step did with a sample, by its uid.
    """
    records = []
    for group, sample, text in pick(groups, limit):
        messages = group.transcripts.get(sample.episode)
        answer = group.row.columns.get("answer")
        record = {
            "step": step,
            "row": group.row.id,
            "uid": sample.uid,
            "prompt": asked_text(group),
            "completion": text,
            "reward": sample.reward,
            "components": sample.rewards,
            "stop": str(sample.stop),
            "length": sample.n_trained,
            **({} if answer is None else {"answer": answer}),
            **({"eval": True} if evaluation else {}),
            **({"turns": turns_of(messages)} if messages else {}),
        }
        if training and sample.uid in training:
            record["training"] = training[sample.uid]
        records.append(_finite(record))
    return records


class Recorder:
    """Appends to the logs and feeds the sinks.

    `resume_offsets` are what `offsets` gave when the checkpoint was saved; None is a new run (logs
    of an attempt that never reached a checkpoint are set aside as `*.previous`).
    """

    def __init__(
        self,
        run_dir: Path,
        config_dict: Mapping[str, Any],
        sinks: Sequence[Sink] = (),
        resume_offsets: Mapping[str, int] | None = None,
        *,
        steps: int | None = None,
        sink_failed: Callable[[str, str], None] = lambda name, error: None,
    ):
        """`steps`: how many the run is to take.

        `sink_failed`: who hears, beside the log, that a tracker failed and why.
        """
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._write_json("config.json", redact_settings(config_dict))
        self._write_json("versions.json", versions())
        dropped = {name: self._prepare(name, resume_offsets) for name in LOGS}
        self._files: dict[str, IO[bytes]] = {
            name: (self.run_dir / name).open("ab") for name in LOGS
        }
        begins = "started" if resume_offsets is None else "resumed"
        self.event(begins, argv=sys.argv, pid=os.getpid(), dropped_bytes=dropped, steps=steps)
        shutil.rmtree(self.run_dir / HANDOVER, ignore_errors=True)  # of a run that was killed
        self._told_of_sinks = sink_failed
        self.sinks = [SinkThread(sink, self._sink_failed) for sink in sinks]

    def _prepare(self, name: str, offsets: Mapping[str, int] | None) -> int:
        """Cuts a log to its offset, or sets it aside; returns the bytes that went (negative: that
        many were missing).
        """
        path = self.run_dir / name
        size = path.stat().st_size if path.exists() else 0
        if offsets is None:
            if size:
                os.replace(path, path.with_name(f"{name}.previous"))
            return size
        keep = offsets.get(name, 0)
        if size > keep:
            os.truncate(path, keep)
        elif 0 < size < keep:
            # lost with the page cache of a machine that went down: at least end on a whole line
            data = path.read_bytes()
            os.truncate(path, data.rfind(b"\n") + 1)
        return size - keep

    def document(self, name: str, value: Mapping[str, Any]) -> None:
        """A JSON file of its own beside the logs, such as prediction.json."""
        self._write_json(name, _finite(redact(value)))

    def _write_json(self, name: str, value: Any) -> None:
        part = self.run_dir / f".{name}.part"
        part.write_text(json.dumps(value, indent=1, default=str), encoding="utf-8")
        os.replace(part, self.run_dir / name)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False, default=str).encode() + b"\n"
        with self._lock:
            self._files[name].write(line)
            self._files[name].flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.

        NaN and infinity are not JSON: they become null, and the key is listed under `nonfinite`.
        """
        values = {key: float(value) for key, value in metrics.items()}
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        bad = [key for key, value in finite.items() if value is None]
        self._append(
            "metrics.jsonl",
            {"step": step, "time": time.time(), **finite, **({"nonfinite": bad} if bad else {})},
        )
        METRICS.debug("step %d", step, extra={"step": step, "metrics": values})
        for sink in self.sinks:
            sink.log(step, {key: value for key, value in values.items() if finite[key] is not None})

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened: started, resumed, checkpoint, skipped_step, sink_failed,
        finished, ...
        """
        self._append("events.jsonl", _event(kind, fields, self.run_dir))

    def anchor(self, step: int, record: Mapping[str, Any]) -> None:
        """What the step can be found and compared by (loops/anchors.py)."""
        self._append(ANCHORS, {"step": step, **record})

    def groups(self, step: int, record: Mapping[str, Any]) -> None:
        """What a training step did with its groups: a line that `watch/why.py` reads.

        The record is that of loops/trace.py; its samples are for `samples`.
        """
        told = {name: value for name, value in record.items() if name != "samples"}
        self._append("groups.jsonl", _finite({"step": step, **told}))

    def samples(
        self,
        step: int,
        groups: Iterable[Group],
        limit: int,
        *,
        evaluation: bool = False,
        training: Mapping[str, Any] | None = None,
    ) -> None:
        """A few samples for people (`sample_records`)."""
        self.write_samples(sample_records(step, groups, limit, evaluation, training))

    def write_samples(self, records: Sequence[dict[str, Any]]) -> None:
        """Of one step, or of one evaluation."""
        for record in records:
            self._append("samples.jsonl", record)
        if records:
            kind = EVALUATION if "eval" in records[0] else TRAINING
            table = SampleTable(kind, records[0]["step"], records)
            for sink in self.sinks:
                sink.table(table)

    def offsets(self) -> dict[str, int]:
        """Byte offsets for a checkpoint (under extra["clock"]: they vary with timings).

        What they cover is on disk when this returns.
        """
        with self._lock:
            for file in self._files.values():
                os.fsync(file.fileno())
            return {name: file.tell() for name, file in self._files.items()}

    def _sink_failed(self, name: str, error: str) -> None:
        self.event("sink_failed", sink=name, error=error)
        self._told_of_sinks(name, error)

    def keep_checkpoint(self, folder: Path, keepers: Container[str]) -> None:
        """Hands the sinks of these names a checkpoint, which may be removed while they take it."""
        for sink in self.sinks:
            if sink.sink.name in keepers:
                sink.keep_folder("checkpoint", folder, self.run_dir / HANDOVER)

    def finish(self, summary: Mapping[str, Any], keepers: Container[str] = ()) -> None:
        """Hands the sinks the summary of the run, and those of these names its files."""
        files = [self.run_dir / name for name in RECORD if (self.run_dir / name).exists()]
        for sink in self.sinks:
            sink.finish(summary)
            if sink.sink.name in keepers:
                sink.keep("record", files)

    def close(self, seconds: float | None = None) -> None:
        """`seconds`: how long the trackers have, all together, to take what is still queued."""
        ends = time.monotonic() + (trackers.CLOSE_SECONDS if seconds is None else seconds)
        for sink in self.sinks:
            sink.end()
        for sink in self.sinks:
            sink.close(max(0.0, ends - time.monotonic()))
        shutil.rmtree(self.run_dir / HANDOVER, ignore_errors=True)
        with self._lock:
            for file in self._files.values():
                file.close()


def note(run_dir: Path, kind: str, **fields: Any) -> None:
    """An event of a run that could not even begin, and so has no recorder."""
    if Path(run_dir).is_dir():
        with (Path(run_dir) / "events.jsonl").open("ab") as file:
            file.write(
                json.dumps(_event(kind, fields, run_dir), allow_nan=False, default=str).encode()
                + b"\n"
            )


def _event(kind: str, fields: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """The line of an event. Whoever listens to Python's logging hears of it too."""
    told = _finite(redact(fields))
    EVENTS.info("%s %s", kind, told, extra={"kind": kind, "fields": told, "run_dir": str(run_dir)})
    return {"time": time.time(), "kind": kind, **told}


def _finite(value: Any) -> Any:
    """NaN and infinity as text, so that the line stays JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
