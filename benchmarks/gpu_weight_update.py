"""How long new weights take to reach a vLLM server on the trainer's GPU, each way that there is,
with the proof after every update.

    python benchmarks/gpu_weight_update.py [--channels ipc api memory] [--fp8] [--replicas 2]
                                           [--sleep] [--updates 5] [--eager]
                                           [--engine-python PYTHON --engine-path SITE] [--out FILE]

ipc: our plug-in opens handles of the trainer's memory and copies into the server's parameters.
api: the same handles through vLLM's own transfer API (start, update, finish; on a CPU a process
group over gloo). memory: files in host memory. Weights change before every update; afterwards 64
tokens are sampled by every server and their log-probs compared with the trainer's. Prints for each
channel the seconds of every update, the best of them without the first, the probe's error and the
largest mean difference of sampled log-probs.

--fp8: each channel once more, to a server that quantises the weights as they come (--quantization
fp8), with a tolerance of --tolerance nats (1) in the proof: the error that is printed is what FP8
costs. --replicas N: ipc and api once more, to N servers on the same GPU that read the same memory.
--sleep: one more server falls asleep, `engine.sleep: cache` and then `all`; printed are GiB of the
GPU that are taken before, asleep and awake, and seconds; it must serve what the trainer has when it
wakes by itself, and after an update in its sleep.

All servers start at the same time, and nothing is measured before all are ready; what is not ready
after --start-seconds, or measured after --case-seconds, has failed. --model DIR takes a model from
there instead of a random one; with a small one the script runs on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_step import SHAPES, random_model

from reinforge.build.served import trainer_score
from reinforge.build.shared_gpus import TrainerGpu
from reinforge.config.engine import EngineConfig
from reinforge.config.model import ModelConfig
from reinforge.core.batch import Batch
from reinforge.core.engine import Sampling
from reinforge.core.sample import Sample
from reinforge.core.weights import Weights
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.served.make import make_served
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_model

PROMPT = list(range(3, 40))
ANSWER = Sampling(64, ignore_eos=True)
KV_GIB = 4  # of a server's cache: given, so that servers that start together do not measure it
SLEEPER_KV_GIB = 32  # of the one that gives it back


@dataclass(frozen=True)
class Case:
    """One way for the weights, and the servers at its end."""

    channel: str
    fp8: bool = False
    replicas: int = 1
    sleeps: bool = False

    @property
    def name(self) -> str:
        words = [self.channel, "fp8" * self.fp8, f"x{self.replicas}" * (self.replicas > 1)]
        return "-".join(word for word in (*words, "sleep" * self.sleeps) if word)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """The one that sleeps comes last: then it is alone on the GPU."""
    found = [Case(channel) for channel in args.channels]
    if args.fp8:
        found += [Case(channel, fp8=True) for channel in args.channels]
    if args.replicas > 1:
        handles = [channel for channel in args.channels if channel != "memory"]
        found += [Case(channel, replicas=args.replicas) for channel in handles]
    return found + [Case(args.channels[0], sleeps=True)] * args.sleep


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--model", help="a model's directory, instead of a random one")
    parser.add_argument("--channels", nargs="+", default=["ipc", "api", "memory"])
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--engine-python", help="the server's Python; default: this one")
    parser.add_argument("--engine-path", default="", help="the server's PYTHONPATH; default: ours")
    parser.add_argument("--eager", action="store_true", help="no compilation: ready sooner")
    parser.add_argument("--fp8", action="store_true", help="also to servers that quantise to FP8")
    parser.add_argument("--replicas", type=int, default=1, help="also to so many servers at once")
    parser.add_argument("--sleep", action="store_true", help="also memory and seconds of sleeping")
    parser.add_argument("--tolerance", type=float, help="of the proof with FP8, in nats")
    parser.add_argument("--start-seconds", type=float, default=180.0)
    parser.add_argument("--case-seconds", type=float, default=90.0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def make_engine(
    args: argparse.Namespace, case: Case, model: CausalModel, folder: Path, saved: Path
) -> ServedEngine:
    extra: dict[str, Any] = {"skip-tokenizer-init": True}
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        extra["kv-cache-memory-bytes"] = (SLEEPER_KV_GIB if case.sleeps else KV_GIB) << 30
    if args.eager:
        extra["enforce-eager"] = True
    if case.fp8:
        extra["quantization"] = "fp8"
    cfg = EngineConfig.model_validate(
        {
            "python": args.engine_python,
            "env": {"PYTHONPATH": args.engine_path} if args.engine_path else {},
            "memory": 0.05,  # must be free; it takes what it was given
            "channel": case.channel,
            "sleep": "all" if case.sleeps else "never",
            "replicas": case.replicas,
            "tolerance": (args.tolerance or 1.0) if case.fp8 else None,
            "start_seconds": args.start_seconds,
            "args": extra,
        }
    )
    gpu = TrainerGpu(model.device)
    setup = ServerSetup(
        kind="vllm",
        cfg=cfg,
        model=str(saved),
        folder=folder / f"run-{case.name}",
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        context=256,
        vocabulary=int(model.head.weight.shape[0]),
        max_batch=64,
        devices=(gpu.name,) * case.replicas if on_gpu and case.replicas > 1 else (),
        gpu=gpu.name,
    )
    return make_served(setup, trainer_score(model), lambda: [gpu.release()])


@torch.no_grad()
def change(model: CausalModel) -> None:
    """A step of training, as far as an engine can tell."""
    for p in model.module.parameters():
        p.add_(torch.randn_like(p) * 0.02 * p.float().std().to(p.dtype))
    if model.device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def mismatch(
    model: CausalModel, prompt: list[int], tokens: list[int], logprobs: list[float]
) -> float:
    whole = [*prompt, *tokens]
    sample = Sample.from_tokens("x", whole, [i >= len(prompt) for i in range(len(whole))])
    want = model.logprobs(Batch.pack([sample]).to(model.device), temperature=1.0)[0].float().cpu()
    return float((torch.tensor(logprobs) - want).abs().mean())


async def sampled(model: CausalModel, engine: ServedEngine, key: int) -> float:
    """The largest mean difference of log-probs: as many answers at once as there are servers, so
    that each gives one.
    """
    prompts = [[*PROMPT, 40 + i] for i in range(len(engine.replicas))]
    found = await asyncio.gather(*(engine.generate(p, ANSWER, key=key) for p in prompts))
    return max(
        mismatch(model, prompt, done.tokens, done.logprobs)
        for prompt, [done] in zip(prompts, found, strict=True)
    )


async def timed(work: Awaitable[Any]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def measured(
    args: argparse.Namespace, case: Case, model: CausalModel, engine: ServedEngine
) -> dict[str, Any]:
    weights = Weights("shared", module=model.module)
    await engine.update(weights, engine.version)
    seconds = []
    errors = [engine.measured["weights/probe_error"]]
    differences = [await sampled(model, engine, 0)]
    for _ in range(args.updates):
        change(model)
        seconds.append(await timed(engine.update(weights, engine.version + 1)))
        errors.append(engine.measured["weights/probe_error"])
        differences.append(await sampled(model, engine, engine.version))
    published = engine.transfer.published
    assert published is not None
    return {
        "travelled_as": published.channel.kind,
        "note": engine.transfer.note,
        "seconds": seconds,
        "best_s": min(seconds[1:] or seconds),
        "probe_error": max(errors),
        "sampled_difference": max(differences),
        **({"asleep": await asleep(model, engine)} if case.sleeps else {}),
    }


async def asleep(model: CausalModel, engine: ServedEngine) -> dict[str, Any]:
    """By what is given back (`engine.sleep`). A CPU gives nothing."""
    weights = Weights("shared", module=model.module)
    found = {}
    for how in ("cache", "all"):
        cfg = engine.setup.cfg.model_copy(update={"sleep": how})
        engine.setup = replace(engine.setup, cfg=cfg)
        row = {"gib_before": taken(model), "sleep_s": await timed(engine.sleep())}
        row |= {"gib_asleep": taken(model), "wake_s": await timed(engine._awake())}
        row |= {"gib_awake": taken(model)}
        # those of `all` are sent again now
        row["answer_s"] = await timed(engine.generate(PROMPT, ANSWER, key=0))
        row["sampled_difference"] = await sampled(model, engine, 1)
        await engine.sleep()
        change(model)
        row["wake_and_update_s"] = await timed(engine.update(weights, engine.version + 1))
        row["probe_error"] = engine.measured["weights/probe_error"]
        row["sampled_difference_after"] = await sampled(model, engine, 2)
        found[how] = row
        print(how, json.dumps(row), flush=True)
    return found


def taken(model: CausalModel) -> float:
    """GiB of the GPU, by everybody, without what torch only keeps."""
    if model.device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info(model.device)
    return (whole - free) / 2**30


async def ready(case: Case, engine: ServedEngine) -> None:
    took = await timed(engine._all_up())
    print(f"{case.name}: ready after {took:.1f} s", flush=True)


def failure(engine: ServedEngine, error: BaseException) -> dict[str, Any]:
    """With the last words of the servers."""
    for replica in engine.replicas:
        print(replica.process.tail(60) if replica.process else replica.last_words, flush=True)
    return {"failed": f"{type(error).__name__}: {error}"[:2000]}


async def run(
    args: argparse.Namespace, model: CausalModel, folder: Path, results: dict[str, Any]
) -> None:
    engines = {
        case: make_engine(args, case, model, folder, folder / "model") for case in cases_of(args)
    }
    try:
        # the second of several servers starts when the first is there
        limits = [args.start_seconds * case.replicas for case in engines]
        starts = [asyncio.wait_for(ready(*pair), s) for pair, s in zip(engines.items(), limits)]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for (case, engine), outcome in zip(engines.items(), outcomes, strict=True):
            try:
                if isinstance(outcome, BaseException):
                    raise outcome
                work = measured(args, case, model, engine)
                results[case.name] = await asyncio.wait_for(work, args.case_seconds)
            except Exception as error:  # the others are measured all the same
                results[case.name] = failure(engine, error)
            engine.close()
            print(case.name, json.dumps(results[case.name]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        for engine in engines.values():
            engine.close()


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.model:
        model = load_model(ModelConfig(path=args.model, device=device))
    else:
        model = random_model(args.shape, torch.device(device))
    folder = Path(tempfile.mkdtemp(prefix="weight-update-"))
    model.module.save_pretrained(folder / "model")
    size = sum(p.numel() * p.element_size() for p in model.module.parameters()) / 2**30
    results: dict[str, Any] = {"weights_gib": size, "dtype": str(model.dtype)}
    print(f"a model of {size:.2f} GiB; logs in {folder}", flush=True)
    asyncio.run(run(args, model, folder, results))
    sys.exit(any("failed" in r for r in results.values() if isinstance(r, dict)))


if __name__ == "__main__":
    main()
