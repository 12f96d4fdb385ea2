"""Runs recipes that come with reinforge, on a CPU with the model of `reinforge tiny`, and keeps
their curves for docs/gallery.md.

    python benchmarks/gallery.py [NAME ...] [--seeds 0 1 2] [--runs DIR]
                                 [--out benchmarks/results/gallery.json]
    python tools/gen_gallery.py        # writes the page and its pictures from the results

Results are added to `--out` as they come, and what is there is not run again. A run is the command
that the page shows, with a seed and a directory of its own. All start from one model (seed 0); the
one that plays a game has a longer context, the one that uses a tool is taught by
benchmarks/multi_turn.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.watch.runs import read_json, read_lines  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gallery.json"
DIGITS = 4  # of a number that is kept


@dataclass(frozen=True, slots=True)
class GalleryEntry:
    """One recipe of the gallery: what is run, and which numbers of it are shown."""

    family: str
    title: str
    use: str  # what it is for, in one line
    recipe: str
    curve: str  # a metric of every step
    held_out: str = "eval/accuracy"
    settings: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("tiny runs/tiny",)  # commands that are run once before it

    @property
    def commands(self) -> list[str]:
        """As a person types them."""
        train = " ".join(("train", f"recipe:{self.recipe}", *self.settings))
        return [f"reinforge {command}" for command in (*self.needs, train)]


TEACHER = (
    "tiny runs/tiny",
    "train recipe:algorithms/sft run.dir=runs/teacher-sft",
    "export runs/teacher-sft runs/teacher",
)
GAME = (
    "model.path=runs/tiny-1024",
    "model.device=cpu",
    "env.options.high=9",
    "env.options.guesses=4",
    "env.max_turns=4",
    "rollout.max_new_tokens=3",
    "train.learning_rate=1e-3",
    "train.steps=50",
    "train.prompts_per_step=16",
    "data.eval.size=64",
)
REWARD = "reward/mean"
SUPERVISED = "Supervised"
PAIRS = "Preferences"
ONLINE = "Reinforcement learning"
TEACHERS = "Distillation"
EPISODES = "Environments"

ENTRIES = {
    "sft": GalleryEntry(
        SUPERVISED, "SFT", "You have right answers to imitate.", "algorithms/sft", "train/loss"
    ),
    "dft": GalleryEntry(
        SUPERVISED,
        "DFT",
        "SFT that lets unlikely tokens of the data be unlikely.",
        "families/dft",
        "sft/nll",
    ),
    "dpo": GalleryEntry(
        PAIRS,
        "DPO",
        "You have pairs of a better and a worse answer.",
        "families/dpo",
        "rewards/accuracy",
    ),
    "orpo": GalleryEntry(
        PAIRS,
        "ORPO",
        "Pairs, no reference model, and no SFT before it.",
        "families/dpo",
        "preference/loss",
        "eval/loss",
        ("algorithm.name=orpo", "run.dir=runs/families/orpo"),
    ),
    "kto": GalleryEntry(
        PAIRS,
        "KTO",
        "Answers with a thumb up or down, and no pairs.",
        "families/kto",
        "rewards/margin",
        "eval/margin",
    ),
    "qlora": GalleryEntry(
        PAIRS,
        "QLoRA + DPO",
        "The same with an adapter on a base in four bits.",
        "families/qlora",
        "rewards/accuracy",
    ),
    "reward_model": GalleryEntry(
        PAIRS,
        "Reward model",
        "A model that scores answers, learned from pairs.",
        "families/bradley_terry",
        "reward/accuracy",
    ),
    "online_dpo": GalleryEntry(
        PAIRS,
        "Online DPO",
        "Pairs that the reward makes of the model's own answers.",
        "families/online_dpo",
        REWARD,
    ),
    "grpo": GalleryEntry(
        ONLINE,
        "GRPO",
        "A reward you can compute; each answer is compared with others to the same prompt.",
        "algorithms/grpo",
        REWARD,
    ),
    "dr_grpo": GalleryEntry(
        ONLINE,
        "Dr. GRPO",
        "GRPO without its two divisions, which favour long wrong answers and easy prompts.",
        "algorithms/dr_grpo",
        REWARD,
    ),
    "dapo": GalleryEntry(
        ONLINE,
        "DAPO",
        "Prompts that are all right or all wrong are replaced by others.",
        "algorithms/dapo",
        REWARD,
    ),
    "gspo": GalleryEntry(
        ONLINE,
        "GSPO",
        "One ratio for each answer; for mixtures of experts.",
        "algorithms/gspo",
        REWARD,
    ),
    "rloo": GalleryEntry(
        ONLINE,
        "RLOO",
        "Plain REINFORCE, with the other answers as baseline.",
        "algorithms/rloo",
        REWARD,
    ),
    "ppo": GalleryEntry(
        ONLINE,
        "PPO with a critic",
        "Values token by token, where one sample per prompt is all you can afford.",
        "algorithms/ppo",
        REWARD,
    ),
    "rejection_sampling": GalleryEntry(
        ONLINE,
        "Rejection sampling",
        "Likelihood of the model's own right answers; nothing else to set.",
        "families/rejection_sampling",
        REWARD,
    ),
    "forward_kl": GalleryEntry(
        TEACHERS,
        "Distillation on given text",
        "A student learns the distributions of a teacher.",
        "families/forward_kl",
        "distillation/divergence",
        "eval/divergence",
        needs=TEACHER,
    ),
    "opd": GalleryEntry(
        TEACHERS,
        "On-policy distillation",
        "The teacher (here the model after SFT) judges every token that the student samples.",
        "families/opd",
        "policy/teacher_kl",
        needs=TEACHER,
    ),
    "game": GalleryEntry(
        EPISODES,
        "A game of several turns",
        "The model guesses a number and hears “higher” or “lower”.",
        "guess_number",
        REWARD,
        settings=GAME,
        needs=("tiny runs/tiny-1024 --context 1024",),
    ),
}


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run, in `folder`."""
    entry = ENTRIES[name]
    for command in entry.needs:
        made = folder / command.split()[-1] if command.startswith("export") else None
        _once(folder, command.split(), made)
    directory = folder / "seeds" / f"{name}-{seed}"
    began = time.monotonic()
    used = _used()
    own = (f"run.seed={seed}", f"run.dir={directory}")
    settings = [each for each in entry.settings if not each.startswith("run.dir=")]
    _command(folder, "train", f"recipe:{entry.recipe}", *settings, *own)
    return measured(entry, directory) | {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(_used() - used, 1),
    }


