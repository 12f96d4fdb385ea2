"""What speaks against a run, as parts of its report: banners of what the doctor found
(`watch/doctor`), and the table of faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reinforge.core.html import escape
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.transcripts import cut

WHY = 300  # characters of a reason


def trouble_banner(troubles: Iterable[Trouble]) -> str:
    """HTML over the numbers of a run that could not learn, or could not tell: the first cause and
    what else was found, each with its evidence behind a click.
    """
    return "".join(_banner_of(trouble) for trouble in troubles)


def _banner_of(trouble: Trouble) -> str:
    knob = "" if trouble.knob is None else f" Try <code>{escape(str(trouble.knob))}</code>."
    why = f" (follows from {escape(trouble.because)})" if trouble.because else ""
    rows = [*trouble.evidence, *map(_sample_line, trouble.samples)]
    shown = "".join(f"<div>{escape(row)}</div>" for row in rows)
    more = f"<details><summary>evidence</summary>{shown}</details>" if shown else ""
    return (
        f'<div class=warning data-kind="{escape(trouble.kind)}"><b>{escape(trouble.what)}</b>{why}'
        f" {escape(trouble.fix)}{knob}{more}</div>"
    )


def _sample_line(sample: Mapping[str, Any]) -> str:
    return (
        f"step {sample['step']}, {sample['uid']}, reward {sample['reward']}:"
        f" {sample['completion']!r}"
    )


def fault_rows(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each kind of fault, most frequent first: how many, in how many steps, from when
    to when, and a reason.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for e in events:
        if e.get("kind") != "fault":
            continue
        key = (str(e.get("fault")), str(e.get("during")))
        row = rows.setdefault(
            key,
            {
                "fault": key[0],
                "during": key[1],
                "count": 0,
                "steps": 0,
                "first": e.get("step"),
                "why": "",
            },
        )
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
    head = "".join(
        f"<th>{name}</th>"
        for name in ("fault", "during", "count", "steps", "first", "last", "the first said")
    )
    body = "".join(
        f"<tr><td class=key>{escape(r['fault'])}</td><td>{escape(r['during'])}</td>"
        + "".join(
            f"<td class=number>{escape(r[name])}</td>"
            for name in ("count", "steps", "first", "last")
        )
        + f"<td class=text>{escape(cut(str(r['why']), WHY))}</td></tr>"
        for r in rows
    )
    return (
        "<h2>Faults</h2><div class=panel><table"
        f" id=faults><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def banner(uncontained: Sequence[str]) -> str:
    """HTML over the numbers of a run whose rewards could be tampered with."""
    if not uncontained:
        return ""
    return (
        f"<div class=warning><b>Uncontained.</b> {escape(', '.join(uncontained))} ran what the"
        " model wrote without a sandbox (allow_unsafe): programs could read and change whatever"
        " the run could, its rewards included.</div>"
    )
