"""How long new weights take to reach a vLLM server on the trainer's GPU, each way that there is,
with the proof after every update.

    python benchmarks/gpu_weight_update.py [--channels ipc api memory] [--fp8] [--updates 5]
                                           [--engine-python PYTHON --engine-path SITE] [--out FILE]

ipc: our plug-in opens handles of the trainer's memory and copies into the server's parameters.
api: the same handles through vLLM's own transfer API (start, update, finish; on a CPU a process
group over gloo). memory: files in host memory. Weights change before every update; afterwards 64
tokens are sampled and their log-probs compared with the trainer's. Prints for each channel the
seconds of every update, the best of them without the first, the probe's error and the largest mean
difference of sampled log-probs. --fp8 lets vLLM quantise the weights as they come (--quantization
fp8), with a tolerance of --tolerance nats (1) in the proof: the error that is printed is what FP8
costs. --model DIR takes a model from there instead of a random one; with a small one the script
runs on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_step import SHAPES, random_model

from reinforge.build.served import trainer_score
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
    parser.add_argument("--engine-memory", type=float, default=0.3, help="share of the GPU")
    parser.add_argument("--eager", action="store_true", help="no compilation: ready sooner")
    parser.add_argument("--fp8", action="store_true", help="vLLM quantises the weights to FP8")
    parser.add_argument("--tolerance", type=float, help="of the proof, in nats")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def make_engine(
    args: argparse.Namespace, model: CausalModel, channel: str, folder: Path, saved: Path
) -> ServedEngine:
    extra: dict[str, Any] = {"skip-tokenizer-init": True}
    if args.eager:
        extra["enforce-eager"] = True
    if args.fp8:
        extra["quantization"] = "fp8"
    cfg = EngineConfig.model_validate(
        {
            "python": args.engine_python,
            "env": {"PYTHONPATH": args.engine_path} if args.engine_path else {},
            "memory": args.engine_memory,
            "channel": channel,
            "sleep": "never",
            "tolerance": args.tolerance or (1.0 if args.fp8 else None),
            "args": extra,
        }
    )
    setup = ServerSetup(
        kind="vllm",
        cfg=cfg,
        model=str(saved),
        folder=folder / f"run-{channel}",
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        context=256,
        vocabulary=int(model.head.weight.shape[0]),
        max_batch=64,
    )
    return make_served(setup, trainer_score(model))


@torch.no_grad()
def change(model: CausalModel, seed: int) -> None:
    """A step of training, as far as an engine can tell."""
    torch.manual_seed(seed)
    for p in model.module.parameters():
        p.add_(torch.randn_like(p) * 0.02 * p.float().std().to(p.dtype))


@torch.no_grad()
def mismatch(model: CausalModel, tokens: list[int], logprobs: list[float]) -> float:
    whole = [*PROMPT, *tokens]
    sample = Sample.from_tokens("x", whole, [i >= len(PROMPT) for i in range(len(whole))])
    want = model.logprobs(Batch.pack([sample]).to(model.device), temperature=1.0)[0].float().cpu()
    return float((torch.tensor(logprobs) - want).abs().mean())


async def measured(
    args: argparse.Namespace, model: CausalModel, engine: ServedEngine
) -> dict[str, Any]:
    began = time.perf_counter()
    weights = Weights("shared", module=model.module)
    await engine.update(weights, 0)
    ready = time.perf_counter() - began
    seconds = []
    errors = [engine.measured["weights/probe_error"]]
    differences = []
    for version in range(1, args.updates + 1):
        change(model, version)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        await engine.update(weights, version)
        seconds.append(time.perf_counter() - began)
        errors.append(engine.measured["weights/probe_error"])
        [done] = await engine.generate(PROMPT, Sampling(64, ignore_eos=True), key=version)
        differences.append(mismatch(model, done.tokens, done.logprobs))
    published = engine.transfer.published
    assert published is not None
    return {
        "server_ready_s": ready,
        "travelled_as": published.channel.kind,
        "note": engine.transfer.note,
        "seconds": seconds,
        "best_s": min(seconds[1:] or seconds),
        "probe_error": max(errors),
        "sampled_difference": max(differences),
    }


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.model:
        model = load_model(ModelConfig(path=args.model, device=device))
    else:
        model = random_model(args.shape, torch.device(device))
    folder = Path(tempfile.mkdtemp(prefix="weight-update-"))
    saved = folder / "model"
    model.module.save_pretrained(saved)
    size = sum(p.numel() * p.element_size() for p in model.module.parameters()) / 2**30
    results: dict[str, Any] = {"weights_gib": size, "fp8": args.fp8, "dtype": str(model.dtype)}
    for channel in args.channels:
        engine = make_engine(args, model, channel, folder, saved)
        try:
            results[channel] = asyncio.run(measured(args, model, engine))
        except Exception as error:  # the other channels are measured all the same
            for replica in engine.replicas:
                words = replica.process.tail(60) if replica.process else replica.last_words
                print(words, file=sys.stderr)
            results[channel] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        finally:
            engine.close()
        print(channel, json.dumps(results[channel]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
