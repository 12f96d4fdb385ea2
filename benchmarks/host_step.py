"""What a GRPO step costs on the host: everything but generating and training.

    python benchmarks/host_step.py [--prompts 64] [--response 1024] [--rounds 3]
    python benchmarks/host_step.py --beside ANOTHER_CHECKOUT    # and how much longer that one takes

`reinforge train` as a user runs it, in a process of its own, with a tiny model, an engine that has
its answers at once (random ids) and a backend that moves packs and computes nothing. What is left
is what a GPU waits for: texts, rewards, samples, packs, advantages, records. One thread of torch:
on a machine that others use its threads wait for each other.

Prints one JSON line: for each checkout the seconds of a step and of its phases, the median over
all steps but the first of every round, rounds of both checkouts in turn; and the ratio. `generate`
holds the time that the stand-in needs for random numbers, `drawing`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACK = 20480  # tokens of a micro-batch, as on an H200


def stand_in() -> list[float]:
    """Replaces the engine's and the backend's work; the seconds of drawing, one for each call."""
    import numpy as np

    from reinforge.backends.local import LocalBackend
    from reinforge.core import engine as core_engine
    from reinforge.core.engine import Completion
    from reinforge.core.report import StepReport
    from reinforge.core.sample import Stop
    from reinforge.engines.native.engine import NativeEngine

    rng = np.random.default_rng(0)
    drawing: list[float] = []
    arrays: Any = getattr(core_engine, "SampledArrays", None)  # another checkout may have none

    async def generate(self: Any, tokens: Any, params: Any, *, key: int, n: int = 1) -> Any:
        start = time.perf_counter()
        count = params.max_new_tokens
        answers = []
        for _ in range(n):
            ids = rng.integers(10, 49000, count)
            logprobs = (-rng.random(count)).astype(np.float32)
            versions = [self.version] * count
            made = Completion(ids.tolist(), logprobs.tolist(), versions, Stop.LENGTH)
            if arrays:  # as from a GPU
                made = replace(made, sampled=arrays(ids, logprobs))
            answers.append(made)
        drawing.append(time.perf_counter() - start)
        return answers

    def forward_backward(self: Any, batches: Any, loss: Any, totals: Any) -> dict[str, Any]:
        for batch in batches:
            batch.to(self.model.device)
        return {}

    def step(self: Any) -> StepReport:
        self.steps += 1
        report = self.recovery.report()
        return StepReport(grad_norm=1.0, learning_rate=0.0, out_of_memory=report)

    engine: Any = NativeEngine
    backend: Any = LocalBackend
    engine.generate = generate
    backend.forward_backward = forward_backward
    backend.step = step
    return drawing


def child(config: str, run: str) -> None:
    """One run in this process, from the checkout on the path."""
    import torch

    from reinforge.cli.main import main

    torch.set_num_threads(1)
    drawing = stand_in()
    sys.argv = ["reinforge", "train", config, f"run.dir={run}"]
    sys.argv += [f"train.tokens_per_microbatch={PACK}", "eval.every=0"]
    code = main()
    (Path(run) / "drawing.json").write_text(json.dumps(sum(drawing)))
    raise SystemExit(code)


def one_round(checkout: Path, config: Path, run: Path) -> list[dict[str, float]]:
    """The seconds of the phases of every step but the first."""
    shutil.rmtree(run, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(config), str(run)],
        env={
            **os.environ,
            "PYTHONPATH": str(checkout / "src"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    steps = [line for line in lines if "time/step" in line]
    drawing = json.loads((run / "drawing.json").read_text()) / len(steps)
    return [
        {k.removeprefix("time/"): v for k, v in line.items() if k.startswith("time/")}
        | {"drawing": drawing}
        for line in steps[1:]
    ]


def middle(steps: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for step in steps for name in step})
    return {name: round(median(step.get(name, 0.0) for step in steps), 4) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--response", type=int, default=1024, help="tokens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
    from gpu_train import prepare

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = argparse.Namespace(**vars(args), shape="tiny", sft=False, nf4=False)
        config = prepare(asked, folder)
        checkouts = {"here": ROOT} | ({"beside": args.beside.resolve()} if args.beside else {})
        steps: dict[str, list[dict[str, float]]] = {which: [] for which in checkouts}
        for _ in range(args.rounds):
            for which, checkout in checkouts.items():
                steps[which] += one_round(checkout, config, folder / f"run-{which}")
    result: dict[str, Any] = {
        "answers": args.prompts * args.group,
        "tokens": args.response,
        **{which: middle(found) for which, found in steps.items()},
    }
    if args.beside:
        own, other = (found["step"] - found["drawing"] for found in map(middle, steps.values()))
        result["ratio"] = round(other / own, 2)
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
