"""Draws what the GPU benchmarks left in benchmarks/results as docs/plots/gpu_*.svg.

    python benchmarks/plot_gpu.py [--results FOLDER] [--plots FOLDER]

A picture for which nothing was measured is not drawn, and the last line says which.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from generation_results import GenerationResult, read_results
from plots import bars, lines

ROOT = Path(__file__).resolve().parents[1]
# TRL 1.16 + vLLM 0.26, a whole GRPO step, on the same GPU model in an earlier run
TRL_SECONDS = {"0.5b": 40.6, "1.5b": 61.6}
Bars = dict[str, tuple[float, float, float]]  # median, lowest, highest
NAMES = {"vllm": "vLLM", "rows4": "4 rows", "rows16": "16 rows", "rows64": "64 rows"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--plots", type=Path, default=ROOT / "docs" / "plots")
    args = parser.parse_args()
    args.plots.mkdir(parents=True, exist_ok=True)
    missing = draw_generation(read_results(args.results / "gpu_generate.json"), args.plots)
    missing += draw_steps(args.results, args.plots)
    missing += draw_learning(args.results, args.plots)
    if missing:
        print(f"nothing was measured for {', '.join(missing)}")


# ---- generation ----


def draw_generation(results: Sequence[GenerationResult], plots: Path) -> list[str]:
    """Returns the names of pictures that nothing was measured for."""
    device = results[0].device if results else ""
    pictures = {
        "gpu_long.svg": (
            spreads(results, "7b", ("long", "long32k"), "ms_per_token_of_the_longest"),
            "7B, 256 answers that end by themselves, caps of 8k and 32k",
            "ms per token of the longest answer, less is better",
        ),
        "gpu_rows.svg": (
            spreads(results, "7b", ("rows4", "rows16", "rows64"), "ms_per_token_of_the_longest"),
            "7B, few sequences",
            "ms per step, less is better",
        ),
        "gpu_wide.svg": (
            spreads(results, "0.5b", ("wide", "varied"), "tokens_per_second"),
            "0.5B, 512 sequences, of one length and varied",
            "tokens/s, more is better",
        ),
        "gpu_exact.svg": (
            exact_ratios(results),
            "model.exact against the default",
            "times as long",
        ),
    }
    for file, (values, title, label) in pictures.items():
        if values:
            kinds = {name: name.partition(": ")[2] for name in values if ": " in name}
            bars(values, f"{title}, {device}", label, plots / file, kinds=kinds)
    return [file for file, (values, _, _) in pictures.items() if not values]


def spreads(
    results: Sequence[GenerationResult], shape: str, workloads: Iterable[str], measure: str
) -> Bars:
    """Ours first, then the peers, workload by workload."""
    found: Bars = {}
    for workload in workloads:
        here = [r for r in results if (r.shape, r.workload) == (shape, workload)]
        for result in sorted(here, key=lambda r: (r.engine != "reinforge", r.variant)):
            found[f"{shown(workload)}: {shown(result.engine)} {result.variant}"] = result.spread(
                measure
            )
    return found


def shown(name: str) -> str:
    return NAMES.get(name, name)


def exact_ratios(results: Sequence[GenerationResult]) -> Bars:
    """Of every workload that was done both ways: medians, and rounds with the same draws."""
    ours = {r.place: r for r in results if r.engine == "reinforge"}
    found: Bars = {}
    for (engine, shape, variant, workload), exact in ours.items():
        default = ours.get((engine, shape, variant.removesuffix(" exact"), workload))
        if not variant.endswith(" exact") or default is None:
            continue
        seconds = {r.key: r.seconds for r in default.rounds}
        both = [r.seconds / seconds[r.key] for r in exact.rounds if r.key in seconds]
        name = "ms_per_token_of_the_longest"
        ratio = exact.median(name) / default.median(name)
        found[f"{shape} {shown(workload)}"] = (ratio, min([ratio, *both]), max([ratio, *both]))
    return found


# ---- steps and learning ----


def draw_steps(results: Path, plots: Path) -> list[str]:
    steps: dict[str, float] = {}
    for shape, name in (("0.5b", "gpu_step_05b.json"), ("1.5b", "gpu_step_15b.json")):
        if not (results / name).exists():
            continue
        found = read(results / name)
        peers = [row["step"] for row in found.get("peers", [])]
        told = (
            {f"{shape}: TRL + vLLM": peers[0]}
            if peers
            else {f"{shape}: TRL + vLLM, earlier run": TRL_SECONDS[shape]}
        )
        floor = sum(found["floor"].values())
        best = found["best"]["step"]
        steps |= {f"{shape}: physical limit": floor, f"{shape}: reinforge": best, **told}
    if not steps:
        return ["gpu_step.svg"]
    bars(
        single(steps),
        "A whole GRPO step, 512 x (256 + 1024) tokens, one H200",
        "seconds",
        plots / "gpu_step.svg",
    )
    return []


def draw_learning(results: Path, plots: Path) -> list[str]:
    curves = {}
    for recipe in ("anchor", "best"):
        path = results / f"gpu_learn_{recipe}.json"
        if path.exists():
            points = read(path)["curve"]
            curves[f"reinforge, {recipe}"] = [
                (p["seconds"], p["accuracy"], p["accuracy"], p["accuracy"]) for p in points
            ]
    if not curves:
        return ["gpu_learn.svg"]
    curves["TRL, earlier run"] = [(0.0, 0.037, 0.037, 0.037), (185.0, 0.221, 0.221, 0.221)]
    lines(
        curves,
        "SmolLM2-135M on sums",
        "seconds of training",
        "test accuracy",
        plots / "gpu_learn.svg",
        percent=True,
    )
    return []


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def single(values: Mapping[str, float]) -> Bars:
    """Values that were measured once."""
    return {name: (v, v, v) for name, v in values.items()}


if __name__ == "__main__":
    main()
