"""One GPU: a GRPO step whose rollouts come from a colocated vLLM server, with the weight update
timed and proved, beside TRL + vLLM.

    python benchmarks/gpu_vllm_engine.py --tokenizer DIR [--engine-python PYTHON --engine-path SITE]
                                         [--peer vllm --peer-path SITE] [--out FILE]

The work is that of gpu_step.py: 64 prompts of 256 tokens x 8 samples, --response tokens each, on a
random model of a known shape. Prints for every step: seconds of generation, of training, of the
update (publish, stage, commit, prefix cache, proof) and of the whole step, the probe's error in
nats and the mismatch of sampled log-probs; then the best of them without the first step. The
server's Python and its PYTHONPATH may be others than ours. With --replay (a mixture of experts)
the server tells where its tokens went, and the trainer computes the same samples with its own
choice and with that one: mismatch and share of choices that differ; norms alone are trained. With
--peer, TRL does the same step afterwards (benchmarks/peers/trl_step.py).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_step import (
    GROUP,
    PROMPT,
    PROMPTS,
    SHAPES,
    prompts_of,
    random_model,
    rollouts,
    run_peer,
    sampling_of,
    save_for_peer,
    to_samples,
)

from reinforge.algorithms.build import build
from reinforge.backends.local import LocalBackend
from reinforge.build.served import trainer_score
from reinforge.config.engine import EngineConfig
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Totals, pack
from reinforge.core.weights import Weights
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.served.make import make_served
from reinforge.models.causal import CausalModel
from reinforge.models.routing import Replay, routed_layers


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--lengths", choices=("fixed", "varied"), default="fixed")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", type=int, default=0, help="tokens per micro-batch; 0 = auto")
    parser.add_argument("--compile", action="store_true", help="torch.compile the trainer's layers")
    parser.add_argument(
        "--tokenizer",
        default="",
        help="a tokenizer directory, saved with the model: TRL and vLLM want one",
    )
    parser.add_argument("--engine-python", help="the server's Python; default: this one")
    parser.add_argument("--engine-path", default="", help="the server's PYTHONPATH; default: ours")
    parser.add_argument(
        "--engine-memory", type=float, default=0.3, help="share of the GPU (TRL's default is 0.3)"
    )
    parser.add_argument("--channel", choices=("auto", "ipc", "memory", "disk"), default="auto")
    parser.add_argument("--sleep", choices=("auto", "never", "cache", "all"), default="never")
    parser.add_argument(
        "--unseeded",
        action="store_true",
        help="draws that depend on the order of arrival, which vLLM samples faster",
    )
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--replay", action="store_true", help="of the experts that vLLM chose")
    parser.add_argument(
        "--peer", choices=("vllm", "transformers"), help="TRL's engine; without it TRL does not run"
    )
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peer-path", default="")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def make_engine(
    args: argparse.Namespace, model: CausalModel, folder: Path, saved: Path
) -> ServedEngine:
    extra: dict[str, Any] = {} if args.tokenizer else {"skip-tokenizer-init": True}
    cfg = EngineConfig(
        python=args.engine_python,
        env={"PYTHONPATH": args.engine_path} if args.engine_path else {},
        memory=args.engine_memory,
        channel=args.channel,
        sleep=args.sleep,
        seeded=not args.unseeded,
        replicas=args.replicas,
        args=extra,
    )
    return make_served(
        ServerSetup(
            "vllm",
            cfg,
            str(saved),
            folder,
            str(model.dtype).removeprefix("torch."),
            model.device.type,
            4096,
            model.head.weight.shape[0],
            longest=PROMPT + args.response,
            max_batch=args.prompts * GROUP // args.replicas,
            routed=routed_layers(model) if args.replay else None,
        ),
        trainer_score(model),
    )


async def replayed(args: argparse.Namespace, model: CausalModel, engine: ServedEngine) -> None:
    """The same samples with the trainer's own choice of experts, and with the server's."""
    await engine.update(Weights("shared", module=model.module), 0)
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_("norm" in name)
    prompts = prompts_of(args.prompts)
    completions = await rollouts(engine, prompts, sampling_of(args.lengths, args.response), 0)
    await engine.sleep()
    samples = to_samples(prompts, completions)
    algorithm = build("grpo", max_new_tokens=args.response)
    cfg = TrainConfig(steps=1, tokens_per_microbatch=args.budget or "auto")
    # one for all modes: its optimizer hears of every gradient of the module
    backend = LocalBackend(model, cfg, total_steps=1)
    batches = pack(samples, backend.budget, share=backend.share)
    algorithm.advantages(batches)
    for mode in Replay:
        backend.experts.replay = mode
        found = backend.forward_backward(batches, algorithm.loss, Totals.of(batches, args.response))
        told = {k: v for k, v in found.items() if k.startswith(("mismatch/", "experts/dis"))}
        print(json.dumps({"replay": mode.value, **told}), flush=True)
        backend.optimizer.zero()


async def steps(
    args: argparse.Namespace, model: CausalModel, engine: ServedEngine
) -> list[dict[str, Any]]:
    start = time.perf_counter()
    # before there is a backend: its budget is to see what the server left
    await engine.update(Weights("shared", module=model.module), 0)
    print(
        json.dumps(
            {
                "server_ready_s": time.perf_counter() - start,
                "channel": engine.transfer.kind,
                "facts": engine.replicas[0].facts,
                "probe_error": engine.measured.get("weights/probe_error"),
            }
        ),
        flush=True,
    )
    backend = LocalBackend(
        model,
        TrainConfig(
            steps=args.steps, learning_rate=1e-6, tokens_per_microbatch=args.budget or "auto"
        ),
        total_steps=args.steps,
    )
    algorithm = build("grpo", max_new_tokens=args.response)
    prompts = prompts_of(args.prompts)
    params = sampling_of(args.lengths, args.response)
    sync = torch.cuda.synchronize if model.device.type == "cuda" else (lambda: None)
    rows: list[dict[str, Any]] = []
    for step in range(args.steps):
        sync()
        marks = [time.perf_counter()]
        completions = await rollouts(engine, prompts, params, step)
        await engine.sleep()
        marks.append(time.perf_counter())
        batches = pack(to_samples(prompts, completions), backend.budget, share=backend.share)
        algorithm.advantages(batches)
        marks.append(time.perf_counter())
        metrics = (
            backend.forward_backward(batches, algorithm.loss, Totals.of(batches, args.response))
            | backend.step().metrics()
        )
        sync()
        marks.append(time.perf_counter())
        await engine.update(backend.weights(), step + 1)
        sync()
        marks.append(time.perf_counter())
        tokens = sum(len(c.tokens) for group in completions for c in group)
        row = dict(
            zip(
                ("generate", "prepare", "train", "update"),
                (b - a for a, b in pairwise(marks)),
                strict=True,
            )
        )
        row |= {
            "step": marks[-1] - marks[0],
            "tokens": tokens,
            "tokens_per_second": tokens / row["generate"],
            "probe_error": engine.measured.get("weights/probe_error"),
            "mismatch_mean": metrics.get("mismatch/mean"),
            "mismatch_max": metrics.get("mismatch/max"),
            "budget": backend.budget,
        }
        rows.append(row)
        print(
            json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}),
            flush=True,
        )
    return rows


def main() -> None:
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(args.shape, device)
    folder = Path(tempfile.mkdtemp(prefix="vllm-engine-"))
    if args.tokenizer:
        saved = save_for_peer(model, args.tokenizer, folder / args.shape)
    else:
        saved = folder / args.shape
        model.module.save_pretrained(saved)
    if args.compile:
        model.compile_layers()
    engine = make_engine(args, model, folder, saved)
    try:
        if args.replay:
            return asyncio.run(replayed(args, model, engine))
        rows = asyncio.run(steps(args, model, engine))
    except BaseException:
        for replica in engine.replicas:
            print(
                replica.process.tail(60) if replica.process is not None else replica.last_words,
                file=sys.stderr,
            )
        raise
    finally:
        engine.close()
    later = rows[1:] or rows
    best = {k: min(r[k] for r in later) for k in ("generate", "train", "update", "step")}
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    size = sum(p.numel() * p.element_size() for p in model.module.parameters()) / 2**30
    result: dict[str, Any] = {
        "shape": args.shape,
        "channel": engine.transfer.kind,
        "note": engine.transfer.note,
        "weights_gib": size,
        "best": best,
        "probe_error": max(r["probe_error"] for r in rows),
        "trainer_peak_gib": peak,
        "rows": rows,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}), flush=True)
    if args.out:  # the peer may take longer than there is time
        args.out.write_text(json.dumps(result, indent=1))
    if args.peer:
        del model, engine
        gc.collect()
        torch.cuda.empty_cache()
        result["peers"] = run_peer(
            args.peer_python,
            args.peer_path,
            "trl_step.py",
            str(saved),
            str(args.response),
            "16",
            args.peer,
        )
        for peer in result["peers"]:
            print(json.dumps(peer))
            print(
                f"{peer['peer']}: {peer['step']:.1f} s a step; ours with vLLM {best['step']:.2f} s:"
                f" {peer['step'] / best['step']:.2f} times faster"
            )
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