def measured(entry: GalleryEntry, directory: Path) -> dict[str, Any]:
    """Of a run that is done: the curve, and what was measured on rows held out."""
    lines = list(read_lines(directory / "metrics.jsonl"))
    held_out = [line for line in lines if entry.held_out in line]
    return {
        "curve": [
            [line["step"], _short(line[entry.curve])] for line in lines if entry.curve in line
        ],
        "held_out": [[line["step"], _short(line[entry.held_out])] for line in held_out],
        "n": read_json(directory / "config.json")["data"]["eval"]["size"] if held_out else 0,
    }


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _once(folder: Path, command: list[str], made: Path | None) -> None:
    """What another entry has made already is left as it is."""
    target = made or folder / next(
        (word.removeprefix("run.dir=") for word in command if word.startswith("run.dir=")),
        command[1],
    )
    if not target.exists():
        _command(folder, *command)


def _command(folder: Path, *words: object) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    line = [sys.executable, "-m", "reinforge", *map(str, words)]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _used() -> float:
    """CPU seconds of the commands that have ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def processor() -> str:
    """The name of this machine's processor."""
    try:
        told = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.machine()
    named = [line.split(":")[1].strip() for line in told.splitlines() if "Model name" in line]
    return f"{named[0]} ({platform.machine()})" if named else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENTRIES)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, help="keep the runs there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": processor(), "entries": {}}
    if args.out.exists():
        found = json.loads(args.out.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="reinforge-gallery-") as folder:
        runs = (args.runs or Path(folder)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        for seed in args.seeds:
            for name in args.names or ENTRIES:
                done = found["entries"].setdefault(name, [])
                if any(each["seed"] == seed for each in done):
                    continue
                result = run(name, seed, runs)
                done.append(result)
                args.out.write_text(_json(found), encoding="utf-8")
                print(name, seed, result["held_out"], f"{result['cpu_seconds']} s", flush=True)


def _json(found: dict[str, Any]) -> str:
    """A line for each run: its curve is no hundred lines long."""
    runs = ",\n".join(
        f'  "{name}": [\n   ' + ",\n   ".join(json.dumps(each) for each in done) + "\n  ]"
        for name, done in found["entries"].items()
    )
    return f'{{\n "machine": {json.dumps(found["machine"])},\n "entries": {{\n{runs}\n }}\n}}\n'


if __name__ == "__main__":
    main()
