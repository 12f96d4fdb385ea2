"""Kill a pipeline with -9 in several of its stages, go on each time with the same command, and see
whether it comes out bit-identical.

    python benchmarks/kill_pipeline.py [recipes/pipeline.yaml] [--kills sft:150 ppo:55] [--out FILE]
                                       [--overrides KEY=VALUE ...]

Both runs are `python -m reinforge train PIPELINE`, as a user starts it, each in a directory of its
own with the same tiny model. The first is left alone. The second is killed as soon as the log of
the named stage has the named step, and started again, until it has been killed at every place; then
it may end. Printed are `reinforge runs digest` of both (a hash of every stage: weights, optimizer,
data order, metrics, parents), and the lineage that the report tells. Exits with 1 unless all
digests are equal.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from kill_resume import last_step  # noqa: E402

from helpers import cli_runs  # noqa: E402
from reinforge.pipelines.run import digest_pipeline, whole_digest  # noqa: E402
from reinforge.watch.pipeline import stages_of  # noqa: E402

DIR = "runs/pipeline"
HOUR = 3600.0


def stage_dir(folder: Path, name: str) -> Path | None:
    return next(iter(sorted((folder / DIR).glob(f"[0-9][0-9]-{name}"))), None)


def reached(folder: Path, name: str, step: int) -> bool:
    time.sleep(0.1)  # it is asked again and again, beside the run that it watches
    where = stage_dir(folder, name)
    return where is not None and last_step(where) >= step


def finish(command: list[str], folder: Path) -> float:
    process = cli_runs.start(command, folder)
    if process.wait(HOUR) != 0:
        raise SystemExit(f"the pipeline failed:\n{process.output()[-3000:]}")
    return time.monotonic() - process.began


def killed_at(command: list[str], folder: Path, stage: str, step: int) -> str:
    """Starts the pipeline and kills it once the stage has logged the step: says where that was."""
    process = cli_runs.start(command, folder)
    if not process.until(lambda: reached(folder, stage, step), HOUR):
        raise SystemExit(f"it ended before step {step} of {stage}:\n{process.output()[-3000:]}")
    assert process.kill() == -signal.SIGKILL
    where = stage_dir(folder, stage)
    assert where is not None
    saved = (
        sorted(path.name for path in (where / "checkpoints").iterdir())
        if (where / "checkpoints").exists()
        else []
    )
    return (
        f"stage {stage}, step {last_step(where)}, newest checkpoint"
        f" {saved[-1] if saved else 'none'}"
    )


def lineage(folder: Path) -> list[str]:
    """The rows of the report's table of lineage, as text."""
    page = (folder / DIR / "report.html").read_text()
    table = page.split("<h2>Lineage</h2>")[1].split("</table>")[0]
    rows = [
        [
            html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()
            for cell in re.split(r"<t[dh][^>]*>", row)[1:]
        ]
        for row in table.split("<tr>")[1:]
    ]
    return [" | ".join(cells) for cells in rows]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pipeline", type=Path, nargs="?", default=ROOT / "recipes" / "pipeline.yaml"
    )
    parser.add_argument("--kills", nargs="+", default=["sft:150", "ppo:55"], metavar="STAGE:STEP")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kills = [(stage, int(step)) for stage, _, step in (kill.partition(":") for kill in args.kills)]
    with tempfile.TemporaryDirectory(prefix="kill-pipeline-") as name:
        whole = Path(name) / "whole"
        killed = Path(name) / "killed"
        whole.mkdir()
        if cli_runs.start(["tiny", "runs/tiny"], whole).wait() != 0:
            raise SystemExit("no tiny model could be made")
        shutil.copytree(whole, killed)
        command = ["train", str(args.pipeline.resolve()), *args.overrides]
        places = [killed_at(command, killed, stage, step) for stage, step in kills]
        for place in places:
            print(f"killed with -9 at {place}", flush=True)
        seconds = {
            "after the last kill": finish(command, killed),
            "undisturbed": finish(command, whole),
        }
        found = digest_pipeline(killed / DIR)
        expected = digest_pipeline(whole / DIR)
        print("stage      killed            undisturbed")
        for stage in stages_of(whole / DIR):
            own = found[stage["name"]]
            other = expected[stage["name"]]
            print(
                f"{stage['name']:10s} {own[:16]}  {other[:16]} "
                f" {'equal' if own == other else 'DIFFERENT'}"
            )
        digests = whole_digest(found), whole_digest(expected)
        print(
            f"all        {digests[0]}\n           {digests[1]} "
            f" {'equal' if digests[0] == digests[1] else 'DIFFERENT'}"
        )
        print("\nlineage in report.html of the killed one:", *lineage(killed), sep="\n  ")
        print("\n" + ", ".join(f"{what}: {s:.0f} s" for what, s in seconds.items()))
        result: dict[str, Any] = {
            "kills": places,
            "seconds": seconds,
            "killed": found,
            "undisturbed": expected,
            "digests": digests,
            "lineage": lineage(killed),
            "same_lineage": lineage(killed) == lineage(whole),
        }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    return int(digests[0] != digests[1] or "-" in found.values() or not result["same_lineage"])


if __name__ == "__main__":
    sys.exit(main())
