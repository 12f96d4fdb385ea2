"""One GPU: a real model learns to write functions that pass their tests, and the rewards are
computed while the GPU works.

    python benchmarks/gpu_code_reward.py MODEL [--seconds 150] [--staleness 2] [--compare 20]
                                         [--seed 0] [--set KEY=VALUE ...] [--out FILE]
    # a few steps of a model of random numbers, to see that it runs
    python benchmarks/gpu_code_reward.py --tiny

SmolLM2-135M-Instruct is asked for a Python function f(a, b) in words ("the larger of a and b, minus
7"). What it writes is run in the sandbox and called with numbers; all calls right: 1, otherwise 0.
Rows are made here (seeded); no constant of a held-out row occurs with the same words in training.
Greedy accuracy on 240 held-out rows is measured every few steps.

Seconds are those of training, all compiling and graph capture included; loading, evaluations and
checkpoints are not counted. `waits` is the share of those seconds in which everything was generated
and the GPU had nothing to do but wait for rewards (time/reward_wait). `idle_at_most` also counts
all of the generation phase in which the engine ran no round. --compare trains for so many seconds
more from the start with staleness 0, where each step waits for its own rewards.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.build.caller_objects import CallerObjects  # noqa: E402
from reinforge.build.run import train_config  # noqa: E402
from reinforge.config.load import config_from_dict  # noqa: E402
from reinforge.core.errors import InputError  # noqa: E402
from reinforge.loops.view import NoView  # noqa: E402
from reinforge.sandbox.detect import choose, missing  # noqa: E402
from reinforge.watch.runs import read_lines  # noqa: E402

PHASES = ("generate", "reward_wait", "prepare", "annotate", "train", "other")
PLACES = [(3, 5), (17, 4), (8, 8), (0, -6), (-11, 2), (40, 13)]  # where functions are called
SIMPLE = [  # words, expression
    ("a plus {k}", "a + {k}"),
    ("b minus {k}", "b - {k}"),
    ("{k} times a", "{k} * a"),
    ("b multiplied by {k}", "b * {k}"),
    ("a plus b plus {k}", "a + b + {k}"),
    ("{k} minus a", "{k} - a"),
]
HARDER = [
    ("a plus {k} times b", "a + {k} * b"),
    ("{k} times a minus b", "{k} * a - b"),
    ("the sum of a and b, multiplied by {k}", "(a + b) * {k}"),
    ("the product of a and b, plus {k}", "a * b + {k}"),
    ("the larger of a and b, minus {k}", "max(a, b) - {k}"),
    ("the smaller of a and b, times {k}", "min(a, b) * {k}"),
    ("a squared plus {k} times b", "a ** 2 + {k} * b"),
    ("the remainder of a divided by {k}, plus b", "a % {k} + b"),
    ("the absolute difference of a and b, plus {k}", "abs(a - b) + {k}"),
    ("{k} if a is greater than b, otherwise b", "{k} if a > b else b"),
]
SHOWN = [("the product of a and 3", "a * 3"), ("b minus 5", "b - 5")]  # answered in the prompt
CONSTANTS = range(2, 102)
HELD_OUT = 20  # constants of each kind of row that are never trained on


def ask(words: str) -> str:
    return f"Write a Python function f(a, b) that returns {words}."


def row(words: str, expression: str, k: int) -> dict[str, Any]:
    shown = [
        {"role": role, "content": text}
        for w, e in SHOWN
        for role, text in (
            ("user", ask(w)),
            ("assistant", f'```python\ndef f(a, b):\n    """Return {w}."""\n    return {e}\n```'),
        )
    ]
    names = {"max": max, "min": min, "abs": abs}
    tests = [
        [[a, b], eval(expression.format(k=k), {"__builtins__": names}, {"a": a, "b": b})]
        for a, b in PLACES
    ]
    return {
        "prompt": [*shown, {"role": "user", "content": ask(words.format(k=k))}],
        "tests": json.dumps(tests),
        "entry_point": "f",
    }


def rows(seed: int, held_out: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All rows in a random order: for training, and `held_out` others."""
    rng = random.Random(seed)
    train = []
    test = []
    for words, expression in SIMPLE + HARDER:
        constants = list(CONSTANTS)
        rng.shuffle(constants)
        made = [row(words, expression, k) for k in constants]
        test += made[:HELD_OUT]
        train += made[HELD_OUT:]
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test[:held_out]


