"""Random steps of five kinds of run are done again: are they equal, bit for bit?

    python benchmarks/replay.py [--replays 100] [--steps 60] [--out benchmarks/results/replay.json]

Every run has the default retention (a checkpoint every 50 steps, two are kept), so most steps are
done again from the model itself and some from a checkpoint. A replay is equal when all its steps
have the rows, tokens, log-probs, rewards, gradient norms and weights that the run recorded, and the
checkpoint of the step, where the run has one, the same tensors. Exits with 1 unless all are.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from helpers.cli_runs import make_model  # noqa: E402
from helpers.replayed_runs import KINDS, replayed_config  # noqa: E402
from reinforge.build.replay import plan_replay, replay  # noqa: E402
from reinforge.build.run import train_config  # noqa: E402
from reinforge.loops.view import NoView  # noqa: E402


def measure(kind: str, folder: Path, steps: int, chosen: list[int]) -> dict[str, Any]:
    """One run of the kind, and replays of the chosen steps."""
    config = replayed_config(kind, folder / "tiny", folder / kind, steps)
    began = time.monotonic()
    train_config(config, view=NoView())
    found: dict[str, Any] = {"seconds_of_the_run": time.monotonic() - began, "replays": []}
    anchors = (folder / kind / "anchors.jsonl").stat().st_size
    found["anchor_bytes_per_step"] = anchors / steps
    for step in chosen:
        plan = plan_replay(folder / kind, step)
        began = time.monotonic()
        result = replay(plan)
        found["replays"].append(
            {
                "step": step,
                "from": plan.begin,
                "compared": result.compared,
                "equal": result.equal,
                "weights": result.anchor["weights"],
                "checkpoint": None if result.state is None else result.state[1],
                "parted": None if result.parted is None else str(result.parted),
                "seconds_then": plan.seconds,
                "seconds": time.monotonic() - began,
            }
        )
        print(f"{kind} step {step} from {plan.begin}: {result.equal} {result.parted or ''}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/replay.json")
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    each = asked.replays // len(KINDS)
    runs = {}
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        for kind in KINDS:
            chosen = sorted(rng.choices(range(1, asked.steps + 1), k=each))
            runs[kind] = measure(kind, Path(name), asked.steps, chosen)
    equal = sum(one["equal"] is True for run in runs.values() for one in run["replays"])
    asked.out.write_text(
        json.dumps(
            {
                "machine": platform.machine(),
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "steps": asked.steps,
                "replays": each * len(KINDS),
                "equal": equal,
                "steps_done_again": sum(
                    one["compared"] for run in runs.values() for one in run["replays"]
                ),
                "runs": runs,
            },
            indent=1,
        )
    )
    print(f"{equal} of {each * len(KINDS)} equal; {asked.out}")
    if equal < each * len(KINDS):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
