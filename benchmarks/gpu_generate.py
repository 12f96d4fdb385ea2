"""One GPU: generation at several sizes, beside vLLM on the same machine.

    python benchmarks/gpu_generate.py --shape 7b --workloads long rows4 rows16 rows64
    python benchmarks/gpu_generate.py --shape 0.5b --workloads wide varied --peer-python PYTHON
    python benchmarks/gpu_generate.py --shape 0.5b --workloads wide long --exact
    python benchmarks/gpu_generate.py --shape 7b --workloads rows4 --precision fp8

A random model ends an answer with any of so many stop tokens that the mean length is about 1,000
(`varied`: 300); the engine knows the cap and nothing else, as in life. Until the last answer has
ended a synchronous step waits, so what counts is the time per token of the longest answer; tokens
per second say how the card was used on the way. Answers of `wide`, `fixed` and `rows` have one
length. Several rounds with other draws, of which the median counts; the first of them captures
graphs for the sizes that a warm-up of 40 tokens did not see. The floor is what it takes to read
weights and cache once per step, or to do the products. The mismatch is the mean difference of
log-probs between the engine and the trainer's forward, in the precision of the model and with
products in FP8 (`train.precision`). vLLM does the same in its own environment
(benchmarks/peers/vllm_generate.py, with its knobs). --exact does every workload a second time with
`model.exact` and tells how many times as long it took. --out adds what was measured to a file
(generation_results.py says what is in it); plot_gpu.py draws it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from generation_results import GenerationResult, Round, add_results, exact_costs, table
from gpu_step import (
    BANDWIDTH,
    FIRST_STOP,
    FLOPS,
    KINDS,
    SHAPES,
    cache_numbers,
    random_model,
    run_peer,
    state_bytes,
    stop_tokens,
    weights_read,
)

from reinforge.config.base import Precision
from reinforge.core.batch import Batch
from reinforge.core.engine import Completion, Sampling
from reinforge.core.sample import Sample
from reinforge.engines.native import NativeEngine
from reinforge.models import fp8_layers
from reinforge.models.causal import CausalModel
from reinforge.models.fp8_layers import Fp8Layers

ROUNDS = 5
WARM_UP = 40  # tokens
# answers that are compared with the trainer, and tokens of each
COMPARED = 8
BEGINNING = 512
# --profile: tokens of each answer, and lines of the table
PROFILED = 72
KERNELS = 28


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


@dataclass(frozen=True)
class Numbers:
    """In which precision the engine computes, and keeps keys and values."""

    precision: Precision = "model"
    cache_precision: Precision = "model"


def mismatch_of(
    model: CausalModel,
    shape: str,
    work: Workload,
    prompts: list[list[int]],
    completions: list[Completion],
) -> dict[str, float]:
    """Mean |log-prob of the engine - that of the trainer| over the beginnings of some answers, by
    the precision of the trainer's products, and the largest.
    """
    every = max(1, len(completions) // COMPARED)
    found = {}
    sources: list[tuple[str, Any]] = [("model", "plain"), ("fp8", "fresh")]
    if shape in KINDS or model.exact:  # not all matrices of a kind are linear layers
        sources = sources[:1]
    for name, source in sources:
        gaps = []
        for i in range(0, len(completions), every):
            prompt = prompts[i // work.group]
            said = completions[i].tokens[:BEGINNING]
            trained = [False] * len(prompt) + [True] * len(said)
            sample = Sample.from_tokens("answer", [*prompt, *said], trained)
            using = nullcontext() if source == "plain" else _fp8(model).using(source)
            with torch.no_grad(), using:
                batch = Batch.pack([sample]).to(model.device)
                theirs = model.logprobs(batch, temperature=1.0)[0].cpu()
            ours = torch.tensor(completions[i].logprobs[:BEGINNING])
            gaps.append((ours - theirs).abs())
        found[f"mismatch_{name}"] = float(torch.cat(gaps).mean())
        found[f"mismatch_{name}_max"] = float(torch.cat(gaps).max())
    fp8_layers.plain(model.module)
    return found


def _fp8(model: CausalModel) -> Fp8Layers:
    return Fp8Layers.of(model, "--precision")


def kernels_of(work: Callable[[], Any]) -> str:
    """The kernels that take most of it, microseconds of one and how many there were."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    spent = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    whole = sum(row.device_time_total for row in spent)
    rows = [
        f"{row.device_time_total / whole:6.1%} {row.device_time_total / row.count:9.1f} us"
        f" x {row.count:6d}  {row.key[:90]}"
        for row in spent[:KERNELS]
    ]
    return "\n".join([f"{whole / 1000:.1f} ms of kernels in {PROFILED} tokens", *rows])


def measure(
    model: CausalModel, shape: str, name: str, rounds: int, numbers: Numbers, profiled: bool = False
) -> GenerationResult:
    """Ours."""
    work = WORKLOADS[name]
    prompts = prompts_of(work)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    engine = NativeEngine(
        model,
        max_batch=work.prompts * work.group,
        longest=work.prompt + work.cap,
        **asdict(numbers),
    )
    generate(engine, work, prompts, min(WARM_UP, work.cap), 0)
    found = []
    for key in range(1, rounds + 1):
        start = time.perf_counter()
        completions = generate(engine, work, prompts, work.cap, key)
        seconds = time.perf_counter() - start
        lengths = [len(completion.tokens) for completion in completions]
        found.append(round_of(model, work, key, seconds, lengths, numbers))
    result = GenerationResult(
        engine="reinforge",
        shape=shape,
        variant=variant_of(model, numbers),
        workload=name,
        device=device_name(model),
        rounds=found,
        details={
            "preemptions": engine.stats.preemptions,
            "captures": engine.decoder.captures,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        },
    )
    if profiled:
        print(kernels_of(lambda: generate(engine, work, prompts, PROFILED, rounds + 1)), flush=True)
    asyncio.run(engine.sleep())
    result.details.update(mismatch_of(model, shape, work, prompts, completions))
    return result


