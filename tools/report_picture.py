"""docs/plots/report.png: the report of the demo's GRPO run, as Chromium shows it.

`python tools/report_picture.py runs/demo/grpo [PNG]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from chromium import Chromium

from reinforge.watch.report import write_report

# the status, the curves and where the time went
WIDTH = 1200
HEIGHT = 1425
TARGET = Path(__file__).resolve().parents[1] / "docs" / "plots" / "report.png"


def main(run: Path, target: Path = TARGET) -> None:
    report = write_report(run)
    with Chromium(WIDTH) as page:
        page.open(report)
        drawn = page.evaluate("document.querySelectorAll('#curves path.smooth[d^=M]').length")
        assert not page.errors and drawn, f"{report}: {drawn} curves, {page.errors}"
        picture = page.picture(HEIGHT)
    target.write_bytes(picture)
    print(f"{target}: {len(picture) / 1000:.0f} kB, {drawn} curves")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
