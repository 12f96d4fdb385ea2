"""Records the reference trajectory on this machine: tests/data/trajectory.

    python tools/record_trajectory.py          # this kind of CPU beside those that are there
    python tools/record_trajectory.py --new    # anew: what a run computes has changed on purpose

The digests of a kind of CPU are exact there. The rollouts and the numbers are those of the machine
that recorded it anew; others are held to them within a tolerance.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from helpers import trajectory  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", action="store_true")
    new = parser.parse_args().new
    with tempfile.TemporaryDirectory() as name:
        steps = trajectory.run_trajectory(Path(name))
        if new:
            shutil.rmtree(trajectory.STORED, ignore_errors=True)
            shutil.copytree(Path(name) / "run" / "rollouts", trajectory.STORED / "rollouts")
            rewards = json.loads((Path(name) / "run" / "config.json").read_text())["rewards"]
            (trajectory.STORED / "config.json").write_text(json.dumps({"rewards": rewards}) + "\n")
    numbers = [{k: v for k, v in s.items() if k not in trajectory.DIGESTS} for s in steps]
    digests = [{k: s[k] for k in trajectory.DIGESTS} for s in steps]
    record = {"numbers": numbers, "digests": {}} if new else trajectory.stored()
    record["digests"][trajectory.cpu_kind()] = digests
    trajectory.RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{trajectory.cpu_kind()}: {len(steps)} steps in {trajectory.RECORD}")


if __name__ == "__main__":
    main()
