"""One GPU: tokens per second of generation, beside vLLM on the same machine.

    python benchmarks/gpu_generate.py --compile --peer-python PYTHON --tokenizer DIR [--out FILE]

64 prompts of 256 tokens x 8 samples of a random Qwen2.5-0.5B-shaped model at temperature 1,
log-probs of the sampled tokens included. Two workloads: every response has 1024 tokens; and lengths
as they occur, geometric with mean 300 and a cap of 1024. vLLM runs the same prompts and lengths in
its own environment (benchmarks/peers/vllm_generate.py, with its knobs). The best of three rounds
counts for us; vLLM is warmed up before its one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_step import (
    GROUP,
    PROMPT,
    PROMPTS,
    SHAPES,
    floors,
    lengths_of,
    prompts_of,
    random_model,
    rollouts,
    run_peer,
    save_for_peer,
)

from reinforge.engines.native import NativeEngine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--peer-python", default="", help="an environment with vLLM; without it only ours runs"
    )
    parser.add_argument("--peer-path", default="")
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(args.shape, device)
    if args.compile:
        model.compile_layers()
    prompts = prompts_of()
    limits = {kind: lengths_of(kind, args.response) for kind in ("fixed", "varied")}
    engine = NativeEngine(model, max_batch=PROMPTS * GROUP, longest=PROMPT + args.response)
    rows: list[dict[str, Any]] = []
    for kind, wanted in limits.items():
        seconds = []
        for step in range(3):
            start = time.perf_counter()
            asyncio.run(rollouts(engine, prompts, wanted, step))
            seconds.append(time.perf_counter() - start)
        tokens = sum(map(sum, wanted))
        floor = floors(model, tokens / (PROMPTS * GROUP))["generate"]
        rows.append(
            {
                "lengths": kind,
                "tokens": tokens,
                "seconds": min(seconds),
                "first_seconds": seconds[0],
                "tokens_per_second": tokens / min(seconds),
                "share_of_floor": floor / min(seconds),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    peers: list[dict[str, Any]] = []
    if args.peer_python:
        work = Path(tempfile.mkdtemp())
        save_for_peer(model, args.tokenizer, work / args.shape)
        (work / "workload.json").write_text(json.dumps({"prompts": prompts, "limits": limits}))
        del engine, model
        gc.collect()
        torch.cuda.empty_cache()
        peers = run_peer(
            args.peer_python,
            args.peer_path,
            "vllm_generate.py",
            str(work / args.shape),
            str(work / "workload.json"),
        )
    print(
        "\n| lengths | reinforge tokens/s | share of the physical limit | vLLM tokens/s | times"
        " faster |\n|---|--:|--:|--:|--:|"
    )
    for row in rows:
        theirs = next(
            (p["tokens_per_second"] for p in peers if p["lengths"] == row["lengths"]), None
        )
        told = f"{theirs:,.0f} | {row['tokens_per_second'] / theirs:.1f}" if theirs else "- | -"
        print(
            f"| {row['lengths']} | {row['tokens_per_second']:,.0f} | {row['share_of_floor']:.0%} |"
            f" {told} |"
        )
    if args.out:
        args.out.write_text(
            json.dumps(
                {
                    "shape": args.shape,
                    "compile": args.compile,
                    "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                    "ours": rows,
                    "peers": peers,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
