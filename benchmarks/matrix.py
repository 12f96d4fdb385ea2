"""The demo's task through every engine, backend and cluster: one YAML, only names changed.

    python benchmarks/matrix.py [--start MODEL] [--vllm-python .venv-vllm/bin/python]
                                [--only native,local,none ...]
                                [--no-check] [--learn native,fsdp,none ...] [--out FILE]

For each of {native, vllm} x {local, fsdp, deepspeed, megatron} x {none, ray}: `reinforge check` (a
trivial reward must rise), then the first step of recipes/scale.yaml, whose loss and gradient norm
must be those of the same engine with the local backend in one process. vLLM draws other samples
than the native engine, so each engine is compared with itself; that both sample the same policy is
what the mismatch (mean |log-prob of the trainer - log-prob of the engine|) shows. --learn trains
the named combinations to the recipe's end and tells the held-out accuracy. Writes
benchmarks/results/matrix.json, and keeps what is in there of combinations that are not run; exits
with 1 if something fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
from reinforge.watch.runs import read_lines  # noqa: E402

COMBINATIONS = list(
    product(("native", "vllm"), ("local", "fsdp", "deepspeed", "megatron"), ("none", "ray"))
)
# how far the first step may be from that of one process: absolutely; relatively
LOSS = 1e-5
NORM = 1e-3
Combination = tuple[str, str, str]


def overrides(combination: Combination, args: argparse.Namespace) -> list[str]:
    """The names, and how many processes a CPU machine can bear."""
    engine, backend, cluster = combination
    return [
        f"model.path={args.start}",
        f"rollout.engine={engine}",
        f"train.backend={backend}",
        *(["train.ranks=2"] if backend != "local" else []),
        *(["train.tensor_parallel=2"] if backend == "megatron" else []),
        *([f"engine.python={args.vllm_python}"] if engine == "vllm" else []),
        *(["cluster.kind=ray"] if cluster == "ray" else []),
    ]


def reinforge(*arguments: str, timeout: float) -> tuple[int, str]:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "reinforge", *arguments],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return (
            124,
            (
                f"not done after {timeout:.0f} s: {str(error.stdout)[-1500:]}"
                f" {str(error.stderr)[-1500:]}"
            ),
        )
    return done.returncode, (done.stdout + done.stderr)[-3000:]


def trained(
    combination: Combination, args: argparse.Namespace, *more: str
) -> tuple[list[dict[str, float]], float, str]:
    """The metrics of a run of the recipe, its seconds, and what it said if it failed."""
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        began = time.perf_counter()
        run = f"{folder}/run"
        code, said = reinforge(
            "train",
            args.recipe,
            *overrides(combination, args),
            f"run.dir={run}",
            *more,
            timeout=args.timeout,
        )
        lines = list(read_lines(Path(run) / "metrics.jsonl")) if code == 0 else []
        return lines, time.perf_counter() - began, "" if code == 0 else said


def first_step(combination: Combination, args: argparse.Namespace) -> dict[str, Any]:
    lines, seconds, error = trained(
        combination,
        args,
        "train.steps=1",
        "eval.at_start=false",
        "eval.every=0",
        "run.checkpoint.every=0",
    )
    if error:
        return {"error": error}
    line = next(one for one in lines if "train/loss" in one)
    keys = {
        "loss": "train/loss",
        "norm": "train/grad_norm",
        "reward": "reward/mean",
        "mismatch": "mismatch/mean",
    }
    return {"seconds": seconds, **{name: line.get(key) for name, key in keys.items()}}


def one(combination: Combination, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not args.no_check:
        began = time.perf_counter()
        code, said = reinforge(
            "check",
            args.recipe,
            *overrides(combination, args),
            f"train.learning_rate={args.check_rate}",
            timeout=args.timeout,
        )
        found["check"] = {
            "passed": code == 0,
            "seconds": time.perf_counter() - began,
            **({"error": said} if code else {}),
        }
    return found | {"first": first_step(combination, args)}


def learn(combination: Combination, args: argparse.Namespace) -> dict[str, Any]:
    lines, seconds, error = trained(combination, args)
    scores = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    return (
        {"error": error}
        if error
        else {"seconds": seconds, "curve": scores, "accuracy": scores[-1][1]}
    )


def matches(found: dict[str, dict[str, Any]], key: str) -> bool | None:
    """Whether the first step is that of one process with the same engine.

    None: nothing to compare with.
    """
    own = found[key].get("first", {})
    plain = found.get(f"{key.split(',')[0]},local,none", {}).get("first", {})
    if own.get("norm") is None or plain.get("norm") is None:
        return None if "error" not in own else False
    return (
        abs(own["loss"] - plain["loss"]) <= LOSS
        and abs(own["norm"] - plain["norm"]) <= NORM * plain["norm"]
    )


def table(found: dict[str, dict[str, Any]]) -> str:
    rows = [
        (
            "| engine | backend | cluster | check | first loss | gradient norm | as local |"
            " mismatch | held-out accuracy |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key in (",".join(c) for c in COMBINATIONS if ",".join(c) in found):
        row = found[key]
        first = found[key].get("first", {})
        numbers = [
            f"{first[name]:.{digits}g}" if first.get(name) is not None else "-"
            for name, digits in (("loss", 4), ("norm", 6), ("mismatch", 2))
        ]
        passed = {True: "passed", False: "FAILED", None: "-"}[row.get("check", {}).get("passed")]
        alike = {True: "yes", False: "NO", None: "-"}[matches(found, key)]
        end = row.get("learned", {}).get("accuracy")
        rows.append(
            f"| {' | '.join(key.split(','))} | {passed} | {numbers[0]} | {numbers[1]} | {alike} |"
            f" {numbers[2]} | {'-' if end is None else f'{end:.1%}'} |"
        )
    return "\n".join(rows)


def combination(text: str) -> Combination:
    engine, backend, cluster = text.split(",")
    if (engine, backend, cluster) not in COMBINATIONS:
        raise argparse.ArgumentTypeError(f"{text}: engine,backend,cluster of {COMBINATIONS}")
    return engine, backend, cluster


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", default="runs/demo/sft-model", help="what `reinforge demo` made")
    parser.add_argument("--recipe", default="recipes/scale.yaml")
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm/bin/python"))
    parser.add_argument("--only", type=combination, nargs="*", default=COMBINATIONS)
    parser.add_argument("--learn", type=combination, nargs="*", default=[])
    parser.add_argument(
        "--check-rate",
        type=float,
        default=3e-3,
        help="learning rate of the check, which has 40 steps",
    )
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of one command")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "matrix.json")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for work, name, wanted in ((one, "", args.only), (learn, "learned", args.learn)):
        for combined in wanted:
            key = ",".join(combined)
            result = work(combined, args)
            found.setdefault(key, {}).update({name: result} if name else result)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
            print(key, json.dumps(result)[:600], flush=True)
    print(table(found))
    bad = [
        k
        for k, r in found.items()
        if r.get("check", {}).get("passed") is False
        or matches(found, k) is False
        or "error" in r.get("learned", {})
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
