"""One GPU: how fast a real model learns.

SmolLM2-135M-Instruct on sums of 2 or 3 numbers, by reward alone.

    python benchmarks/gpu_learn.py MODEL ROWS.jsonl [--recipe anchor|best] [--seconds 185]
                                   [--seed 0] [--set KEY=VALUE ...]
                                   [--peer-python PYTHON] [--out FILE]

ROWS has lines {"q": question, "a": answer, "split": "train" | "test"}. `anchor` has the settings
that TRL's run has (GRPO, 64 prompts x 8 samples, 64 new tokens, learning rate 1e-5, no KL,
temperature 1, reward 1 if the last number is the answer; 60 steps); `best` is what we found to
learn fastest from the same rows: a prompt that shows how sums are worked out, and a third of the
reward for coming within 10. Greedy accuracy on the test rows is measured every few steps. Seconds
are those of training: generation, rewards, updates, and all compiling and graph capture; loading
the model, evaluations and checkpoints are not counted, for TRL neither. With --peer-python TRL
trains after us on the same machine (benchmarks/peers/trl_learn.py).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from gpu_step import run_peer

from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict
from reinforge.loops.view import NoView
from reinforge.watch.runs import read_lines

ANCHOR: dict[str, Any] = {
    "algorithm.name": "grpo",
    "algorithm.group_size": 8,
    "train.prompts_per_step": 64,
    "train.learning_rate": 1e-5,
    "train.steps": 60,
}
TEMPLATE = "{q}\nReply with the final number only."
EXAMPLES = (
    "Work from left to right.\n12 + 30 - 7 = 42 - 7 = 35\n64 - 81 = -17\nNow the same for this"
    " one. {q}"
)
BEST: dict[str, Any] = {
    "algorithm.name": "grpo",
    "algorithm.group_size": 16,
    "train.prompts_per_step": 128,
    "train.learning_rate": 3e-5,
    "train.steps": 2000,
    "train.schedule": {"kind": "constant", "warmup": 5},
    "sampling": {"prefer": "teachable"},
    "data.template": EXAMPLES,
    "rewards": [
        {"name": "exact_number"},
        {"name": "number", "weight": 0.3, "options": {"tolerance": 10}},
    ],
}


def config(args: argparse.Namespace, folder: str) -> Any:
    rows = str(args.rows)
    tree: dict[str, Any] = {
        "model": {"path": args.model, "compile": args.compile},
        "algorithm": {"name": "grpo"},
        "data": {
            "source": rows,
            "columns": {"answer": "a"},
            "template": TEMPLATE,
            "where": {"split": "train"},
            "eval": {"source": rows, "where": {"split": "test"}},
        },
        "rewards": [{"name": "exact_number"}],
        "rollout": {"temperature": 1.0, "max_new_tokens": 64, "max_batch": 2048},
        "train": {},
        "eval": {"every": args.every},
        "run": {
            "dir": folder,
            "seed": args.seed,
            "checkpoint": {"every": 0},
            "log": {"samples_every": 0},
        },
    }
    if args.seconds:
        tree["run"]["max_seconds"] = args.seconds
    settings = dict(ANCHOR if args.recipe == "anchor" else BEST)
    settings.update(
        {key: yaml.safe_load(value) for key, value in (s.split("=", 1) for s in args.set)}
    )
    for key, value in settings.items():
        place = tree
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return config_from_dict(tree)


def curve(folder: str) -> list[dict[str, float]]:
    """[step, seconds of training so far, accuracy, entropy ...] at every evaluation."""
    seconds = 0.0
    points = []
    newest = {}
    for line in read_lines(Path(folder) / "metrics.jsonl"):
        seconds += sum(
            line.get(f"time/{phase}", 0.0)
            for phase in ("generate", "reward_wait", "prepare", "annotate", "train")
        )
        newest |= {
            k: line[k]
            for k in ("policy/entropy", "reward/mean", "groups/zero_variance", "tokens/sampled")
            if k in line
        }
        if "eval/accuracy" in line:
            points.append(
                {
                    "step": line["step"],
                    "seconds": seconds,
                    "accuracy": line["eval/accuracy"],
                    **newest,
                }
            )
    return points


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--recipe", choices=("anchor", "best"), default="anchor")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="stop at the first evaluation after this many seconds of training",
    )
    parser.add_argument(
        "--target",
        type=float,
        default=113 / 512,
        help="accuracy; default: TRL's 22.1%% of 512 questions",
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--peer-python", default="")
    parser.add_argument("--peer-path", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = tempfile.mkdtemp()
    cfg = config(args, folder)
    train_config(cfg, view=Quiet())
    points = curve(folder)
    for point in points:
        print(json.dumps({k: round(v, 4) for k, v in point.items()}))
    within = [p for p in points if not args.seconds or p["seconds"] <= args.seconds]
    reached = next((p["seconds"] for p in points if p["accuracy"] >= args.target), None)
    best = max(within, key=lambda p: p["accuracy"])
    result = {
        "recipe": args.recipe,
        "seed": args.seed,
        "settings": args.set,
        "target": args.target,
        "seconds_to_target": reached,
        "best": best,
        "curve": points,
        "peers": [],
    }
    print(
        f"{args.target:.1%} after {reached if reached is None else round(reached, 1)} s; best"
        f" {best['accuracy']:.1%} after {best['seconds']:.0f} s"
    )
    if args.peer_python:
        # as many steps as ours, unless ours go on until the time is over
        steps = cfg.train.steps if args.recipe == "anchor" else ANCHOR["train.steps"]
        asked = (args.model, str(args.rows), str(steps))
        result["peers"] = run_peer(args.peer_python, args.peer_path, "trl_learn.py", *asked)
        print(json.dumps(result["peers"]))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


class Quiet(NoView):
    """A view that shows only messages."""

    def message(self, text: str) -> None:
        print(text)


if __name__ == "__main__":
    main()
