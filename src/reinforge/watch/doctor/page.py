"""What `reinforge runs diagnose` tells: one first cause at a glance, the rest below it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reinforge.watch.doctor.doctor import Doctor, with_samples
from reinforge.watch.doctor.learning import LearningVerdict, is_learning
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.runs import show_run

WIDTH = 10  # of the labels


def diagnose(run_dir: Path) -> dict[str, Any]:
    """Everything, as plain values: {"dir", "status", "why", "step", "steps", "first", "others",
    "learning"}.
    """
    run, found, learning = _examined(run_dir)
    return {
        **{name: run[name] for name in ("dir", "status", "why", "step", "steps")},
        "first": found[0].record() if found else None,
        "others": [trouble.record() for trouble in found[1:]],
        "learning": {"answer": learning.answer, "reasons": list(learning.reasons)},
    }


def diagnosis(run_dir: Path) -> str:
    """The same for people."""
    run, found, learning = _examined(run_dir)
    algorithm = run["config"].get("algorithm.name", "?")
    where = f"{run['dir']}: {algorithm}, {run['status']}, step {run['step']} of {run['steps']}"
    why = run["why"] if run["status"] == "failed" else None
    failed = [] if why is None else [f"It failed: {why}", ""]
    return "\n".join([where, "", *failed, *_findings(found, why), "", *_verdict(learning)])


def _examined(run_dir: Path) -> tuple[dict[str, Any], list[Trouble], LearningVerdict]:
    run = show_run(run_dir)
    doctor = Doctor.of(run_dir)
    ended = run["status"] != "running"
    found = doctor.troubles(ended=ended)
    return run, with_samples(found, run_dir), is_learning(doctor.history, ended=ended)


def _findings(found: Sequence[Trouble], failed: str | None) -> list[str]:
    if not found:
        before = "" if failed is None else " before it did"
        return [f"Nothing speaks against this run{before}."]
    first = found[0]
    name = "Note" if first.action == "note" else "First cause"
    lines = [f"{name}: {first.kind}{_since(first)}", *_told(first)]
    for trouble in found[1:]:
        why = f" (follows from {trouble.because})" if trouble.because else ""
        lines += ["", f"Also: {trouble.kind}{_since(trouble)}{why}", f"  {trouble.what}"]
        if trouble.knob is not None and trouble.because is None:
            lines.append(f"  try {trouble.knob}")
    return lines


def _since(trouble: Trouble) -> str:
    return "" if trouble.since is None else f", since step {trouble.since}"


def _told(trouble: Trouble) -> list[str]:
    rows = [("", trouble.what), *(("evidence", text) for text in trouble.evidence)]
    for sample in trouble.samples:
        reward = sample["reward"]
        said = "no reward" if not isinstance(reward, int | float) else f"reward {reward:.3g}"
        rows.append(
            (
                "samples",
                f"step {sample['step']}, {sample['uid']}, {said}: {sample['completion']!r}",
            )
        )
    if trouble.knob is not None:
        rows.append(("try", str(trouble.knob)))
    rows += [("advice", trouble.fix), ("more", trouble.link)]
    lines = []
    before = ""
    for label, text in rows:
        lines.append(f"  {'' if label == before else label:{WIDTH if label else 0}}{text}")
        before = label
    return lines


def _verdict(learning: LearningVerdict) -> list[str]:
    return [
        f"Is it learning? {learning.answer[0].upper()}{learning.answer[1:]}.",
        *(f"  {reason}" for reason in learning.reasons),
    ]
