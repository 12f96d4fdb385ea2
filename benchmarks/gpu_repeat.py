"""One GPU: whether a training step has the same bits twice, and what that costs.

    python benchmarks/gpu_repeat.py [--shape 0.5b] [--compile]
    python benchmarks/gpu_repeat.py --shape tiny     # that it runs, on a CPU

Answers of random lengths, eight to a prompt, packed with their prompts shared and without; each
pack goes forward and backward several times from the same weights. Prints for each way how many
gradients differ, the largest difference, and the seconds of a pass.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from gpu_step import SHAPES, random_model

from reinforge.algorithms.build import build
from reinforge.backends.local import LocalBackend
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Totals, pack
from reinforge.core.sample import Sample


def samples_of(prompts: int, group: int, prompt: int, response: int) -> list[Sample]:
    random = torch.Generator().manual_seed(3)
    found = []
    for i in range(prompts):
        head = torch.randint(10, 49000, (prompt,), generator=random)
        for j in range(group):
            length = int(torch.randint(response // 4, response + 1, (1,), generator=random))
            tokens = torch.cat([head, torch.randint(10, 49000, (length,), generator=random)])
            found.append(
                Sample(
                    f"{i}/{j}",
                    str(i),
                    f"{i}/{j}",
                    tokens,
                    torch.arange(len(tokens)) >= prompt,
                    torch.full((len(tokens),), -10.0),
                    torch.zeros(len(tokens), dtype=torch.int32),
                    reward=float(j % 3),
                )
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--prompts", type=int, default=16)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(args.shape, device)
    if args.compile:
        model.compile_layers()
    size = (args.prompts, 8, 256, 1024) if device.type == "cuda" else (2, 8, 16, 32)
    backend = LocalBackend(
        model, TrainConfig(steps=1, learning_rate=1e-6, deterministic=True), total_steps=1
    )
    algorithm = build("grpo", max_new_tokens=size[-1])
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    for shared in (True, False):
        batches = pack(samples_of(*size), backend.budget, share=shared)
        algorithm.advantages(batches)
        totals = Totals.of(batches, size[-1])
        for on in (False, True):
            backend.determinism.on = on and device.type == "cuda"
            passes = []
            seconds = []
            for _ in range(4):
                sync()
                start = time.perf_counter()
                backend.forward_backward(batches, algorithm.loss, totals)
                sync()
                seconds.append(time.perf_counter() - start)
                passes.append([g.clone() for g in backend.optimizer.gradients()])
                backend.optimizer.zero()
            differ = [
                name
                for k, name in enumerate(backend.optimizer.parameters)
                if any(not torch.equal(passes[0][k], other[k]) for other in passes[1:])
            ]
            print(
                json.dumps(
                    {
                        "shared": shared,
                        "deterministic": on,
                        "differ": len(differ),
                        "of": len(passes[0]),
                        "first": differ[-3:],
                        "seconds": [round(s, 4) for s in seconds],
                        "tokens": sum(b.n_tokens for b in batches),
                        "packs": len(batches),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
