"""What `model.exact` costs on the device at hand: generation and training with it and without, on a
random model of a known shape.

    python benchmarks/exact_cost.py [--shape tiny|0.5b|1.5b] [--prompts 64] [--response 1024]
                                    [--steps 3] [--out FILE]

Samples are 8 per prompt of 256 tokens, as in gpu_step.py, whose model, rollouts and packing this
uses. Defaults are the 0.5B shape on a GPU and the tiny one on a CPU. Prints seconds (the best of
the steps after the first), the slowdown, and the mismatch of each: 0.0 with exact.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import torch
from gpu_step import GROUP, PROMPT, SHAPES, random_model, rollouts, to_samples

from reinforge.algorithms.build import build
from reinforge.backends.local import LocalBackend
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Totals, pack
from reinforge.core.engine import Sampling
from reinforge.engines.native import NativeEngine
from reinforge.models.causal import CausalModel


def measure(
    shape: str, prompts: list[list[int]], response: int, steps: int, budget: int, exact: bool
) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = CausalModel(random_model(shape, device).module, exact=exact)
    engine = NativeEngine(model, max_batch=len(prompts) * GROUP, longest=PROMPT + response)
    backend = LocalBackend(
        model,
        TrainConfig(steps=steps, learning_rate=1e-6, tokens_per_microbatch=budget or "auto"),
        total_steps=steps,
    )
    algorithm = build("grpo", max_new_tokens=response)
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    rows = []
    for step in range(steps):
        sync()
        start = time.perf_counter()
        params = Sampling(response, ignore_eos=True)
        completions = asyncio.run(rollouts(engine, prompts, params, step))
        asyncio.run(engine.sleep())
        sync()
        generated = time.perf_counter()
        batches = pack(to_samples(prompts, completions), backend.budget, share=backend.share)
        algorithm.advantages(batches)
        prepared = time.perf_counter()
        metrics = (
            backend.forward_backward(batches, algorithm.loss, Totals.of(batches, response))
            | backend.step().metrics()
        )
        sync()
        rows.append(
            {
                "generate": generated - start,
                "train": time.perf_counter() - prepared,
                "mismatch_max": metrics["mismatch/max"],
            }
        )
        print(
            json.dumps({"exact": exact, **{k: round(v, 5) for k, v in rows[-1].items()}}),
            flush=True,
        )
    best = {k: min(r[k] for r in rows[1:] or rows) for k in ("generate", "train")}
    return {**best, "mismatch_max": max(r["mismatch_max"] for r in rows)}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5b" if on_gpu else "tiny")
    parser.add_argument("--prompts", type=int, default=64 if on_gpu else 2)
    parser.add_argument("--response", type=int, default=1024 if on_gpu else 16)
    parser.add_argument("--steps", type=int, default=3 if on_gpu else 2)
    parser.add_argument("--budget", type=int, default=0, help="tokens per micro-batch; 0 = auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts = torch.randint(
        10, 49000, (args.prompts, PROMPT), generator=torch.Generator().manual_seed(1)
    ).tolist()
    found = {
        exact: measure(args.shape, prompts, args.response, args.steps, args.budget, exact)
        for exact in (False, True)
    }
    slowdown = {k: found[True][k] / found[False][k] for k in ("generate", "train")}
    result = {
        "shape": args.shape,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "plain": found[False],
        "exact": found[True],
        "slowdown": slowdown,
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
