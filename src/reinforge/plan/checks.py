"""Phases 2 and 3 of `plan`: reads the data, renders prompts and runs the rewards; deep.py is the
third.

Runs as a process of its own that can be killed. The checks themselves are in data_checks.py, which
is imported when it is known whether a hub answers.

    python -m reinforge.plan.checks CONFIG [key=value...] [--deep] [--gpu=NAME] --json

Standard output holds the report and nothing else; what libraries and rewards print goes to standard
error, and so do the lines `stage: ...` that tell what was going on when the deadline came.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from reinforge.config.load import load_config
from reinforge.config.schema import Config
from reinforge.core.errors import ReinforgeError
from reinforge.data.readers import kind_of
from reinforge.data.sources import MIXTURE, PYTHON
from reinforge.plan.hub import go_offline_if_unreachable, not_here
from reinforge.plan.options import PlanOptions
from reinforge.plan.preflight import IMPORTING, PlanReport, tell_stage
from reinforge.watch.runs import checkpoints, steps_begun


def run_checks(config: Config, options: PlanOptions | None = None) -> PlanReport:
    """Everything that needs the rows, the tokenizer and the rewards, but no weights; with
    `options.deep` the third phase too.
    """
    options = options or PlanOptions()
    report = PlanReport()
    offline = go_offline_if_unreachable(config)
    if offline:
        report.warn("hub", f"{offline}; only what is already cached on this machine can be used.")
    missing = not_here(config)
    report.errors += missing
    try:
        _check_resume(config, report)
        _import(config, tokenizer=not missing)
        from reinforge.plan.data_checks import check_data

        check_data(config, report, options, models=not missing)
    except ReinforgeError as error:
        report.errors.append(str(error))
    return report


def _check_resume(config: Config, report: PlanReport) -> None:
    """A run that was begun and has nothing to go on from, or nothing to do. The run itself says so
    too.
    """
    folder = Path(config.run.dir)
    begun = steps_begun(folder)
    done = max((checkpoint["step"] for checkpoint in checkpoints(folder)), default=None)
    asked = config.train.steps
    if done is None and begun is not None:
        report.warn(
            "run.dir",
            f"{folder} has no checkpoint to continue from.",
            f"The run begins again, and the {begun} steps that it had done are lost.",
        )
    elif done is not None and asked is not None and done > asked:
        report.warn(
            "train.steps",
            f"the run in {folder} has done {done} steps already, and {asked} are asked for: nothing"
            " would be done.",
            f"Ask for more than {done}, or use another run.dir for a run of {asked} steps.",
        )


def _import(config: Config, *, tokenizer: bool) -> None:
    """The large libraries that the checks will need, one after the other: their seconds are not
    those of the checks.
    """
    data = config.data
    sources = [data.source, data.eval.source, *(item.source for item in data.mixture)]
    kinds = {kind_of(source) for source in sources if source not in (None, MIXTURE, PYTHON)}
    brought = {"reasoning_gym": "reasoning_gym", "hub": "datasets"}
    modules = ["torch", *(["transformers.models.auto.tokenization_auto"] if tokenizer else [])]
    modules += [brought[kind] for kind in sorted(kinds & brought.keys())]
    for module in modules:
        tell_stage(f"{IMPORTING} {module.partition('.')[0]}")
        with suppress(ImportError):  # whoever needs it will say so
            import_module(module)


def main(argv: list[str]) -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints from now on goes to standard error
    config, *overrides = (arg for arg in argv if not arg.startswith("--"))
    report = run_checks(load_config(Path(config), overrides), PlanOptions.of(argv))
    if "--json" in argv:
        output.write(json.dumps(report.as_dict()))
    else:
        output.write("".join(f"{line}\n" for line in (*report.errors, *report.warnings)))
    output.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread or pool that a reward left behind must not keep the process
    os._exit(0 if report.ok else 2)


if __name__ == "__main__":
    main(sys.argv[1:])
