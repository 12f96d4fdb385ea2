"""One GPU: generation at several sizes, beside vLLM on the same machine.

    python benchmarks/gpu_generate.py --shape 7b --workloads long rows4 rows16 rows64
    python benchmarks/gpu_generate.py --shape 0.5b --workloads wide varied --peer-python PYTHON

A random model ends an answer with any of so many stop tokens that the mean length is about 1,000
(`varied`: 300); the engine knows the cap and nothing else, as in life. Until the last answer has
ended a synchronous step waits, so what counts is the time per token of the longest answer; tokens
per second say how the card was used on the way. Answers of `wide`, `fixed` and `rows` have one
length. Several rounds with other draws, of which the median counts; the first of them captures
graphs for the sizes that a warm-up of 40 tokens did not see. The floor is what it takes to read
weights and cache once per step, or to do the products. vLLM does the same in its own environment
(benchmarks/peers/vllm_generate.py, with its knobs).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_step import BANDWIDTH, FIRST_STOP, FLOPS, SHAPES, random_model, run_peer, stop_tokens

from reinforge.core.engine import Completion, Sampling
from reinforge.engines.native import NativeEngine
from reinforge.models.causal import CausalModel

ROUNDS = 5
WARM_UP = 40  # tokens


@dataclass(frozen=True)
class Workload:
    """`stops` of about 152,000 tokens end an answer; 0: every answer has `cap` tokens."""

    prompts: int
    group: int
    prompt: int
    cap: int
    stops: int = 0


WORKLOADS = {
    "wide": Workload(prompts=64, group=8, prompt=256, cap=1024),
    "varied": Workload(prompts=64, group=8, prompt=256, cap=1024, stops=507),
    "fixed": Workload(prompts=32, group=8, prompt=256, cap=512),
    "long": Workload(prompts=32, group=8, prompt=256, cap=8192, stops=152),
    "long32k": Workload(prompts=32, group=8, prompt=256, cap=32768, stops=152),
    "rows4": Workload(prompts=4, group=1, prompt=256, cap=512),
    "rows16": Workload(prompts=2, group=8, prompt=256, cap=512),
    "rows64": Workload(prompts=8, group=8, prompt=256, cap=512),
    "smoke": Workload(prompts=2, group=2, prompt=8, cap=24, stops=3000),
}


def prompts_of(work: Workload) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(10, 49000, (work.prompts, work.prompt), generator=generator).tolist()


def sampling_of(work: Workload, cap: int) -> Sampling:
    if not work.stops:
        return Sampling(cap, ignore_eos=True)
    return Sampling(cap, stop_tokens=stop_tokens(work.stops))


def generate(
    engine: NativeEngine, work: Workload, prompts: list[list[int]], cap: int, step: int
) -> list[Completion]:
    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(
            *(
                engine.generate(prompt, sampling_of(work, cap), key=step * 1000 + i, n=work.group)
                for i, prompt in enumerate(prompts)
            )
        )

    return [completion for group in asyncio.run(all_of_them()) for completion in group]


def measure(model: CausalModel, name: str, rounds: int) -> dict[str, Any]:
    work = WORKLOADS[name]
    prompts = prompts_of(work)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    engine = NativeEngine(
        model, max_batch=work.prompts * work.group, longest=work.prompt + work.cap
    )
    generate(engine, work, prompts, min(WARM_UP, work.cap), 0)
    rows = []
    for step in range(1, rounds + 1):
        start = time.perf_counter()
        completions = generate(engine, work, prompts, work.cap, step)
        seconds = time.perf_counter() - start
        lengths = [len(completion.tokens) for completion in completions]
        floor = floor_of(model, work, lengths)
        rows.append({**row_of(seconds, lengths), "share_of_floor": floor / seconds})
    found = {
        "workload": name,
        **middle_of(rows),
        "share_of_floor": statistics.median(row["share_of_floor"] for row in rows),
        "preemptions": engine.stats.preemptions,
        "captures": engine.decoder.captures,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "rounds": rows,
    }
    asyncio.run(engine.sleep())
    return found


def floor_of(model: CausalModel, work: Workload, lengths: list[int]) -> float:
    """Seconds to read the weights once per step and every sequence's cache once per token of it, or
    to do the products, whichever takes longer.
    """
    c = model.config
    head = c.hidden_size // c.num_attention_heads
    per_token = 2 * c.num_hidden_layers * c.num_key_value_heads * head * model.dtype.itemsize
    weights = sum(p.numel() for p in model.module.parameters()) * model.dtype.itemsize
    if model.head.weight is not model.causal.get_input_embeddings().weight:
        weights -= model.head.weight.numel() * model.dtype.itemsize  # of which a step reads rows
    cache = sum(n * work.prompt + n * (n - 1) // 2 for n in lengths) * per_token
    flops = 2 * weights / model.dtype.itemsize * sum(lengths)
    return max((max(lengths) * weights + cache) / BANDWIDTH, flops / FLOPS)


def row_of(seconds: float, lengths: list[int]) -> dict[str, float]:
    return {
        "seconds": seconds,
        "tokens": sum(lengths),
        "longest": max(lengths),
        "tokens_per_second": sum(lengths) / seconds,
        "ms_per_token_of_the_longest": 1000 * seconds / max(lengths),
    }


def middle_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {
        key: statistics.median(row[key] for row in rows)
        for key in ("tokens_per_second", "ms_per_token_of_the_longest")
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["long", "fixed"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--peer-python", default="", help="an environment with vLLM; without it only ours runs"
    )
    parser.add_argument("--peer-path", default="", help="added to its PYTHONPATH")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(args.shape, device)
    if args.compile:
        model.compile_layers()
    ours = []
    for name in args.workloads:
        ours.append(measure(model, name, args.rounds))
        print(json.dumps(ours[-1]), flush=True)
    theirs: list[dict[str, Any]] = []
    if args.peer_python:
        theirs = peers_rounds(model, args)
    print(table(ours, theirs))
    if args.out:
        args.out.write_text(
            json.dumps({"shape": args.shape, "ours": ours, "peers": theirs}, indent=1)
        )


def peers_rounds(model: CausalModel, args: argparse.Namespace) -> list[dict[str, Any]]:
    """vLLM's figures. It makes random weights of its own: the times do not depend on them."""
    folder = Path(tempfile.mkdtemp())
    model.config.architectures = [type(model.module).__name__]
    model.config.save_pretrained(folder)
    workloads = {
        name: {
            **asdict(WORKLOADS[name]),
            "first_stop": FIRST_STOP,
            "prompt_ids": prompts_of(WORKLOADS[name]),
        }
        for name in args.workloads
    }
    (folder / "workloads.json").write_text(json.dumps(workloads))
    model.module.to("meta")
    gc.collect()
    torch.cuda.empty_cache()
    said = run_peer(
        args.peer_python,
        args.peer_path,
        "vllm_generate.py",
        str(folder),
        str(folder / "workloads.json"),
        str(args.rounds),
    )
    found = []
    for name in args.workloads:
        rows = [
            row_of(line["seconds"], line["lengths"]) for line in said if line["workload"] == name
        ]
        if rows:
            found.append({"workload": name, **middle_of(rows), "rounds": rows})
    return found


def table(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    lines = [
        "",
        "| workload | ms per token of the longest | tokens/s | of the floor | vLLM: ms | tokens/s"
        " | times |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    of_peer = {row["workload"]: row for row in theirs}
    for row in ours:
        mine = row["ms_per_token_of_the_longest"]
        told = "- | - | -"
        if peer := of_peer.get(row["workload"]):
            other = peer["ms_per_token_of_the_longest"]
            told = f"{other:.2f} | {peer['tokens_per_second']:,.0f} | {other / mine:.2f}"
        lines.append(
            f"| {row['workload']} | {mine:.2f} | {row['tokens_per_second']:,.0f} |"
            f" {row['share_of_floor']:.0%} | {told} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
