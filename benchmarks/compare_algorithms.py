"""Eight algorithms on one task with one budget: what each reaches, and what it costs to reach a
target.

    # about 12 minutes on two cores
    python benchmarks/compare_algorithms.py --device cpu --seeds 3 --jobs 2
    # a real model on a GPU
    python benchmarks/compare_algorithms.py --model MODEL --rows ROWS.jsonl --seeds 3
    # shows that it runs; proves nothing
    python benchmarks/compare_algorithms.py --smoke

cpu: the demo's task and start (sums of four to six digits; SFT on demonstrations by sloppy
teachers, made once and shared by all runs; see `reinforge demo`). With --model: the task of
gpu_learn.py, rows {"q", "a", "split": "train" | "test"}. Everything but the algorithm is the same:
weights, prompts per step, samples per prompt, updates per batch (two, so that the ratio of new and
old policy is not always 1 and clipping matters), optimizer. Also the learning rate: AdamW divides
by the size of the gradient, so the algorithms' different loss scales (fixed_length, sequence_sum)
do not ask for different rates. Only PPO needs more than its name: a critic, at five times the
policy's learning rate. (Short runs on the cpu task with one or two seeds saw nothing beyond noise
between 1, 5 and 20 times, and a warm-up of four steps only cost four steps: advantages are
whitened, so a critic that knows nothing yet does no harm.)

The budget is counted in generated samples. DAPO throws some away and samples again, so it reaches
the budget in fewer steps, and its curve ends there. Curves are greedy accuracy on held-out rows,
linear between evaluations. Bands and intervals are 95% t-intervals over the seeds (order of rows,
sampling, on the cpu also which problems; the starting weights are the same); with one seed there is
none. "To the target": up to the first evaluation at or above it, the mean over the seeds that got
there. Tokens are all that were generated for training, seconds those of training (generation,
rewards, passes, updates; no evaluation, no loading), and with --jobs above 1 those of a machine
that does several things.

Writes benchmarks/results/compare_NAME.json and docs/plots/compare_NAME.svg and prints a table.
Exits with 1 unless every algorithm ends above its start.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from plots import Point, lines  # noqa: E402

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo")
# of Student's t, by degrees of freedom
T95 = (float("nan"), 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
SAME = (
    "steps",
    "every",
    "prompts",
    "group",
    "updates",
    "learning_rate",
    "critic_rate",
    "critic_warmup",
    "held_out",
)  # what makes runs alike
PHASES = ("generate", "reward_wait", "prepare", "annotate", "train")
Curve = list[dict[str, float]]  # at each evaluation: step, samples, tokens, seconds, accuracy


def config(args: argparse.Namespace, name: str, seed: int, folder: Path) -> Any:
    """One run: a name of the table, everything else alike."""
    sections = (
        {
            "critic": {
                "learning_rate": args.critic_rate * args.learning_rate,
                "warmup": args.critic_warmup,
            }
        }
        if name == "ppo"
        else {}
    )
    algorithm = {"name": name, "group_size": args.group, "minibatches": args.updates}
    train = {
        "steps": args.steps,
        "prompts_per_step": args.prompts,
        "learning_rate": args.learning_rate,
    }
    if args.model:
        import gpu_learn

        values = {
            **{f"algorithm.{k}": v for k, v in algorithm.items() if k != "name"},
            **{f"train.{k}": v for k, v in train.items()},
            **sections,
            # several runs share the device
            **(
                {"rollout.max_batch": 512, "train.tokens_per_microbatch": 8192}
                if args.jobs > 1
                else {}
            ),
        }
        settings = [
            f"algorithm.name={name}",
            *(f"{key}={json.dumps(value)}" for key, value in values.items()),
        ]
        own = {
            "recipe": "anchor",
            "seed": seed,
            "seconds": 0.0,
            "compile": False,
            "set": settings,
            "every": args.every,
        }
        return gpu_learn.config(argparse.Namespace(**{**vars(args), **own}), str(folder))
    import dynamic_sampling

    options = {"seed": seed + 1_000_000, "size": 20_000}
    own_args = argparse.Namespace(seed=seed, held_out=args.held_out)
    return dynamic_sampling.config(
        own_args,
        folder.parent,
        folder.name,
        args.start,
        algorithm,
        options,
        train,
        {"every": args.every},
        **sections,
    )


def run(args: argparse.Namespace, name: str, seed: int) -> Curve:
    """Trains in this process."""
    from dynamic_sampling import Quiet

    from reinforge.build.run import train_config
    from reinforge.watch.runs import read_lines

    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        done = train_config(config(args, name, seed, Path(folder) / "run"), None, Quiet())
        return curve(list(read_lines(done.run_dir / "metrics.jsonl")))


def curve(metrics: list[dict[str, float]]) -> Curve:
    """What was generated and how long it took until each evaluation."""
    samples = tokens = seconds = 0.0
    points: Curve = []
    for line in metrics:
        if "tokens/sampled" in line:
            tokens += line["tokens/sampled"]
            samples += round(line["tokens/sampled"] / line["response/length"])  # discarded ones too
            seconds += sum(line.get(f"time/{phase}", 0.0) for phase in PHASES)
        if "eval/accuracy" in line:
            points.append(
                {
                    "step": line["step"],
                    "samples": samples,
                    "tokens": tokens,
                    "seconds": seconds,
                    "accuracy": line["eval/accuracy"],
                }
            )
    return points


def at(points: Curve, samples: float, key: str) -> float:
    """The value after that many samples, linear between evaluations.

    >>> at([{"samples": 0, "accuracy": 0.2}, {"samples": 100, "accuracy": 0.4}], 50, "accuracy")
    0.30000000000000004
    """
    for before, after in pairwise(points):
        if before["samples"] <= samples <= after["samples"]:
            share = (samples - before["samples"]) / (after["samples"] - before["samples"])
            return before[key] + share * (after[key] - before[key])
    return points[-1][key]


def interval(values: list[float]) -> tuple[float, float, float]:
    """(mean, low, high): the 95% t-interval of a mean.

    >>> [round(x, 3) for x in interval([0.5, 0.6, 0.7])]
    [0.6, 0.352, 0.848]
    """
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, mean, mean
    spread = (sum((v - mean) ** 2 for v in values) / (n - 1)) ** 0.5
    quantile = T95[n - 1] if n <= len(T95) else 1.96 + 2.5 / (n - 1)
    return mean, mean - quantile * spread / n**0.5, mean + quantile * spread / n**0.5


def summary(curves: list[Curve], budget: float, target: float) -> dict[str, Any]:
    """Of all seeds of one algorithm. Means over nothing are None."""
    reached = [
        next((p for p in points if p["accuracy"] >= target and p["samples"] <= budget), None)
        for points in curves
    ]
    there = [p for p in reached if p is not None]
    return {
        "start": sum(points[0]["accuracy"] for points in curves) / len(curves),
        "accuracy": interval([at(points, budget, "accuracy") for points in curves]),
        "tokens": sum(at(points, budget, "tokens") for points in curves) / len(curves),
        "seconds": sum(at(points, budget, "seconds") for points in curves) / len(curves),
        "reached": len(there),
        "seeds": len(curves),
        "tokens_to_target": sum(p["tokens"] for p in there) / len(there) if there else None,
        "seconds_to_target": sum(p["seconds"] for p in there) / len(there) if there else None,
    }


def table(found: dict[str, dict[str, Any]], target: float) -> str:
    head = (
        "| algorithm | accuracy | 95% interval | tokens generated | seconds | seeds that reached"
        f" {target:.0%} | tokens to it | seconds to it |"
    )
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for name, s in sorted(found.items(), key=lambda item: -item[1]["accuracy"][0]):
        mean, low, high = s["accuracy"]
        band = f"{max(0, low):.1%} to {min(1, high):.1%}" if s["seeds"] > 1 else "one seed"
        cost = [
            f"{s[key]:,.0f}" if s[key] is not None else "-"
            for key in ("tokens_to_target", "seconds_to_target")
        ]
        rows.append(
            f"| {name} | {mean:.1%} | {band} | {s['tokens']:,.0f} | {s['seconds']:.0f} |"
            f" {s['reached']} of {s['seeds']} | {cost[0]} | {cost[1]} |"
        )
    return "\n".join(rows)


def bands(curves: list[Curve], budget: float, count: int) -> list[Point]:
    """Points of the plot, at `count` equal distances up to the budget."""
    found = []
    for i in range(count + 1):
        mean, low, high = interval(
            [at(points, budget * i / count, "accuracy") for points in curves]
        )
        found.append((budget * i / count, mean, max(0.0, low), min(1.0, high)))
    return found


def run_all(args: argparse.Namespace, curves: dict[str, dict[int, Curve]], save: Any) -> list[str]:
    """Every algorithm with every seed that `curves` has not, `jobs` at a time in processes with one
    thread each. Saves after each; returns which ones failed.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    failed = []
    # on a GPU each run has a process, and so all of the memory, to itself
    fresh = 1 if args.model else None
    with ProcessPoolExecutor(
        args.jobs, mp_context=get_context("spawn"), max_tasks_per_child=fresh
    ) as pool:
        waiting = {
            pool.submit(run, args, name, seed): (name, seed)
            for seed in range(args.seeds)
            for name in args.algorithms
            if seed not in curves[name]
        }
        for future in as_completed(waiting):
            name, seed = waiting[future]
            if (error := future.exception()) is not None:
                failed.append(f"{name} seed {seed}: {error!r}"[:300])
                continue
            points = curves[name][seed] = future.result()
            save(curves)
            print(
                f"{name:14s} seed {seed}: {points[0]['accuracy']:.1%} to"
                f" {points[-1]['accuracy']:.1%} in {points[-1]['step']:.0f} steps,"
                f" {points[-1]['samples']:.0f} samples, {points[-1]['seconds']:.0f} s",
                flush=True,
            )
    return failed


