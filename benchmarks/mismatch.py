"""Runs whose engine differs from the trainer in one thing: is it named?

    python benchmarks/mismatch.py [--seeds 3] [--folder runs/mismatch]

Every run is made with a difference planted into its engine (tests/helpers/planted_engines.py), or
with a setting that makes one, and judged as `reinforge runs mismatch` does. Prints a table, and
exits with 1 unless every difference is named and nothing is named where there is none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from helpers.mismatched_runs import RUNS, judged, make_models, mismatched_run  # noqa: E402
from reinforge.build.mismatch import MismatchReport  # noqa: E402

HEAD = "| planted | named | runs | nats per token | explained |\n|---|---|---|---|---|"


def judge(kind: str, folder: Path, seed: int) -> MismatchReport:
    """One run of the kind, and what is said of it."""
    run_dir = folder / f"{kind.replace(' ', '-')}-{seed}"
    mismatched_run(kind, folder, run_dir, run={"seed": seed})
    return judged(kind, run_dir)


def named(found: MismatchReport) -> str:
    return found.causes[0].name if found.causes else "nothing"


def line(kind: str, reports: list[MismatchReport]) -> str:
    """Of the table."""
    names = Counter(named(found) for found in reports)
    apart = [found.overall for found in reports]
    explained = [found.causes[0].explained for found in reports if found.causes]
    cells = [
        RUNS[kind].told,
        ", ".join(names),
        ", ".join(f"{count} of {len(reports)}" for count in names.values()),
        f"{min(apart):.2g} to {max(apart):.2g}",
        f"{min(explained):.1%} or more" if explained else "-",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="Runs of each.")
    parser.add_argument("--folder", type=Path, help="Keeps the runs there.")
    parser.add_argument("--only", nargs="*", choices=list(RUNS), help="Some of them.")
    asked = parser.parse_args()
    right = total = 0
    with tempfile.TemporaryDirectory() as name:
        folder = asked.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        make_models(folder)
        print(HEAD)
        for kind in asked.only or RUNS:
            reports = [judge(kind, folder, seed) for seed in range(asked.seeds)]
            right += sum(named(found) == (RUNS[kind].cause or "nothing") for found in reports)
            total += len(reports)
            print(line(kind, reports), flush=True)
    print(f"\n{right} of {total} named as they should be")
    if right < total:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
