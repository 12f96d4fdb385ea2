"""`reinforge plan` for a pipeline: all stages in one go, each message with its stage's name.

A stage whose model does not exist yet is checked with the model that it will come from: tokenizer,
context and architecture are the same. Rows that a stage will generate are not there to be checked,
and that is said.

The second phase, in a process that can be killed:

    python -m reinforge.pipelines.plan STAGES.json --json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reinforge.config.load import config_from_dict
from reinforge.config.pipeline import Pipeline, Reference, Stage, load_any
from reinforge.config.schema import Config
from reinforge.core.errors import InputError, ReinforgeError
from reinforge.pipelines.artefact import path_in, read_artefact
from reinforge.pipelines.run import check_finished, redone
from reinforge.plan.checks import run_checks
from reinforge.plan.options import PlanOptions
from reinforge.plan.plan import plan_run, seconds_for, worker_report
from reinforge.plan.preflight import PlanReport, preflight, tell_stage


def plan(
    config_path: Path,
    overrides: Sequence[str] = (),
    *,
    deadline: float | None = None,
    options: PlanOptions | None = None,
) -> PlanReport:
    """What is wrong with the run or pipeline that a file describes. No model is loaded for it."""
    try:
        config = load_any(Path(config_path), overrides)
    except ReinforgeError as error:
        return PlanReport(errors=[str(error)])
    if isinstance(config, Pipeline):
        return plan_pipeline(config, deadline=deadline, options=options)
    return plan_run(config, Path(config_path), overrides, deadline=deadline, options=options)


def plan_pipeline(
    pipeline: Pipeline, *, deadline: float | None = None, options: PlanOptions | None = None
) -> PlanReport:
    """All phases of all stages. The second and third are done only if the first found nothing
    wrong.
    """
    options = options or PlanOptions()
    report, ready = first_phase(pipeline)
    if report.ok and ready:
        with tempfile.TemporaryDirectory(prefix="reinforge-plan-") as folder:
            path = Path(folder) / "stages.json"
            path.write_text(
                json.dumps(
                    [
                        {"stage": name, "config": config.model_dump(mode="json")}
                        for name, config in ready
                    ]
                )
            )
            found = worker_report(
                path,
                (),
                seconds_for(options, deadline) * len(ready),
                module="reinforge.pipelines.plan",
                options=options,
            )
        for stage in report.summary["stages"]:
            stage.update(found["summary"].get(stage["stage"], {}))
        report.errors += found["errors"]
        report.warnings += found["warnings"]
    return report


def first_phase(
    pipeline: Pipeline, force: Sequence[str] = ()
) -> tuple[PlanReport, list[tuple[str, Config]]]:
    """What can be told without torch, and the stages whose rows and rewards can be looked at, as
    configurations.
    """
    report = PlanReport(summary={"run_dir": str(pipeline.dir), "stages": []})
    again = redone(pipeline, force)
    ready: list[tuple[str, Config]] = []
    for stage in pipeline.stages:
        try:
            config, missing = stand_in(pipeline, stage)
        except InputError as error:
            report.errors.append(
                f"stage {stage.name}: {error.what if error.where == stage.where else error}"
            )
            continue
        summary: dict[str, Any] = {
            "stage": stage.name,
            "kind": stage.kind,
            "run_dir": str(stage.dir),
        }
        if config is not None:
            found = preflight(
                _elsewhere(config) if stage.name in again or read_artefact(stage.dir) else config
            )
            gone = tuple(f"{reference.key}:" for reference in missing)
            report.errors += [
                f"stage {stage.name}: {e}"
                for e in found.errors
                if not e.startswith(gone or ("\0",))
            ]
            # the stage's own files
            report.warnings += [
                f"stage {stage.name}: {w}" for w in found.warnings if not w.startswith("run.dir:")
            ]
            summary = {**(found.summary if stage.kind == "train" else {}), **summary}
            if any(reference.place[0] == "data" for reference in missing):
                report.warnings.append(
                    f"stage {stage.name}: its rows are made by an earlier stage and could not be"
                    " checked yet."
                )
            elif stage.kind != "generate":
                ready.append((stage.name, config))
        report.summary["stages"].append({**summary, "from": ", ".join(stage.parents) or None})
    if report.ok:
        try:
            states = check_finished(pipeline, again)
        except ReinforgeError as error:
            report.errors.append(str(error))
        else:
            for line in report.summary["stages"]:
                line["state"] = states[line["stage"]]
    return report, ready


def _elsewhere(config: Config) -> Config:
    """As if nothing were there yet: what a finished stage was made of is compared by its artefact,
    and a forced one steps aside.
    """
    return config.model_copy(
        update={"run": config.run.model_copy(update={"dir": f"{config.run.dir}.new"})}
    )


def stand_in(pipeline: Pipeline, stage: Stage) -> tuple[Config | None, list[Reference]]:
    """The stage's configuration, with what is not there yet replaced by what it will be made from;
    and which that is.
    """
    # their sections are read, so they are checked
    assert all(section is not None for section in (stage.export, stage.generate))
    missing = [r for r in stage.references if not path_in(pipeline, r, stage.where).exists()]
    if stage.kind == "export":
        if pipeline[stage.references[0].stage].kind != "train":
            raise InputError("model: only a training stage can be exported.", where=stage.where)
        return None, missing
    return stage.config(lambda reference: _likely(pipeline, stage, reference)), missing


def _likely(pipeline: Pipeline, stage: Stage, reference: Reference) -> str:
    """Where a reference points, or, while that does not exist, the first model of its line."""
    path = path_in(pipeline, reference, stage.where)
    if path.exists() or reference.place[0] != "model":
        return str(path)
    parent = pipeline[reference.stage]
    if parent.kind == "export":
        parent = pipeline[parent.references[0].stage]
    before = next((r for r in parent.references if r.key == "model.path"), None)
    return (
        _likely(pipeline, parent, before)
        if before
        else str(parent.settings.get("model", {}).get("path"))
    )


def describe_pipeline(report: PlanReport) -> list[dict[str, Any]]:
    """The summary as table rows for people."""
    rows = []
    for stage in report.summary.get("stages", ()):
        counted = (
            f"{stage['rows']['train']:,} + {stage['rows']['eval']:,}" if "rows" in stage else None
        )
        rows.append(
            {
                "stage": stage["stage"],
                "kind": stage["kind"],
                "state": stage.get("state"),
                "from": stage["from"],
                "algorithm": stage.get("algorithm"),
                "steps": stage.get("steps"),
                "rows": counted,
                "directory": stage["run_dir"],
            }
        )
    return rows


def run_stage_checks(stages: Sequence[dict[str, Any]], options: PlanOptions) -> PlanReport:
    """Phases 2 and 3 of each stage, its name in front of every message."""
    total = PlanReport()
    for item in stages:
        name = item["stage"]
        tell_stage(f"checking the stage {name}")
        found = run_checks(config_from_dict(item["config"], where=f"stage {name}"), options)
        total.errors += [f"stage {name}: {error}" for error in found.errors]
        total.warnings += [f"stage {name}: {warning}" for warning in found.warnings]
        total.summary[name] = found.summary
    return total


def main(argv: list[str]) -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints from now on goes to standard error
    report = run_stage_checks(json.loads(Path(argv[0]).read_text()), PlanOptions.of(argv))
    output.write(json.dumps(report.as_dict()))
    output.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread or pool that a reward left behind must not keep the process
    os._exit(0 if report.ok else 2)


if __name__ == "__main__":
    main(sys.argv[1:])
