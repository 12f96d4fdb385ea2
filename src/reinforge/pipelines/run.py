"""Runs the stages of a pipeline one after the other, each to its artefact.

The same command goes on wherever it was cut.

A finished stage whose inputs are as they were is not run again. One whose inputs changed is an
error before anything runs, unless it is forced: then the old one is set aside (`previous/`), and so
are those after it that it changes.
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from reinforge.checkpoint.crash_points import crash_point
from reinforge.checkpoint.lock import RunLock
from reinforge.config.pipeline import Pipeline, Reference, Stage
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.pipelines.artefact import (
    Artefact,
    differences,
    hash_of,
    inputs_of,
    path_in,
    read_artefact,
    read_started,
    replace_json,
    weights_of,
    write_started,
)
from reinforge.watch.pipeline import RECORD, stages_of, write_pipeline_report

SHOWN = ("eval/accuracy", "eval/loss", "eval/reward", "reward/mean", "train/loss", "rows")


@dataclass
class PipelineResult:
    """What `run_pipeline` returns about a pipeline that has ended."""

    run_dir: Path
    artefacts: dict[str, Artefact]
    ran: list[str] = field(default_factory=list)  # the stages that were not finished before
    report: Path | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The headline numbers of every stage: `grpo/eval/accuracy`."""
        return {
            f"{name}/{key}": value
            for name, made in self.artefacts.items()
            for key, value in made.metrics.items()
            if key in SHOWN
        }


def run_pipeline(pipeline: Pipeline, force: Sequence[str] = ()) -> PipelineResult:
    """Every stage to its artefact, in order; then one report."""
    redo = redone(pipeline, force)
    check_finished(pipeline, redo)
    with RunLock(pipeline.dir):
        _record(pipeline)
        done: dict[str, Artefact] = {}
        result = PipelineResult(pipeline.dir, done)
        for stage in pipeline.stages:
            done[stage.name], ran = _stage(
                pipeline, stage, done, stage.name in force, stage.name in redo
            )
            result.ran += [stage.name] if ran else []
            result.report = write_pipeline_report(pipeline.dir)
    return result


def redone(pipeline: Pipeline, force: Sequence[str]) -> set[str]:
    """The forced stages and all that take something from them."""
    unknown = [name for name in force if name not in {stage.name for stage in pipeline.stages}]
    if unknown:
        raise InputError(
            f"there is no stage {unknown[0]!r}.",
            where="--force-stage",
            fix=f"There are: {', '.join(s.name for s in pipeline.stages)}.",
        )
    found = set(force)
    for stage in pipeline.stages:
        if found & set(stage.parents):
            found.add(stage.name)
    return found


def resolved(pipeline: Pipeline, stage: Stage) -> Config | None:
    """The stage's configuration with the paths of what it takes from others. An export has none."""
    for reference in stage.references:
        path_in(pipeline, reference, stage.where)  # of the right kind
    return (
        None
        if stage.kind == "export"
        else stage.config(lambda reference: str(path_in(pipeline, reference, stage.where)))
    )


def check_finished(
    pipeline: Pipeline, redo: set[str] | frozenset[str] = frozenset()
) -> dict[str, str]:
    """What is done already, by stage: finished, unfinished, or missing.

    Raises if a finished one was made of something else.
    """
    done: dict[str, Artefact] = {}
    states: dict[str, str] = {}
    for stage in pipeline.stages:
        config = resolved(pipeline, stage)
        artefact = read_artefact(stage.dir)
        states[stage.name] = (
            "finished" if artefact else "unfinished" if read_started(stage) else "missing"
        )
        if (
            artefact is None
            or stage.name in redo
            or not all(parent in done for parent in stage.parents)
        ):
            continue
        _compare(
            stage,
            artefact.inputs,
            inputs_of(stage, config, {p: done[p].id for p in stage.parents}),
            "is finished, and was made of something else",
        )
        done[stage.name] = artefact
    return states


def _compare(stage: Stage, old: Mapping[str, Any], new: Mapping[str, Any], what: str) -> None:
    changed = differences(old, new)
    if changed:
        raise InputError(
            f"the stage {stage.name} in {stage.dir} {what}: {'; '.join(changed)}.",
            where=stage.where,
            fix=(
                "Restore that, use another run.dir, or run it again with --force-stage"
                f" {stage.name}."
            ),
        )


def _stage(
    pipeline: Pipeline, stage: Stage, done: Mapping[str, Artefact], forced: bool, redo: bool
) -> tuple[Artefact, bool]:
    """The stage's artefact, and whether anything had to be done for it."""
    config = resolved(pipeline, stage)
    inputs = inputs_of(stage, config, {name: done[name].id for name in stage.parents})
    artefact = read_artefact(stage.dir)
    started = read_started(stage)
    head = f"[{stage.number}/{len(pipeline.stages)}] {stage.name} ({stage.kind})"
    changed = (
        differences(artefact.inputs if artefact else started, inputs) if artefact or started else []
    )
    if (artefact and forced) or (redo and changed):
        print(f"{head}: the old one is now in {_set_aside(pipeline, stage)}")
        artefact = None
        started = {}
    if artefact is not None:
        _compare(stage, artefact.inputs, inputs, "is finished, and was made of something else")
        print(f"{head}: finished before, nothing to do")
        return artefact, False
    # which settings may change on its way, a run says itself; the other kinds start afresh
    if started and stage.kind == "train":
        _compare(
            stage,
            started,
            {**inputs, "settings": started["settings"]},
            "is in the middle, and was begun with something else",
        )
    for reference in stage.references:
        _verify(pipeline, stage, reference, done[reference.stage])
    print(f"{head}: {'goes on' if started else 'starts'} in {stage.dir}")
    stage.dir.mkdir(parents=True, exist_ok=True)
    write_started(stage, inputs)
    again = bool(started) and started["settings"].get("export.out") == inputs["settings"].get(
        "export.out"
    )
    return _run(pipeline, stage, config, inputs, again=again), True


