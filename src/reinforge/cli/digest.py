"""The command `runs digest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reinforge.pipelines.run import digest_pipeline, whole_digest
from reinforge.watch.pipeline import RECORD


def digest(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories.")],
) -> None:
    """Print one hash of all that a run's newest checkpoint holds.

    Equal digests mean bit-identical runs. Of several runs: a line for each,
    and whether they are equal; exit code 1 where they are not.

    Of a pipeline: a line per stage, and on the last line the hash of them all.

    [bold]Examples[/bold]

      reinforge runs digest runs/chain-sum

      reinforge runs digest runs/a runs/b
    """
    if len(runs) == 1:
        stages, whole = _digest(runs[0])
        for name, value in stages.items():
            print(f"{value}  {name}")
        print(whole)
        return
    found = {run: _digest(run)[1] for run in runs}
    for run, value in found.items():
        print(f"{value}  {run}")
    if len(set(found.values())) > 1:
        print("different")
        raise typer.Exit(1)
    print("equal: bit-identical")


def _digest(run: Path) -> tuple[dict[str, str], str]:
    """Of each stage, where it is a pipeline, and of the whole."""
    if (run / RECORD).is_file():
        stages = digest_pipeline(run)
        return stages, whole_digest(stages)
    from reinforge.checkpoint.store import digest_run

    return {}, digest_run(run)