def containment(allow_unsafe: bool) -> tuple[str, bool]:
    """What programs are run in here, in words, and whether that is no containment."""
    try:
        choose("namespaces")
        return "namespaces", False
    except InputError as error:
        if missing("bwrap") is None:
            return f"bubblewrap (namespaces: {missing('own')})", False
        if not allow_unsafe:
            raise SystemExit(
                f"{error}\nOr run this benchmark with --allow-unsafe: a 135M model's programs then"
                " run uncontained."
            ) from None
        return f"NOTHING: {error.what}", True


def config(
    args: argparse.Namespace, folder: str, staleness: int, seconds: float, box: tuple[str, bool]
) -> Any:
    backend = "bubblewrap" if box[0].startswith("bubblewrap") else "namespaces"
    options = {
        "timeout": args.timeout,
        "total_timeout": 2 * args.timeout,
        "memory_mb": 256,
        "workers": args.workers,
        "backend": backend,
        "allow_unsafe": box[1],
    }
    tree: dict[str, Any] = {
        "model": {"path": str(args.model)},
        "algorithm": {"name": "grpo", "group_size": 8},
        "data": {"source": "python", "eval": {"source": "python"}},
        "rewards": [{"name": "code", "options": options}],
        "rollout": {
            "temperature": 1.0,
            "max_new_tokens": 64,
            "max_batch": 1024,
            "staleness": staleness,
        },
        "train": {
            "prompts_per_step": 64,
            "learning_rate": 1e-5,
            "steps": 3 if args.tiny else 2000,
            "schedule": {"kind": "constant", "warmup": 5},
        },
        "eval": {"every": args.every},
        "run": {
            "dir": folder,
            "seed": args.seed,
            "checkpoint": {"every": 0},
            "log": {"samples_every": 0},
            "max_seconds": seconds,
        },
    }
    if args.tiny:
        (
            tree["train"]["prompts_per_step"],
            tree["rollout"]["max_new_tokens"],
            tree["eval"]["every"],
        ) = (
            4,
            24,
            2,
        )
        tree["model"]["device"] = "cpu"
    for setting in args.set:
        key, value = setting.split("=", 1)
        *path, last = key.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = json.loads(value) if value[:1] in "[{0123456789.tf" else value
    return config_from_dict(tree)


def measured(folder: str) -> dict[str, Any]:
    """The curve, and where the seconds of training went."""
    spent = dict.fromkeys(PHASES, 0.0)
    points = []
    newest = {}
    waits = []
    engine = 0.0
    steps = 0
    for line in read_lines(Path(folder) / "metrics.jsonl"):
        if "time/step" in line:
            steps += 1
            engine += line.get("efficiency/engine_seconds", 0.0)
            waits.append(line.get("time/reward_wait", 0.0))
            for phase in PHASES:
                spent[phase] += line.get(f"time/{phase}", 0.0)
            newest |= {
                k: line[k]
                for k in (
                    "reward/mean",
                    "policy/entropy",
                    "groups/zero_variance",
                    "response/length",
                    "mismatch/mean",
                )
                if k in line
            }
        if "eval/accuracy" in line:
            points.append(
                {
                    "step": line["step"],
                    "seconds": sum(spent.values()),
                    "accuracy": line["eval/accuracy"],
                    **newest,
                }
            )
    total = sum(spent.values())
    return {
        "curve": points,
        "steps": steps,
        "seconds": total,
        "phases": spent,
        "seconds_per_step": total / max(1, steps),
        "waits": spent["reward_wait"] / total if total else 0.0,
        "longest_wait": max(waits, default=0.0),
        "idle_at_most": (
            (spent["reward_wait"] + spent["generate"] - engine) / total if total else 0.0
        ),
    }