def _run(
    pipeline: Pipeline, stage: Stage, config: Config | None, inputs: dict[str, Any], *, again: bool
) -> Artefact:
    from reinforge.pipelines import stages

    began = time.monotonic()
    wall = time.time()
    history = lineage(pipeline, stage)
    if stage.kind == "export":
        made = stages.export_stage(
            stage,
            pipeline[stage.references[0].stage],
            lineage(pipeline, pipeline[stage.references[0].stage]),
            again,
        )
    else:
        assert config is not None
        work = {
            "train": lambda: stages.train_stage(stage, config, history),
            "eval": lambda: stages.eval_stage(stage, config),
            "generate": lambda: stages.generate_stage(stage, config),
        }
        made = work[stage.kind]()
    crash_point("stage:end")
    hashes = {"config": hash_of(inputs["settings"]), **made.hashes}
    artefact = Artefact(
        stage.name,
        stage.kind,
        made.what,
        made.paths,
        made.id,
        inputs,
        hashes,
        inputs["parents"],
        made.metrics,
        {
            "started": wall,
            "finished": time.time(),
            "seconds": time.monotonic() - began,
            **made.machine,
        },
    )
    artefact.write(stage.dir)
    _free()
    return artefact


def _free() -> None:
    """Gives a stage's memory back before the next one measures what there is."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _verify(pipeline: Pipeline, stage: Stage, reference: Reference, parent: Artefact) -> None:
    """A parent's files are those that it made."""
    path = path_in(pipeline, reference, stage.where)
    if not path.exists():
        raise InputError(
            f"{path}, which the stage {parent.stage} made, is gone.",
            where=f"{stage.where}, {reference.key}",
            fix=f"Bring it back, or make it again with --force-stage {parent.stage}.",
        )
    if path.is_dir() and "weights" in parent.hashes and path.name != "adapter":
        found = weights_of(path)
        if any(found[name] != parent.hashes[name] for name in found):
            raise InputError(
                f"{path} is not what the stage {parent.stage} made: its files were changed.",
                where=f"{stage.where}, {reference.key}",
                fix=f"Restore them, or make them again with --force-stage {parent.stage}.",
            )


def _set_aside(pipeline: Pipeline, stage: Stage) -> Path:
    """Moves a stage's directory away; nothing is deleted."""
    target = next(
        path
        for n in count(1)
        if not (path := pipeline.dir / "previous" / f"{stage.dir.name}-{n}").exists()
    )
    target.parent.mkdir(exist_ok=True)
    os.rename(stage.dir, target)
    return target


def lineage(pipeline: Pipeline, stage: Stage) -> list[str]:
    """The stages that a stage's own model went through, oldest first, it included."""
    before = next((r.stage for r in stage.references if r.place[0] == "model"), None)
    model = stage.settings.get("model", {}).get("path")
    what = (stage.settings.get("algorithm") or {}).get("name", stage.kind)
    own = f"`{stage.name}`: {what} from " + (f"the stage `{before}`" if before else f"`{model}`")
    return [*(lineage(pipeline, pipeline[before]) if before else []), own]


def _record(pipeline: Pipeline) -> None:
    """pipeline.json: which stages there are and where, so that reports and digests need no
    configuration.
    """
    stages = [
        {
            "name": s.name,
            "kind": s.kind,
            "dir": s.dir.name,
            "from": {r.key: r.stage for r in s.references},
        }
        for s in pipeline.stages
    ]
    replace_json(
        pipeline.dir / RECORD, {"seed": pipeline.seed, "source": pipeline.source, "stages": stages}
    )


def digest_pipeline(folder: Path) -> dict[str, str]:
    """A hash per stage, of everything that does not depend on the clock: artefact and, of training,
    the last checkpoint. Unfinished: "-".
    """
    from reinforge.checkpoint.store import digest_run

    found = {}
    for stage in stages_of(folder):
        artefact = read_artefact(folder / stage["dir"])
        if artefact is None:
            found[stage["name"]] = "-"
            continue
        plain = [
            artefact.kind,
            artefact.what,
            artefact.id,
            artefact.parents,
            artefact.hashes,
            artefact.metrics,
        ]
        trained = digest_run(folder / stage["dir"]) if artefact.kind == "train" else ""
        found[stage["name"]] = hash_of([plain, trained])
    return found


def whole_digest(stages: Mapping[str, str]) -> str:
    return hashlib.sha256(
        "\n".join(f"{name} {value}" for name, value in stages.items()).encode()
    ).hexdigest()
