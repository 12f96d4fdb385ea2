"""Small models of several architectures learn by GRPO to add, on a CPU.

    python benchmarks/learn_architectures.py --architectures qwen3_5 gpt_oss --seeds 0 1 2
                                             [--out results/learn_architectures.json]
                                             [--plot docs/plots/learn_architectures.svg]

Each is made by `reinforge tiny --architecture NAME`: from random numbers, by SFT on sums of three
numbers, of which two in five are wrong. Then `reinforge train recipe:algorithms/grpo` lets it try
for itself. `--demo`: `reinforge demo --architecture NAME` instead, larger models and sums of four
to six numbers, most of an hour each. Results are added to `--out` as they come, and what is there
is not run again. Exits with 1 unless every run ends significantly above where it began.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from plots import Point, lines  # noqa: E402

from reinforge.watch.runs import read_lines  # noqa: E402

WINDOW = 15  # steps of GRPO whose rewards are one point of a curve
SETTINGS = ("train.steps=300", "train.learning_rate=1e-3", "eval.every=20")


def run(architecture: str, seed: int, folder: Path, *, demo: bool) -> dict[str, Any]:
    """Teaches and trains one model."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = ["--architecture", architecture, "--seed", str(seed)]
    if demo:
        _command(folder, "demo", *chosen, "--dir", folder)
    else:
        _command(folder, "tiny", folder / "model", *chosen)
        paths = (f"model.path={folder / 'model'}", f"run.dir={folder / 'grpo'}")
        _command(folder, "train", "recipe:algorithms/grpo", *paths, f"run.seed={seed}", *SETTINGS)
    return measured(architecture, seed, folder, time.monotonic() - began)


def measured(architecture: str, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Of a run that is done: held-out accuracy before and after, the rewards of its steps, how far
    engine and trainer were apart, and the seconds.
    """
    lines = list(read_lines(folder / "grpo" / "metrics.jsonl"))
    held_out = [line for line in lines if "eval/accuracy" in line]
    steps = [line for line in lines if "reward/mean" in line]
    return {
        "architecture": architecture,
        "seed": seed,
        "problems": held_out[0]["eval/n"],
        "before": _accuracy(held_out[0]),
        "after": _accuracy(held_out[-1]),
        "held_out": [[line["step"], round(line["eval/accuracy"], 4)] for line in held_out],
        "rewards": [round(line["reward/mean"], 4) for line in steps],
        "mismatch_max": max(line["mismatch/max"] for line in steps),
        "seconds": round(seconds),
    }


def _command(folder: Path, *words: object) -> None:
    """`reinforge WORDS`, which writes into a log."""
    command = [sys.executable, "-m", "reinforge", *map(str, words)]
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    with (folder / f"{words[0]}.log").open("w") as log:
        subprocess.run(
            command,
            check=True,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": paths},
        )


def _accuracy(line: dict[str, Any]) -> list[float]:
    """With the interval of 95%."""
    return [round(line[f"eval/accuracy{part}"], 4) for part in ("", "_low", "_high")]


def curve(results: Sequence[dict[str, Any]]) -> list[Point]:
    """Of several seeds: the mean of their rewards, step by step, with the lowest and highest."""
    seeds = [_windows(result["rewards"]) for result in results]
    return [
        ((i + 0.5) * WINDOW, sum(means) / len(means), min(means), max(means))
        for i, means in enumerate(zip(*seeds, strict=True))
    ]


def _windows(rewards: Sequence[float]) -> list[float]:
    whole = range(0, len(rewards) - WINDOW + 1, WINDOW)
    return [sum(rewards[at : at + WINDOW]) / WINDOW for at in whole]


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    names = dict.fromkeys(result["architecture"] for result in results)
    series = {
        name: curve([result for result in results if result["architecture"] == name])
        for name in names
    }
    seeds = max(sum(r["architecture"] == name for r in results) for name in names)
    band = f", mean and range of {seeds} seeds" if seeds > 1 else ""
    lines(
        series,
        f"GRPO of small models: sums{band}",
        "step of GRPO",
        "sampled answers that are right",
        path,
        percent=True,
    )


def holds(result: dict[str, Any]) -> bool:
    """Whether the intervals of both accuracies lie apart."""
    return bool(result["after"][1] > result["before"][2])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--architectures", nargs="+", default=["qwen3_5", "gpt_oss"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--demo", action="store_true", help="the demo in place of the recipe")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--runs", type=Path, help="keep the runs there")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    if args.out is not None and args.out.exists():
        results = json.loads(args.out.read_text())
    known = {(result["architecture"], result["seed"]) for result in results}
    with tempfile.TemporaryDirectory(prefix="reinforge-architectures-") as scratch:
        folder = args.runs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for seed in args.seeds:
            for name in args.architectures:
                if (name, seed) in known:
                    continue
                results.append(run(name, seed, folder / f"{name}-{seed}", demo=args.demo))
                _tell(results[-1])
                if args.out is not None:
                    args.out.write_text(json.dumps(results, indent=1) + "\n")
    if args.plot is not None:
        draw(results, args.plot)
    return 0 if all(map(holds, results)) else 1


def _tell(result: dict[str, Any]) -> None:
    print(
        f"{result['architecture']:8} seed {result['seed']}: {result['before'][0]:.1%} of"
        f" {result['problems']:.0f} held-out problems before GRPO, {result['after'][0]:.1%} after;"
        f" {result['seconds']} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