class Utilization:
    """Mean utilization of the GPU by nvidia-smi, where there is one."""

    def __enter__(self) -> Utilization:
        self.mean: float | None = None
        self._file = tempfile.TemporaryFile("w+")
        try:
            self._popen: subprocess.Popen[str] | None = subprocess.Popen(
                [
                    "nvidia-smi",
                    "--query-gpu=utilization.gpu",
                    "--format=csv,noheader,nounits",
                    "-lms",
                    "500",
                ],
                stdout=self._file,
                text=True,
            )
        except OSError:
            self._popen = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen is not None:
            self._popen.terminate()
            self._popen.wait()
            self._file.seek(0)
            values = [
                float(line) for line in self._file.read().split("\n") if line.strip().isdigit()
            ]
            self.mean = sum(values) / len(values) if values else None


def run(
    args: argparse.Namespace, staleness: int, seconds: float, box: tuple[str, bool]
) -> dict[str, Any]:
    folder, (train, test) = tempfile.mkdtemp(), rows(args.seed, 8 if args.tiny else 240)
    start = time.monotonic()
    with Utilization() as gpu:
        train_config(
            config(args, folder, staleness, seconds, box),
            CallerObjects(data=train, eval_data=test),
            view=Quiet(),
        )
    return {
        "staleness": staleness,
        **measured(folder),
        "utilization": gpu.mean,
        "wall_seconds": time.monotonic() - start,
    }


def tell(result: dict[str, Any]) -> None:
    for point in result["curve"]:
        print(json.dumps({k: round(v, 4) for k, v in point.items()}))
    first = result["curve"][0]
    last = result["curve"][-1]
    best = max(result["curve"], key=lambda p: p["accuracy"])
    print(
        f"staleness {result['staleness']}: accuracy {first['accuracy']:.1%} ->"
        f" {last['accuracy']:.1%} (best {best['accuracy']:.1%}) in {result['steps']} steps,"
        f" {result['seconds']:.0f} s; the GPU waited for rewards {result['waits']:.2%} of the time"
        f" (idle at most {result['idle_at_most']:.1%}, longest wait {result['longest_wait']:.2f}"
        f" s), {result['seconds_per_step']:.2f} s a step; phases "
        + json.dumps({k: round(v, 2) for k, v in result["phases"].items()})
        + f"; utilization {result['utilization']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=150.0, help="of training")
    parser.add_argument(
        "--compare",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="of training with staleness 0, for comparison",
    )
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument(
        "--workers",
        type=int,
        default=max(2, (os.cpu_count() or 2) * 3 // 2),
        help="programs at once",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=1.0,
        help="seconds for a call; a program that hangs holds its step for as long",
    )
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--allow-unsafe",
        action="store_true",
        help="run programs uncontained where nothing contains them, and say so",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tiny:
        from reinforge.models.tiny import make_tiny_model

        args.model = make_tiny_model(
            tempfile.mkdtemp(), width=32, layers=1, heads=2, kv_heads=2, context=1024, chat=True
        )
    elif args.model is None:
        parser.error("which model?")
    box = containment(args.allow_unsafe)
    print(f"programs are contained by: {box[0]}; {args.workers} at once", flush=True)
    result = run(args, args.staleness, args.seconds, box)
    tell(result)
    runs = [result]
    if args.compare:
        runs.append(run(args, 0, args.compare, box))
        tell(runs[-1])
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps(
                {
                    "model": args.model.name,
                    "seed": args.seed,
                    "settings": args.set,
                    "contained_by": box[0],
                    "runs": runs,
                },
                indent=1,
            )
        )


class Quiet(NoView):
    """A view that shows only messages."""

    def message(self, text: str) -> None:
        print(text, flush=True)


if __name__ == "__main__":
    main()
