"""docs/plots/ui_*.png: the pages of the web app over a folder of runs, as Chromium shows them.

`python tools/ui_pictures.py RUNS RUN SICK [FOLDER]`: RUN is a GRPO run of it with
run.log.tokens=all, SICK one that the doctor has found something in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from chromium import Chromium

TARGET = Path(__file__).resolve().parents[1] / "docs" / "plots"
DESKTOP = 1280
PHONE = 390
CLICK = "[...document.querySelectorAll('button')].find(one => one.textContent === '{}').click()"
TYPE = """(() => {{
  const it = document.querySelector('.ask textarea');
  it.value = '{}';
  it.dispatchEvent(new Event('input', {{ bubbles: true }}));
}})()"""
# what is done on a page before its picture is taken, and what must be there then
ACTS = {
    "data": ([CLICK.format("Show the rows")], ".rows li"),
    "chat": (
        [
            TYPE.format("5+3+2+9="),
            "new Promise(done => setTimeout(done, 300))",
            CLICK.format("Send"),
        ],
        ".answer",
    ),
}
OPEN = "for (const one of document.querySelectorAll('.answer > details')) one.open = true"
SECONDS = 300.0  # for a model to be loaded


def pages(address: str, run: str, sick: str) -> list[tuple[str, str, str, int, int]]:
    """(name, page, what must be there, width, height) of each picture."""
    with urllib.request.urlopen(f"{address}api/samples?run={run}&order=-advantage&size=1") as reply:
        line = json.load(reply)["rows"][0]["line"]
    return [
        ("runs", "#/", ".runs .spark", DESKTOP, 640),
        ("run", f"#/run?run={run}", ".question svg .smooth", DESKTOP, 1180),
        ("finding", f"#/run?run={sick}", ".finding.bad", DESKTOP, 470),
        ("compare", f"#/compare?run={run}&run={sick}", ".chart svg .smooth", DESKTOP, 1000),
        ("samples", f"#/samples?run={run}&order=-reward", ".samples tbody tr", DESKTOP, 620),
        ("sample", f"#/sample?run={run}&line={line}", ".piece", DESKTOP, 980),
        ("launch", "#/launch?recipe=chain_sum", ".plan .fine", DESKTOP, 900),
        ("data", f"#/data?run={run}", ".field", DESKTOP, 560),
        ("chat", f"#/chat?run={run}&run={sick}", ".ask", DESKTOP, 760),
        ("phone", f"#/run?run={run}", ".question svg .smooth", PHONE, 1180),
    ]


def main(runs: Path, run: str, sick: str, target: Path = TARGET) -> None:
    command = [sys.executable, "-m", "reinforge", "ui", str(runs), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as app:
        try:
            assert app.stdout is not None
            address = app.stdout.readline().rpartition(": ")[2].split()[0]
            for dark in (False, True):
                with Chromium(DESKTOP, dark=dark) as page:
                    for name, where, wanted, width, height in pages(address, run, sick):
                        page.resize(width)
                        page.open("about:blank")
                        page.open(address + where)
                        page.wait_for(f"document.querySelector({json.dumps(wanted)}) !== null")
                        page.wait_for("document.querySelector('.loading') === null")
                        acts, after = ACTS.get(name, ([], wanted))
                        for act in acts:
                            page.evaluate(act)
                        there = f"document.querySelector({json.dumps(after)}) !== null"
                        page.wait_for(there, SECONDS)
                        page.evaluate(OPEN)
                        file = target / f"ui_{name}{'_dark' if dark else ''}.png"
                        file.write_bytes(page.picture(height))
                        assert not page.errors, f"{where}: {page.errors}"
                        print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
        finally:
            app.terminate()


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0]), given[1], given[2], *map(Path, given[3:]))
