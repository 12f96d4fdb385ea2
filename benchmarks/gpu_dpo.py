"""One GPU: DPO on a real model, all weights trained, beside TRL's DPOTrainer on the same rows in
the same order.

    python benchmarks/gpu_dpo.py MODEL [--peer-python PYTHON --peer-path SITE]
                                 [--out benchmarks/results/gpu_dpo.json]

The script writes the rows (seeded; prompts of 50 to 200 tokens, answers of 50 to 400, words of
English). 64 pairs per step, beta 0.1, AdamW at a constant rate. Ours is the ordinary run of a
config: bfloat16 module, float32 masters and moments. TRL has its best settings
(benchmarks/peers/trl_dpo.py) and the faster of two batch sizes, in "pure" bfloat16 and in "mixed",
which has the precision of ours. Either side runs in a process of its own. Tokens are those of the
rows (a prompt counts twice, padding never), the same number for both. Seconds are wall time between
ends of steps, after --warmup steps; the precomputing of the reference is told apart, and --live has
the reference live on both sides.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_step import run_peer

WORD_TEXT = """\
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law car
city community name president team minute idea body information back parent face level office
door health person art war history party result change morning reason research girl guy moment
air teacher force education foot boy age policy music market sense nation plan college interest
death experience effect use class control field development role effort rate heart drug show
leader light voice wife police mind price report decision son view relationship town road arm
season society tax director position player difference value building action model river garden
window stone winter summer letter machine travel answer carry follow build write believe explain
learn measure open remember consider appear offer serve expect reach remain suggest raise pass
sell require the a of to in and that for with from by about before after because while which
small large early young important public possible national"""
WORDS = WORD_TEXT.split()
KIND_TEXT = "thank you please gladly carefully kindly of course happy help together clear exact"
KIND = KIND_TEXT.split()
CLAIM = 1.5


def sentences(rng: random.Random, words: int, extra: list[str]) -> str:
    """About that many words of English in sentences; every tenth is one of `extra`, so that there
    is something to learn.
    """
    picked = [
        rng.choice(extra) if extra and rng.random() < 0.1 else rng.choice(WORDS)
        for _ in range(words)
    ]
    parts = []
    while picked:
        n = rng.randint(6, 16)
        parts.append(" ".join(picked[:n]).capitalize() + ".")
        picked = picked[n:]
    return " ".join(parts)


def write_rows(path: Path, n: int, scale: float, seed: int = 0) -> None:
    """{prompt, chosen, rejected}; an answer begins with a blank, so that no token spans the end of
    a prompt.
    """
    rng = random.Random(seed)

    def length(low: int, high: int) -> int:
        return max(2, round(scale * math.exp(rng.uniform(math.log(low), math.log(high)))))

    with path.open("w") as file:
        for _ in range(n):
            row = {
                "prompt": "Question: " + sentences(rng, length(40, 160), []) + "\nAnswer:",
                "chosen": " " + sentences(rng, length(45, 340), KIND),
                "rejected": " " + sentences(rng, length(45, 340), []),
            }
            file.write(json.dumps(row) + "\n")


def summary(run: dict[str, Any], warmup: int) -> dict[str, Any]:
    """Seconds per step, tokens per second, and whether the first loss is that of a policy that is
    its reference.
    """
    seconds = run["seconds"][warmup:]
    tokens = run["tokens"][warmup:]
    assert abs(run["losses"][0] - math.log(2)) < 0.01, (
        f"{run['peer']}: the first loss is {run['losses'][0]}, not ln 2"
    )
    return {
        "seconds_per_step": statistics.fmean(seconds),
        "median": statistics.median(seconds),
        "tokens_per_second": sum(tokens) / sum(seconds),
    }


def name_of(run: dict[str, Any]) -> str:
    how = (
        f"micro-batches of {run['budget'] or 'auto'} tokens"
        if run["peer"] == "reinforge"
        else f"{run['precision']}, {run['micro']} pairs per device"
    )
    return (
        f"{run['peer']} ({how}{', compiled' if run['compile'] else ''}, reference"
        f" {'precomputed' if run['precompute'] else 'live'})"
    )


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.runs = list[dict[str, Any]]()
        self.rows = Path(tempfile.mkdtemp()) / "rows.jsonl"
        write_rows(self.rows, args.pairs * (args.warmup + args.steps), args.scale)
        self.common = {
            "model": str(args.model),
            "rows": str(self.rows),
            "steps": args.warmup + args.steps,
            "pairs": args.pairs,
            "rate": args.rate,
            "beta": args.beta,
        }

    def run(self, python: str, path: str, script: str, **settings: Any) -> dict[str, Any] | None:
        found = run_peer(python, path, script, json.dumps({**self.common, **settings}))
        if not found:
            print(f"{script} failed with {settings}", flush=True)
            return None
        run = found[0] | summary(found[0], self.args.warmup)
        print(run.pop("kernels", ""), end="")
        if self.runs and run["tokens"] != self.runs[0]["tokens"]:
            print(
                f"NOT the same tokens: {sum(run['tokens'])} instead of"
                f" {sum(self.runs[0]['tokens'])} (tokenizers split the rows differently)"
            )
        self.runs.append(run)
        print(
            f"{name_of(run)}: {run['seconds_per_step']:.3f} s a step (median {run['median']:.3f}),"
            f" {run['tokens_per_second']:,.0f} tokens/s, peak {run['peak_gib']:.2f} GiB allocated,"
            f" {run['reserved_gib']:.2f} reserved; precomputing {run['precompute_s']:.1f} s",
            flush=True,
        )
        if self.args.out:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(
                json.dumps(
                    {
                        "settings": {
                            **self.common,
                            "model": self.args.model.name,
                            "rows": self.rows.name,
                        },
                        "warmup": self.args.warmup,
                        "runs": self.runs,
                    },
                    indent=1,
                )
            )
        return run

    def ours(self, budget: int, compiled: bool, precompute: bool) -> dict[str, Any] | None:
        return self.run(
            sys.executable,
            "",
            "ours_dpo.py",
            budget=budget,
            compile=compiled,
            precompute=precompute,
            profile=self.args.profile,
        )

    def trl(self, precision: str, micro: int, precompute: bool) -> dict[str, Any] | None:
        a = self.args
        return self.run(
            a.peer_python,
            a.peer_path,
            "trl_dpo.py",
            precision=precision,
            micro=micro,
            precompute=precompute,
            compile=a.peer_compile,
        )


def fastest(runs: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    return min(
        (r for r in runs if r is not None), key=lambda r: r["seconds_per_step"], default=None
    )


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    print(
        f"\n{name_of(ours)}\n  against {name_of(theirs)}:\n "
        f" {ours['tokens_per_second'] / theirs['tokens_per_second']:.2f} times the tokens per"
        f" second, {ours['peak_gib'] / max(theirs['peak_gib'], 1e-9):.2f} times the peak memory"
        f" allocated, {ours['reserved_gib'] / max(theirs['reserved_gib'], 1e-9):.2f} times the"
        " memory reserved"
    )
    for i, (a, b) in enumerate(zip(ours["losses"], theirs["losses"], strict=True)):
        print(f"  step {i + 1:2d}: loss {a:.4f} and {b:.4f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=20, help="timed ones")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=2e-6)
    parser.add_argument("--scale", type=float, default=1.0, help="of the rows' lengths in words")
    parser.add_argument(
        "--budgets", default="12288,24576", help="tokens per micro-batch of ours; 0 = auto"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--micro", default="16,32", help="pairs per device batch of TRL's")
    parser.add_argument("--precisions", default="pure,mixed")
    parser.add_argument(
        "--live",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also with a live reference",
    )
    parser.add_argument("--peer-compile", action="store_true")
    parser.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="STEP",
        help="print the kernels of that step of ours",
    )
    parser.add_argument("--peer-python", default="")
    parser.add_argument("--peer-path", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    ours = fastest(
        [bench.ours(int(budget), args.compile, True) for budget in args.budgets.split(",")]
    )
    theirs = {}
    for precision in args.precisions.split(",") if args.peer_python else ():
        theirs[precision] = fastest(
            [bench.trl(precision, int(micro), True) for micro in args.micro.split(",")]
        )
    for other in theirs.values():
        if ours is not None and other is not None:
            compare(ours, other)
    small = [
        r
        for r in bench.runs
        if r["peer"] == "reinforge"
        and all(o is None or r["peak_gib"] <= o["peak_gib"] for o in theirs.values())
    ]
    if theirs and (best := fastest(small)) is not None and best is not ours:
        print("\nthe fastest of ours that takes no more memory than the fastest of theirs:")
        for other in theirs.values():
            if other is not None:
                compare(best, other)
    if args.live and ours is not None:
        live = bench.ours(ours["budget"], args.compile, False)
        other = fastest(list(theirs.values()))
        beside = bench.trl(other["precision"], other["micro"], False) if other is not None else None
        if live is not None and beside is not None:
            compare(live, beside)
    peers = [o for o in theirs.values() if o is not None]
    won = [
        r
        for r in small
        if r["precompute"]
        and all(r["tokens_per_second"] >= CLAIM * o["tokens_per_second"] for o in peers)
    ]
    if peers:
        print(
            f"\nat least {CLAIM} times the tokens per second of the fastest of theirs at no more"
            f" memory: {'yes' if won else 'NO'}"
        )
    return int(bool(peers) and not won)


if __name__ == "__main__":
    sys.exit(main())
