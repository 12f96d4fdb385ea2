"""What the pages about samples show: lists of them, one with its tokens, and which of them show
what the doctor found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from reinforge.ui import answers
from reinforge.ui.run_record import RunRecord
from reinforge.ui.sample_index import SampleFilter
from reinforge.ui.token_texts import token_texts
from reinforge.watch.columns import number
from reinforge.watch.why import advantage_of

TEXT = 400  # characters of a text in a list
IDS = "ids"
# (name, minuend, subtrahend) of recorded fields
DIFFERENCES = (("logprob - behaviour", "logprob", "behaviour"),)


def fitting(record: RunRecord, finding: str, wanted: SampleFilter) -> SampleFilter:
    """Samples that show what the doctor found."""
    if finding == "truncation":
        return replace(wanted, stop="length")
    if finding == "unscored":
        return replace(wanted, unscored=True)
    if finding == "reward_hacking":
        return replace(wanted, repeated=True)
    if finding in ("constant_reward", "no_gradient"):
        return replace(wanted, idle=True)
    since = [t.since for t in record.troubles() if t.kind == finding and t.since is not None]
    later = replace(wanted, step_min=since[0], evaluation=False) if since else wanted
    # groups whose answers are all worth the same
    return replace(later, idle=True) if finding == "entropy_collapse" else later


def samples_page(
    record: RunRecord, wanted: SampleFilter, order: str, page: int, size: int
) -> answers.SamplesPage:
    """A page of the list. The first page of all samples does not wait for the index."""
    told = {"page": page, "size": size}
    if (wanted, order, page) == (SampleFilter(), "newest", 0) and not record.index_is_near():
        total, samples = record.newest_samples(size)
        rows = [listed(line, sample) for line, sample in samples]
        return answers.SamplesPage.model_validate(
            {**told, "total": total, "rows": rows, "facets": None}
        )
    index = record.samples()
    found = index.select(wanted, order)
    lines = found[page * size : (page + 1) * size].tolist()
    rows = [listed(line, index.read(line)) for line in lines]
    return answers.SamplesPage.model_validate(
        {**told, "total": len(found), "rows": rows, "facets": index.facets()}
    )


def listed(line: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    """One sample in a list."""
    common = _common(line, sample)
    turns = sample.get("turns")
    return {
        **common,
        "prompt": _end(common["prompt"]),
        "completion": _start(common["completion"]),
        "turns": len(turns) if isinstance(turns, list) else 0,
        "tokens": bool(_training(sample).get("by_token")),
    }


def _common(line: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    training = _training(sample)
    uid = sample.get("uid")
    place = str(uid).rpartition("#")[2]
    parts = sample.get("components")
    length = sample.get("length")
    step = sample.get("step")
    return {
        "line": line,
        "step": step if isinstance(step, int) else None,
        "row": _text(sample.get("row")),
        "uid": _text(uid),
        "group": _text(training.get("group")),
        "sample": int(place) if place.isdecimal() else None,
        "prompt": str(sample.get("prompt") or ""),
        "completion": str(sample.get("completion") or ""),
        "answer": _text(sample.get("answer")),
        "reward": number(sample.get("reward")),
        "components": {
            str(k): number(v) for k, v in (parts if isinstance(parts, dict) else {}).items()
        },
        "advantage": advantage_of(training),
        "length": length if isinstance(length, int) else None,
        "stop": _text(sample.get("stop")),
        "eval": bool(sample.get("eval")),
    }


def _training(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    found = sample.get("training")
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _start(text: str) -> str:
    return text if len(text) <= TEXT else f"{text[:TEXT]}…"


def _end(text: str) -> str:
    return text if len(text) <= TEXT else f"…{text[-TEXT:]}"


def sample_page(
    record: RunRecord, line: int, wanted: SampleFilter, order: str
) -> answers.SamplePage:
    """All that is recorded of one sample, and which come before and after it in the list."""
    sample = record.samples().read(line)
    training = _training(sample)
    turns = sample.get("turns")
    return answers.SamplePage.model_validate(
        {
            **_common(line, sample),
            **_place(record, line, wanted, order),
            "training": {k: v for k, v in training.items() if k != "by_token"},
            "turns": [_turn(turn) for turn in turns if isinstance(turn, dict)]
            if isinstance(turns, list)
            else [],
            "tokens": _tokens(record.config.get("model.path"), training.get("by_token")),
        }
    )


def _place(record: RunRecord, line: int, wanted: SampleFilter, order: str) -> dict[str, Any]:
    found = record.samples().select(wanted, order)
    places = np.flatnonzero(found == line).tolist()
    at = places[0] if places else None
    return {
        "at": at,
        "total": len(found),
        "previous": int(found[at - 1]) if at else None,
        "next": int(found[at + 1]) if at is not None and at + 1 < len(found) else None,
    }


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    calls = turn.get("calls") or []
    return {
        "role": str(turn.get("role") or ""),
        "text": str(turn.get("text") or ""),
        "name": _text(turn.get("name")),
        "calls": [{"name": str(c[0]), "arguments": str(c[1])} for c in calls if len(c) == 2],
    }


def _tokens(model: str | None, recorded: Any) -> dict[str, Any] | None:
    """The table of tokens. Its numbers are those of the file."""
    if not isinstance(recorded, dict) or not isinstance(recorded.get(IDS), list):
        return None
    ids = [i for i in recorded[IDS] if isinstance(i, int)]
    fields = {
        str(name): [number(value) for value in values]
        for name, values in recorded.items()
        if name != IDS and isinstance(values, list) and len(values) == len(ids)
    }
    differences = {
        name: [_minus(a, b) for a, b in zip(fields[first], fields[second], strict=True)]
        for name, first, second in DIFFERENCES
        if first in fields and second in fields
    }
    return {
        "ids": ids,
        "pieces": token_texts(model, ids),
        "fields": fields,
        "differences": differences,
    }


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
