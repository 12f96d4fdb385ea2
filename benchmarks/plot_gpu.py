"""Draws what the GPU benchmarks left in benchmarks/results as docs/plots/gpu_*.svg.

python benchmarks/plot_gpu.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plots import bars, lines

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"
# TRL 1.16 + vLLM 0.26, a whole GRPO step, on the same GPU model in an earlier run
TRL_SECONDS = {"0.5b": 40.6, "1.5b": 61.6}


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def main() -> None:
    PLOTS.mkdir(parents=True, exist_ok=True)
    found = read("gpu_generate.json")
    speed = {
        f"reinforge, {row['lengths']} lengths": row["tokens_per_second"] for row in found["ours"]
    }
    speed |= {
        f"{row['peer']}, {row['lengths']} lengths": row["tokens_per_second"]
        for row in found["peers"]
    }
    bars(
        {name: (v, v, v) for name, v in speed.items()},
        "Generation, 0.5B shape, 512 sequences, one H200",
        "tokens/s",
        PLOTS / "gpu_generate.svg",
    )
    steps: dict[str, float] = {}
    for shape, name in (("0.5b", "gpu_step_05b.json"), ("1.5b", "gpu_step_15b.json")):
        best = read(name)["best"]["step"]
        floor = sum(read(name)["floor"].values())
        peers = [row["step"] for row in read(name).get("peers", [])]
        told = (
            {f"{shape}: TRL + vLLM": peers[0]}
            if peers
            else {f"{shape}: TRL + vLLM, earlier run": TRL_SECONDS[shape]}
        )
        steps |= {f"{shape}: physical limit": floor, f"{shape}: reinforge": best, **told}
    bars(
        {name: (v, v, v) for name, v in steps.items()},
        "A whole GRPO step, 512 x (256 + 1024) tokens, one H200",
        "seconds",
        PLOTS / "gpu_step.svg",
    )
    curves = {}
    for recipe in ("anchor", "best"):
        path = RESULTS / f"gpu_learn_{recipe}.json"
        if path.exists():
            points = json.loads(path.read_text())["curve"]
            curves[f"reinforge, {recipe}"] = [
                (p["seconds"], p["accuracy"], p["accuracy"], p["accuracy"]) for p in points
            ]
    curves["TRL, earlier run"] = [(0.0, 0.037, 0.037, 0.037), (185.0, 0.221, 0.221, 0.221)]
    lines(
        curves,
        "SmolLM2-135M on sums",
        "seconds of training",
        "test accuracy",
        PLOTS / "gpu_learn.svg",
        percent=True,
    )


if __name__ == "__main__":
    main()