def variant_of(model: CausalModel, numbers: Numbers) -> str:
    precision = {torch.bfloat16: "bf16", torch.float32: "fp32"}[model.dtype]
    if numbers.precision == "fp8":
        precision = "fp8"
    cache = "fp8 cache" if numbers.cache_precision == "fp8" else ""
    compiled = any(layer._compiled_call_impl is not None for layer in model.layers)
    told = [precision, cache, "compiled" if compiled else "", "exact" if model.exact else ""]
    return " ".join(word for word in told if word)


def device_name(model: CausalModel) -> str:
    return torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"


def round_of(
    model: CausalModel,
    work: Workload,
    key: int,
    seconds: float,
    lengths: list[int],
    numbers: Numbers,
) -> Round:
    floor = floor_of(model, work, lengths, numbers)
    return Round(key, seconds, sum(lengths), max(lengths), floor)


def floor_of(
    model: CausalModel,
    work: Workload,
    lengths: list[int],
    numbers: Numbers,
) -> float:
    """Seconds to read the weights once per step (of experts the fewest that it can need) and every
    sequence's cache once per token of it, or to do the products (in FP8 twice as many a second),
    whichever takes longer.
    """
    per_token = cache_numbers(model) * model.dtype.itemsize
    if numbers.cache_precision == "fp8":
        head = model.config.hidden_size // model.config.num_attention_heads
        per_token = cache_numbers(model) * (head + 4) // head
    weights = weights_read(model) * model.dtype.itemsize
    if model.head.weight is not model.causal.get_input_embeddings().weight:
        weights -= model.head.weight.numel() * model.dtype.itemsize  # of which a step reads rows
    cache = sum(n * work.prompt + n * (n - 1) // 2 for n in lengths) * per_token
    cache += sum(lengths) * state_bytes(model)
    seconds = 2 * weights_read(model) * sum(lengths) / FLOPS
    if numbers.precision == "fp8":
        weights -= sum(p.numel() for p in model.layers.parameters()) * (model.dtype.itemsize - 1)
        seconds /= 2
    return max((max(lengths) * weights + cache) / BANDWIDTH, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["long", "fixed"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--exact", action="store_true", help="a second time with model.exact")
    parser.add_argument("--profile", action="store_true", help="print what takes the time")
    parser.add_argument("--precision", choices=get_args(Precision), default="model")
    parser.add_argument("--cache-precision", choices=get_args(Precision), default="model")
    parser.add_argument(
        "--peer-python", default="", help="an environment with vLLM; without it only ours runs"
    )
    parser.add_argument("--peer-path", default="", help="added to its PYTHONPATH")
    parser.add_argument("--out", type=Path, help="a file of results, to which these are added")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(args.shape, device)
    if args.compile:
        model.compile_layers()
    models = [model, CausalModel(model.module, exact=True)] if args.exact else [model]
    numbers = Numbers(args.precision, args.cache_precision)
    results = []
    for name in args.workloads:
        for one in models:
            results.append(
                measure(one, args.shape, name, args.rounds, numbers, profiled=args.profile)
            )
            tell(results[-1], args.out)
    if args.peer_python:
        results += peers_rounds(model, args)
    print("\n".join([table(results), *exact_costs(results)]))
    if args.out:
        add_results(args.out, results)


def tell(result: GenerationResult, out: Path | None) -> None:
    """At once: a call may be cut short."""
    print(json.dumps(asdict(result)), flush=True)
    if out:
        add_results(out, [result])


def peers_rounds(model: CausalModel, args: argparse.Namespace) -> list[GenerationResult]:
    """vLLM's figures. It makes random weights of its own, for the times do not depend on them; but
    those of a mixture do, for they say how many experts some tokens need together.
    """
    folder = Path(tempfile.mkdtemp())
    device = device_name(model)
    model.config.architectures = [type(model.module).__name__]
    # positions of images, which the text model has no use for and vLLM would ask it about
    (model.config.rope_parameters or {}).pop("mrope_section", None)
    model.config.save_pretrained(folder)
    if getattr(model.config, "num_experts", None):
        model.module.save_pretrained(folder)
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
    return [
        peers_result(model, args.shape, name, device, lines)
        for name in args.workloads
        if (lines := [line for line in said if line["workload"] == name])
    ]


def peers_result(
    model: CausalModel, shape: str, name: str, device: str, lines: list[dict[str, Any]]
) -> GenerationResult:
    """From what its script printed, one line per round."""
    rounds = [
        round_of(model, WORKLOADS[name], key, line["seconds"], line["lengths"], Numbers())
        for key, line in enumerate(lines, start=1)
    ]
    return GenerationResult(
        engine=lines[0]["peer"],
        shape=shape,
        variant="bf16",
        workload=name,
        device=device,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
