"""Kill a run at random moments, resume it, and see whether it comes out bit-identical.

    python benchmarks/kill_resume.py --kills 20 --seed 0
    python benchmarks/kill_resume.py --algorithm sft --subprocesses 20
    python benchmarks/kill_resume.py --device cuda --model MODEL --kills 10 --jobs 5 [--adapter]

An uninterrupted run is the yardstick. Then, for each kill: a fresh run directory, start, SIGKILL at
a random moment (uniform over what the uninterrupted run took after its start-up), the same command
again until it ends. In a third of the trials the resumed process is killed too, at any moment of
its life, start-up included. Compared are the digest of the last checkpoint (weights, optimizer,
cursor, counters), every metric of every step (each exactly once), and every recorded sample.

Then one kill at each named point of a save and of a step (REINFORGE_CRASH_AT). Exits with 1 unless
everything is equal.

On a GPU: a model of yours in bfloat16 with micro-batches and a cache of a given size, because
--jobs trials share the memory; then --repeats whole runs one after another with nothing set.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from helpers import cli_runs  # noqa: E402

STEPS = {"grpo": 14, "ppo": 14, "sft": 40}  # SFT steps are shorter
# on a GPU: a real batch, sizes that do not depend on what others leave of the memory
ON_GPU = {
    "rollout": {"max_new_tokens": 64, "kv_gib": 2},
    "train": {"prompts_per_step": 16, "learning_rate": 1e-5, "tokens_per_microbatch": 8192},
    "algorithm": {"group_size": 8},
}
AS_THEY_ARE: dict[str, Any] = {
    "rollout": {"max_new_tokens": 64, "kv_gib": None},
    "train": {"prompts_per_step": 16, "learning_rate": 1e-5},
    "algorithm": {"group_size": 8},
}
POINTS = (
    "save:after-tensors@1",
    "save:after-tensors@4",
    "save:before-rename@1",
    "save:before-rename@3",
    "save:after-rename@1",
    "save:after-rename@5",
    "prune:middle@1",
    "prune:middle@3",
    "step:end@1",
    "step:end@5",
    "step:end@6",
)
# seconds of one run on a GPU, where several that compile the same kernels wait for each other
COMPILING = 600.0
AGAIN = 1 / 3  # share of trials whose resumed process is killed as well


@dataclass
class Bench:
    folder: Path
    config: Path
    steps: int
    startup: float = 0.0  # of a forked run, seconds
    seconds: float = 0.0  # from the start-up's end to the run's end
    env: Mapping[str, str] = field(default_factory=dict)
    limit: float = cli_runs.TIMEOUT  # seconds of one run

    def start(self, name: str, forked: bool, **env: str) -> cli_runs.Started:
        return cli_runs.start(
            self.command(name), self.folder, env={**self.env, **env}, forked=forked
        )

    def command(self, name: str) -> list[str]:
        return ["train", str(self.config), f"run.dir={name}"]

    def measure(self) -> cli_runs.Evidence:
        """The uninterrupted run, as a user starts it; then once forked, for the times (and it must
        be equal already).
        """
        # the first fork waits for the server's imports
        cli_runs.start(["--version"], self.folder, env=self.env, forked=True).wait()
        for name, forked in (("whole", False), ("whole-forked", True)):
            print(f"a whole run {'as a fork' if forked else 'as a process'} begins", flush=True)
            process = self.start(name, forked)
            process.until((self.folder / name / "events.jsonl").exists, self.limit)
            self.startup = time.monotonic() - process.began
            if process.wait(self.limit) != 0:
                raise SystemExit(f"the uninterrupted run failed:\n{process.output()}")
            events = cli_runs.lines(self.folder / name / "events.jsonl")
            self.seconds = events[-1]["time"] - events[0]["time"]
        expected = cli_runs.evidence(self.folder / "whole")
        found = cli_runs.differences(self.folder / "whole-forked", expected, self.steps)
        if found:
            raise SystemExit(f"two uninterrupted runs differ: {'; '.join(found)}")
        return expected

    def trial(
        self, name: str, forked: bool, expected: cli_runs.Evidence, seed: int
    ) -> tuple[str, list[str]]:
        """One run that is killed, perhaps twice, and resumed to its end: (what happened, what
        differs).
        """
        rng = random.Random(seed)
        run_dir = self.folder / name
        kills = []
        while not kills:
            process = self.start(name, forked)
            process.until((run_dir / "events.jsonl").exists, self.limit)
            at = rng.uniform(0.0, self.seconds)
            time.sleep(at)
            if process.kill() == -signal.SIGKILL:
                kills.append(f"{at:5.2f} s, step {last_step(run_dir):2d}")
            else:  # it was faster than the yardstick: once more, from nothing
                name += "x"
                run_dir = self.folder / name
        if rng.random() < AGAIN:
            process = self.start(name, True)
            time.sleep(rng.uniform(0.0, self.startup + self.seconds / 2))
            if process.kill() == -signal.SIGKILL:
                kills.append(f"again at step {last_step(run_dir):2d}")
        return "; ".join(kills), self.finish(name, forked, expected)

    def finish(self, name: str, forked: bool, expected: cli_runs.Evidence) -> list[str]:
        process = self.start(name, forked)
        code = process.wait(self.limit)
        if code != 0:
            return [f"exit code {code}: {process.output()[-500:]}"]
        found = cli_runs.differences(self.folder / name, expected, self.steps)
        if not found:
            shutil.rmtree(self.folder / name)  # checkpoints of a real model take gigabytes
        return found

    def digest(self, name: str) -> str:
        """That of a whole run."""
        process = self.start(name, False)
        if process.wait(self.limit) != 0:
            raise SystemExit(f"a whole run failed:\n{process.output()}")
        return cli_runs.evidence(self.folder / name).digest

    def crash(self, point: str, expected: cli_runs.Evidence) -> list[str]:
        name = "crash-" + point.replace(":", "-").replace("@", "-")
        code = self.start(name, True, REINFORGE_CRASH_AT=point).wait(self.limit)
        return (
            self.finish(name, True, expected)
            if code == -signal.SIGKILL
            else [f"was not killed there (exit code {code})"]
        )


def last_step(run_dir: Path) -> int:
    """The newest step in the log of a killed run, whose last line may be torn."""
    path = run_dir / "metrics.jsonl"
    whole = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in whole if line.endswith("\n")), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", choices=sorted(STEPS), default="grpo")
    parser.add_argument(
        "--subprocesses",
        type=int,
        default=3,
        metavar="N",
        help="the first N trials run `python -m reinforge`, the others are forks",
    )
    parser.add_argument(
        "--points",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also kill at the named points",
    )
    parser.add_argument("--steps", type=int, help="of the run; default 14, of sft 40")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, help="directory of a model; default: a tiny one")
    parser.add_argument("--adapter", action="store_true", help="LoRA of rank 16")
    parser.add_argument("--jobs", type=int, default=1, help="trials at once")
    parser.add_argument("--repeats", type=int, default=0, help="whole runs with nothing set")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-resume-") as name:
        folder = Path(name)
        steps = args.steps or STEPS[args.algorithm]
        model = args.model or cli_runs.make_model(folder)
        on_gpu = args.device == "cuda"
        env = {"CUDA_VISIBLE_DEVICES": "0"} if on_gpu else {}
        changes: dict[str, Any] = {"train": {"steps": steps}}
        if args.adapter:
            changes["adapter"] = {"rank": 16}
        if args.algorithm == "ppo":
            changes["critic"] = {}

        def config_of(name: str, sizes: Mapping[str, Any]) -> Path:
            asked = cli_runs.merged(sizes, changes) if on_gpu else changes
            return cli_runs.write_config(folder / name, model, args.algorithm, **asked)

        bench = Bench(folder, config_of("set", ON_GPU), steps, env=env)
        if on_gpu:
            bench.limit = COMPILING
        expected = bench.measure()
        print(
            f"{args.algorithm}: {steps} steps in {bench.seconds:.2f} s after a start-up of"
            f" {bench.startup:.2f} s, digest {expected.digest[:16]}",
            flush=True,
        )
        equal = points = 0

        def killed(i: int) -> tuple[str, list[str]]:
            return bench.trial(f"kill-{i}", i >= args.subprocesses, expected, args.seed * 1000 + i)

        with ThreadPoolExecutor(args.jobs) as pool:
            for i, (what, found) in enumerate(pool.map(killed, range(args.kills))):
                equal += not found
                print(
                    f"kill {i + 1:3d} ({'fork   ' if i >= args.subprocesses else 'process'}) at"
                    f" {what}: {'; '.join(found) or 'equal'}",
                    flush=True,
                )
        bench.config = config_of("default", AS_THEY_ARE)
        digests = {bench.digest(f"repeat-{i}") for i in range(args.repeats)}
        if args.repeats:
            print(f"{args.repeats} runs with nothing set: {len(digests)} different digests")
        for point in POINTS if args.points else ():
            found = bench.crash(point, expected)
            points += not found
            print(f"kill at {point}: {'; '.join(found) or 'equal'}", flush=True)
    print(
        f"{equal} of {args.kills} equal"
        + (f", and {points} of {len(POINTS)} at named points" if args.points else "")
    )
    return int(equal < args.kills or (args.points and points < len(POINTS)) or len(digests) > 1)


if __name__ == "__main__":
    sys.exit(main())
