"""Samples that show what a finding says: lines of samples.jsonl by step and uid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.transcripts import cut

SHOWN = 3
TEXT = 100  # characters of an answer
OF_ANSWERS = frozenset(
    {
        "unscored",
        "truncation",
        "constant_reward",
        "reward_hacking",
        "overoptimised",
        "entropy_explosion",
        "entropy_collapse",
        "length_drift",
        "no_gradient",
        "learning_rate_high",
        "collapse",
        "solved",
    }
)


def shown_for(
    trouble: Trouble, records: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """A few that fit, the newest first; none for illnesses that answers do not show."""
    if trouble.kind not in OF_ANSWERS:
        return ()
    trained = [r for r in records if not r.get("eval") and isinstance(r.get("completion"), str)]
    newest = [r for r in trained if r.get("step") == trained[-1].get("step")]
    fitting = list(_fitting(trouble.kind, newest)) or newest
    return tuple(_short(record) for record in fitting[:SHOWN])


def _fitting(kind: str, records: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    if kind == "truncation":
        return (r for r in records if r.get("stop") == "length")
    if kind == "unscored":
        return (r for r in records if r.get("reward") is None)
    if kind == "reward_hacking":
        times = Counter(r["completion"] for r in records)
        return sorted(records, key=lambda r: (-times[r["completion"]], -(r.get("length") or 0)))
    return ()


def _short(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": record.get("step"),
        "uid": record.get("uid"),
        "row": record.get("row"),
        "reward": record.get("reward"),
        "completion": cut(str(record.get("completion")), TEXT),
    }