def earlier(path: Path, settings: dict[str, Any], names: list[str]) -> dict[str, dict[int, Curve]]:
    """The curves that a run with the same settings left, so that only what is missing is run."""
    curves: dict[str, dict[int, Curve]] = {name: {} for name in names}
    if path.exists():
        found = json.loads(path.read_text())
        alike = all(found["settings"].get(key, settings[key]) == settings[key] for key in SAME)
        for name in names if alike else ():
            curves[name] = {
                int(seed): points
                for seed, points in found["curves"].get(name, {}).items()
                if int(seed) < settings["seeds"]
            }
    return curves


def starting_model(args: argparse.Namespace, folder: Path) -> Path:
    """The demo's model after SFT, the same for all runs."""
    import dynamic_sampling

    print(f"SFT, {args.sft_steps} steps", flush=True)
    return dynamic_sampling.starting_model(
        argparse.Namespace(
            smoke=args.smoke, seed=0, sft_steps=args.sft_steps, held_out=args.held_out
        ),
        folder,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu",), default="cpu", help="without --model")
    parser.add_argument("--model", default="", help="a real model, on a GPU; needs --rows")
    parser.add_argument("--rows", type=Path)
    parser.add_argument(
        "--name", default="", help='of the files written; default "cpu" or the model\'s'
    )
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--steps", type=int, help="default 80; with --model 60")
    parser.add_argument("--every", type=int, default=8, help="steps between evaluations")
    parser.add_argument("--prompts", type=int, help="per step; default 32, with --model 64")
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps per batch")
    parser.add_argument(
        "--learning-rate", type=float, help="of all; default 1e-4, with --model 1e-5"
    )
    parser.add_argument(
        "--critic-rate",
        type=float,
        default=5.0,
        help="ppo: the critic's learning rate, in units of the policy's",
    )
    parser.add_argument(
        "--critic-warmup",
        type=int,
        default=0,
        help="ppo: steps in which only the critic learns; their samples count",
    )
    parser.add_argument("--held-out", type=int, default=256, help="cpu: problems per evaluation")
    parser.add_argument("--sft-steps", type=int, default=600, help="cpu: of the starting model")
    parser.add_argument(
        "--start", type=Path, help="cpu: a starting model that was made before, instead of SFT"
    )
    parser.add_argument("--target", type=float, help="accuracy; default 0.6, with --model 0.2")
    parser.add_argument(
        "--continue",
        dest="resume",
        action="store_true",
        help="only what the results file does not have yet",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny settings, and files go to a temporary folder"
    )
    args = parser.parse_args()
    if bool(args.model) != bool(args.rows):
        parser.error("--model and --rows go together")
    usual = (
        {
            "steps": 60,
            "prompts": 64,
            "learning_rate": 1e-5,
            "target": 0.2,
            "name": Path(args.model).name.lower(),
        }
        if args.model
        else {"steps": 80, "prompts": 32, "learning_rate": 1e-4, "target": 0.6, "name": "cpu"}
    )
    if args.smoke:
        usual |= {"steps": 6, "prompts": 4}
        args.every = 3
        args.held_out = 16
        args.sft_steps = 10
        args.group = 4
    for key, value in usual.items():
        setattr(args, key, getattr(args, key) or value)
    return args


def main() -> int:
    args = arguments()
    budget = float(args.steps * args.prompts * args.group)
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        results, plots = (
            (folder, folder)
            if args.smoke
            else (ROOT / "benchmarks" / "results", ROOT / "docs" / "plots")
        )
        if not args.model and args.start is None:
            args.start = starting_model(args, folder)
        named = {**vars(args), "model": Path(args.model).name}  # where it lies is nobody's business
        settings = {
            key: v.name if isinstance(v, Path) else v
            for key, v in named.items()
            if key not in ("smoke", "start", "device", "resume")
        }

        def save(curves: dict[str, dict[int, Curve]]) -> None:
            whole = {
                k: summary(list(c.values()), budget, args.target) for k, c in curves.items() if c
            }
            content = {
                "settings": settings,
                "budget_samples": budget,
                "interval": "95% t over seeds",
                "summary": whole,
                "curves": curves,
            }
            (results / f"compare_{args.name}.json").write_text(json.dumps(content, indent=1) + "\n")

        known = (
            earlier(results / f"compare_{args.name}.json", settings, args.algorithms)
            if args.resume
            else {name: {} for name in args.algorithms}
        )
        failed = run_all(args, known, save)
        save(known)
        if failed:
            print("failed; --continue runs them again:", *failed, sep="\n  ")
            return 1
        curves = known
        found = {
            k: summary([c[s] for s in sorted(c)], budget, args.target) for k, c in curves.items()
        }
        series = {
            k: bands(list(curves[k].values()), budget, max(1, args.steps // args.every))
            for k in args.algorithms
        }
        title = (
            f"Held-out accuracy, {args.seeds} seeds, 95% t-interval"
            if args.seeds > 1
            else "Held-out accuracy, one seed"
        )
        lines(
            series,
            title,
            "samples generated",
            "accuracy (greedy)",
            plots / f"compare_{args.name}.svg",
            percent=True,
        )
        print(
            f"\nstart {sum(s['start'] for s in found.values()) / len(found):.1%}; {budget:,.0f}"
            f" samples each\n\n{table(found, args.target)}"
        )
    return 0 if args.smoke or all(s["accuracy"][0] > s["start"] for s in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
