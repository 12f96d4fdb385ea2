"""Tokens generated until a target accuracy: prompts in order, against prompts chosen by what they
can still teach.

    python benchmarks/dynamic_sampling.py                    # about 10 minutes on two cores
    python benchmarks/dynamic_sampling.py --smoke            # shows that it runs; proves nothing

The demo's task and start: a small Llama, SFT on sums by sloppy teachers (`reinforge demo`), then
GRPO on a fixed set of problems that come again and again. A share of them (--hopeless) are products
of three-digit numbers, which this model never gets right: as in real data, most groups have no
signal. Three runs from the same weights, with the same seed and settings but for the sampling:

    plain      every prompt in its turn
    dynamic    groups whose rewards are all equal are replaced by fresh prompts
               (algorithm.dynamic_sampling)
    teachable  that, and known prompts are taken with probability 4p(1-p) of their pass rate p
               (sampling.prefer)

All sampled tokens count, those of discarded groups too. A run ends at the first evaluation (512
held-out problems, greedy) that reaches the target. Prints tokens and ratios to plain, writes them
to --out, and exits with 1 unless the pass rates saved tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.build.run import train_config  # noqa: E402
from reinforge.cli.demo import SIZES, TASK  # noqa: E402
from reinforge.config.load import config_from_dict  # noqa: E402
from reinforge.data.arithmetic import generate  # noqa: E402
from reinforge.loops.view import NoView  # noqa: E402
from reinforge.models.tiny import make_tiny_model  # noqa: E402
from reinforge.offline.export import export  # noqa: E402
from reinforge.watch.runs import read_lines  # noqa: E402

ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dynamic": {"algorithm": {"dynamic_sampling": True}},
    "teachable": {
        "algorithm": {"dynamic_sampling": True},
        "sampling": {"prefer": "teachable", "retire_above": 0.9},
    },
}


class Quiet(NoView):
    """A view that shows only messages."""

    def message(self, text: str) -> None:
        print(f"  {text}", flush=True)


def config(
    args: argparse.Namespace,
    folder: Path,
    name: str,
    model: Path,
    algorithm: dict[str, Any],
    options: dict[str, Any],
    train: dict[str, Any],
    evaluation: dict[str, Any],
    *,
    rows: Path | None = None,
    **sections: Any,
) -> Any:
    held_out = {
        "source": "arithmetic:chain",
        "size": args.held_out,
        "options": {**TASK, "split": "eval", "seed": args.seed},
    }
    source = (
        {"source": "arithmetic:chain", "options": {**TASK, **options}}
        if rows is None
        else {"source": str(rows)}
    )
    return config_from_dict(
        {
            "model": {"path": str(model), "device": "cpu"},
            "algorithm": algorithm,
            "rewards": [{"name": "exact_number"}],
            "eval": evaluation,
            "data": {**source, "eval": held_out},
            "rollout": {"max_new_tokens": 6},
            "train": train,
            "run": {
                "dir": str(folder / name),
                "seed": args.seed,
                "checkpoint": {"every": 0},
                "log": {"samples_every": 0},
            },
            **sections,
        },
        where="benchmark",
    )


def starting_model(args: argparse.Namespace, folder: Path) -> Path:
    """The demo's SFT: sums of four to six digits, of which three in five demonstrations forget the
    last.
    """
    size = SIZES["quick" if args.smoke else "full"]
    model = make_tiny_model(
        folder / "model",
        seed=args.seed,
        width=size["width"],
        layers=size["layers"],
        heads=4,
        kv_heads=2,
        spread=0.08,
    )
    train = {
        "steps": args.sft_steps,
        "prompts_per_step": 128,
        "learning_rate": 2e-3,
        "schedule": {"kind": "cosine", "warmup": min(20, args.sft_steps)},
    }
    options = {"seed": args.seed, "size": size["demonstrations"], "sloppy": 0.6}
    done = train_config(
        config(args, folder, "sft", model, {"name": "sft"}, options, train, {"at_start": False}),
        None,
        Quiet(),
    )
    return export(done.run_dir, folder / "sft-model")


def problems(args: argparse.Namespace, path: Path) -> Path:
    """The training rows: sums that can be learned, and products that cannot."""
    products = {"operators": "*", "digits": 3, "terms": 2}
    hopeless = round(args.rows * args.hopeless)
    kinds = [(TASK, args.rows - hopeless), (products, hopeless)]
    rows = [
        row
        for options, size in kinds
        for row in islice(generate("chain", {**options, "seed": args.seed + 1_000_000}), size)
    ]
    path.write_text(
        "".join(
            json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) + "\n" for row in rows
        )
    )
    return path


def run_arm(args: argparse.Namespace, folder: Path, name: str, start: Path) -> dict[str, Any]:
    """One GRPO run to the target or to the last step, and what it sampled until then."""
    began = time.monotonic()
    arm = ARMS[name]
    evaluation = {
        "every": args.every,
        "early_stop": {"metric": "eval/accuracy", "patience": 10_000, "threshold": args.target},
    }
    train = {"steps": args.steps, "prompts_per_step": args.prompts, "learning_rate": 1e-4}
    algorithm = {"name": "grpo", "group_size": 8, "minibatches": 2, **arm.get("algorithm", {})}
    rows = problems(args, folder / "problems.jsonl")
    done = train_config(
        config(
            args,
            folder,
            name,
            start,
            algorithm,
            {},
            train,
            evaluation,
            rows=rows,
            sampling=arm.get("sampling", {}),
        ),
        None,
        Quiet(),
    )
    lines = list(read_lines(done.run_dir / "metrics.jsonl"))
    accuracy = {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line}
    steps = [line for line in lines if "tokens/sampled" in line]
    total = lambda key: sum(line.get(key, 0.0) for line in steps)  # noqa: E731
    reached = max(accuracy.values()) >= args.target
    return {
        "reached": reached,
        "steps": len(steps),
        "tokens_sampled": int(total("tokens/sampled")),
        "tokens_discarded": int(total("tokens/discarded")),
        "tokens_trained": int(total("tokens/trained")),
        "zero_variance": total("groups/zero_variance") / max(1, len(steps)),
        "skipped": total("sampling/skipped") / max(1, len(steps)),
        "accuracy": accuracy,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=float, default=0.6, help="held-out accuracy to reach")
    parser.add_argument("--steps", type=int, default=260, help="at most this many steps per run")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument(
        "--hopeless",
        type=float,
        default=0.75,
        help="share of the training problems that the model never gets right",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=1024,
        help="training problems: so few that each is met many times",
    )
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--sft-steps", type=int, default=600)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny settings; nothing is written unless --out is given",
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="default: benchmarks/results/dynamic_sampling.json"
    )
    args = parser.parse_args()
    if args.smoke:
        args.target = 1.0
        args.steps = 4
        args.prompts = 8
        args.rows = 32
        args.every = 2
        args.held_out = 32
        args.sft_steps = 10
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dynamic-sampling-") as name:
        folder = Path(name)
        print(f"SFT, {args.sft_steps} steps", flush=True)
        start = starting_model(args, folder)
        for arm in args.arms:
            results[arm] = found = run_arm(args, folder, arm, start)
            last = found["accuracy"][max(found["accuracy"])]
            print(
                f"{arm:10s} {'reached' if found['reached'] else 'missed '} {args.target:.0%} (last"
                f" {last:.1%}) after {found['steps']} steps, {found['tokens_sampled']} tokens"
                f" sampled, {found['tokens_discarded']} of them discarded,"
                f" {found['zero_variance']:.0%} of groups without signal, {found['seconds']} s",
                flush=True,
            )
    plain = results.get("plain", {}).get("tokens_sampled")
    ratios = {
        arm: plain / r["tokens_sampled"]
        for arm, r in results.items()
        if plain and arm != "plain" and r["reached"]
    }
    for arm, ratio in ratios.items():
        print(
            f"plain / {arm}: {ratio:.2f} x the tokens"
            + ("" if results["plain"]["reached"] else " at least: plain did not reach the target")
        )
    out = args.out or (
        None if args.smoke else ROOT / "benchmarks" / "results" / "dynamic_sampling.json"
    )
    if out is not None:
        settings = {key: value for key, value in vars(args).items() if key not in ("out", "smoke")}
        out.write_text(
            json.dumps(
                {"settings": settings, "arms": results, "tokens_ratio_to_plain": ratios}, indent=1
            )
            + "\n"
        )
    return 0 if args.smoke or ratios.get("teachable", 0.0) > 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
