"""What went wrong beside training, for the report: one line for each kind of fault, and a banner over a run that was not contained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reinforge.watch.transcripts import cut, escape

WHY = 300  # characters of a reason


def fault_rows(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each kind of fault, most frequent first: how many, in how many steps, from when to when, and a reason."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for e in events:
        if e.get("kind") != "fault":
            continue
        key = (str(e.get("fault")), str(e.get("during")))
        row = rows.setdefault(key, {"fault": key[0], "during": key[1], "count": 0, "steps": 0, "first": e.get("step"), "why": ""})
        row |= {
            "count": row["count"] + int(e.get("count") or 0),
            "steps": row["steps"] + 1,
            "last": e.get("step"),
            "why": row["why"] or e.get("why") or "",
        }
    return sorted(rows.values(), key=lambda row: (-row["count"], row["fault"]))


def fault_table(events: Iterable[Mapping[str, Any]]) -> str:
    """HTML; nothing where nothing went wrong."""
    rows = fault_rows(events)
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("fault", "during", "count", "steps", "first", "last", "the first said"))
    body = "".join(
        f"<tr><td class=key>{escape(r['fault'])}</td><td>{escape(r['during'])}</td>"
        + "".join(f"<td class=number>{escape(r[name])}</td>" for name in ("count", "steps", "first", "last"))
        + f"<td class=text>{escape(cut(str(r['why']), WHY))}</td></tr>"
        for r in rows
    )
    return f"<h2>Faults</h2><div class=panel><table id=faults><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def banner(uncontained: Sequence[str]) -> str:
    """HTML over the numbers of a run whose rewards could be tampered with."""
    if not uncontained:
        return ""
    return (
        f"<div class=warning><b>Uncontained.</b> {escape(', '.join(uncontained))} ran what the model wrote without a sandbox (allow_unsafe): "
        "programs could read and change whatever the run could, its rewards included.</div>"
    )
