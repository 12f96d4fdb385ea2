"""Groups, prompts and runs beside each other: how rewards became advantages became loss, how the
answers to one prompt changed, and where runs part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reinforge.loops.parting import find_parting
from reinforge.ui import answers
from reinforge.ui.errors import NoSuchRun
from reinforge.ui.run_record import RunRecord
from reinforge.ui.sample_index import SampleFilter
from reinforge.ui.sample_pages import listed
from reinforge.ui.texts import sound
from reinforge.watch.logs import flatten, read_json
from reinforge.watch.report import first_curves
from reinforge.watch.why import explain_group, find_group, headline, overview, read_step, verdict

MOST = 500  # answers to one prompt


def group_page(record: RunRecord, step: int | None, group: str | None) -> answers.GroupPage:
    """One group as `reinforge runs why` explains it; without `group` the most informative one."""
    told = read_step(record.path, step)
    found = overview(told)
    if not found:
        raise NoSuchRun(f"step {told['step']} has no recorded groups.", where="step")
    one = find_group(told, str(found[0]["group"]) if group is None else group)
    lines = _lines_of(record, told["step"])
    explained = sound(explain_group(told, one))
    return answers.GroupPage(
        step=told["step"],
        steps=record.group_steps(),
        says=headline(told),
        verdict=verdict(told),
        groups=[answers.GroupLine(**sound(entry)) for entry in found],
        group=explained,
        lines={s["uid"]: lines[s["uid"]] for s in one["samples"] if s["uid"] in lines},
    )


def _lines_of(record: RunRecord, step: int) -> dict[str, int]:
    """The lines of samples.jsonl of a step, by uid."""
    index = record.samples()
    found = index.select(SampleFilter(step=step)).tolist()
    return {str(index.read(line).get("uid")): line for line in found[:MOST]}


def prompt_page(record: RunRecord, prompt: str) -> answers.PromptPage:
    """The recorded answers to one prompt, in the order of training."""
    index = record.samples()
    found = index.select(SampleFilter(prompt=prompt), "oldest").tolist()
    if not found:
        raise NoSuchRun(f"no sample of the row {prompt!r} was recorded.", where="prompt")
    return answers.PromptPage(
        row=prompt,
        prompt=str(index.read(found[0]).get("prompt") or ""),
        total=len(found),
        rows=[answers.SampleRow(**listed(line, index.read(line))) for line in found[:MOST]],
    )


def compare_page(
    records: Sequence[RunRecord], names: Sequence[str], points: int
) -> answers.ComparePage:
    """Curves over each other, settings that differ, and of two runs the step at which they part."""
    curves = [dict.fromkeys(record.columns.names()) for record in records]
    shared = [name for name in curves[0] if all(name in other for other in curves)]
    wanted = [name for name in names if any(name in other for other in curves)]
    chosen = wanted or first_curves(dict.fromkeys(shared))
    configs = [flatten(read_json(record.path / "config.json")) for record in records]
    keys = sorted({key for config in configs for key in config} - {"run.dir"})
    settings = [(key, [config.get(key) for config in configs]) for key in keys]
    return answers.ComparePage(
        runs=[record.name for record in records],
        names=shared,
        curves=[
            answers.ComparedCurve(
                name=name,
                evaluation=name.startswith("eval/"),
                series=[_points(record, name, points) for record in records],
            )
            for name in chosen
        ],
        config=[
            answers.ComparedSetting(key=key, values=values)
            for key, values in settings
            if any(value != values[0] for value in values)
        ],
        parting=_parting(records),
    )


def _points(record: RunRecord, name: str, points: int) -> list[Any]:
    with record.lock:
        return record.columns.points(name, points) if name in record.columns.columns else []


def _parting(records: Sequence[RunRecord]) -> answers.PartingAnswer | None:
    if len(records) != 2:
        return None
    common, found = find_parting(records[0].path, records[1].path)
    if found is None:
        return answers.PartingAnswer(compared=common, step=None, what=None, cause=None, evidence=[])
    return answers.PartingAnswer(
        compared=common,
        step=found.step,
        what=str(found.what),
        cause=found.cause,
        evidence=list(found.evidence),
    )
