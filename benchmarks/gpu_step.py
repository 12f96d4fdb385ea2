"""One GPU: seconds of a whole GRPO step, on a random model of a known shape, beside TRL on the same
machine.

    python benchmarks/gpu_step.py --compile [--shape 0.5b|1.5b] [--peer-python PYTHON --peer vllm]
                                  [--out FILE]

64 prompts of 256 tokens x 8 samples; `--lengths fixed`: every response has --response tokens,
`varied`: answers end by themselves, after 300 tokens in the mean, under that cap. The engine, the
packing, the backend and the loss are the library's ordinary ones, in the default precision
(bfloat16 module, float32 masters and moments). Prints each phase, the peak memory, the mismatch
between engine and trainer, and the share of the physical limit (weights, cache and flops at 4.3
TB/s and 790 TFLOP/s, measured on an H200). With --peer, TRL does the same step afterwards in its
own environment (benchmarks/peers/trl_step.py; --peer-path is added to its PYTHONPATH).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3_5TextConfig, Qwen3MoeConfig

from reinforge.algorithms.build import build
from reinforge.backends.local import LocalBackend
from reinforge.config.adapter import AdapterConfig
from reinforge.config.optimizer import OptimizerConfig
from reinforge.config.train import TrainConfig
from reinforge.core import routes
from reinforge.core.arrays import floats, ints
from reinforge.core.batch import Totals, pack
from reinforge.core.engine import Completion, Engine, Sampling
from reinforge.core.sample import Sample
from reinforge.engines.native import NativeEngine
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel

SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "32b": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    # 8.5B weights, of which 1.3B work for a token
    "moe": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    # three gated delta nets to one attention, 1.3B weights
    "hybrid": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
SHAPES["moe-half"] = {**SHAPES["moe"], "num_hidden_layers": 12}
KINDS = {
    "moe": Qwen3MoeConfig,
    "moe-half": Qwen3MoeConfig,
    "hybrid": Qwen3_5TextConfig,
}  # others: Qwen2
PROMPTS = 64
GROUP = 8
PROMPT = 256
FIRST_STOP = 2000
BANDWIDTH = 4.3e12
FLOPS = 790e12


def random_model(shape: str, device: torch.device) -> CausalModel:
    torch.manual_seed(0)
    config = KINDS.get(shape, Qwen2Config)(
        vocab_size=151936,
        max_position_embeddings=65536,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **{"tie_word_embeddings": True, **SHAPES[shape]},
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    return CausalModel(module.eval())


def weights_read(model: CausalModel) -> float:
    """The fewest weights that tokens need, however many they are: of experts those of one token,
    for all others may go to the same ones, as answers to one prompt of a random model nearly do.
    """
    c = model.config
    share = 1.0
    if experts := getattr(c, "num_experts", None):
        share = c.num_experts_per_tok / experts
    return sum(
        part.numel() * (share if ".experts." in name else 1.0)
        for name, part in model.module.named_parameters()
    )


def cache_numbers(model: CausalModel) -> int:
    """Keys and values of a token."""
    c = model.config
    kinds = getattr(c, "layer_types", None) or ["full_attention"] * c.num_hidden_layers
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return int(2 * kinds.count("full_attention") * c.num_key_value_heads * head)


def state_bytes(model: CausalModel) -> int:
    """What a sequence reads and writes for a token where layers keep state."""
    c = model.config
    kinds = getattr(c, "layer_types", None) or []
    if "linear_attention" not in kinds:
        return 0
    one = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim * 4
    return int(2 * kinds.count("linear_attention") * one)


def floors(model: CausalModel, response: float, prompts: int = PROMPTS) -> dict[str, float]:
    """Seconds that no implementation can beat: decode reads weights, cache and state, everything
    does its flops once.
    """
    rows = prompts * GROUP
    body = weights_read(model)
    cache = 2 * cache_numbers(model) * (PROMPT + response / 2)
    flops = 2 * body * rows * (response + PROMPT / GROUP)
    reads = response * (body * 2 + rows * (cache + state_bytes(model)))
    return {
        "generate": max(reads / BANDWIDTH, flops / FLOPS),
        "train": 6 * body * rows * (response + PROMPT) / FLOPS,
    }


async def rollouts(
    engine: Engine, prompts: list[list[int]], params: Sampling, step: int
) -> list[list[Completion]]:
    groups = (
        engine.generate(prompt, params, key=step * 1000 + i, n=GROUP)
        for i, prompt in enumerate(prompts)
    )
    return list(await asyncio.gather(*groups))


def to_samples(prompts: list[list[int]], completions: list[list[Completion]]) -> list[Sample]:
    samples = []
    for i, (prompt, group) in enumerate(zip(prompts, completions, strict=True)):
        for j, c in enumerate(group):
            tokens = ints(prompt + c.tokens)
            logprobs = torch.zeros(len(tokens))
            logprobs[len(prompt) :] = floats(c.logprobs)
            extras = {}
            if c.routes is not None:
                extras[routes.NAME] = routes.padded(c.routes, len(tokens))
            samples.append(
                Sample(
                    f"{i}/{j}",
                    str(i),
                    f"{i}/{j}",
                    tokens,
                    torch.arange(len(tokens)) >= len(prompt),
                    logprobs,
                    torch.zeros(len(tokens), dtype=torch.int32),
                    reward=float(sum(c.tokens) % 7),
                    extras=extras,
                )
            )
    return samples


def sampling_of(lengths: str, response: int) -> Sampling:
    """`fixed`: every response has that many tokens. `varied`: one in 300 tokens ends it, and the
    engine knows the cap only, as in life.
    """
    if lengths == "fixed":
        return Sampling(response, ignore_eos=True)
    return Sampling(response, stop_tokens=stop_tokens(507))


def stop_tokens(count: int) -> tuple[int, ...]:
    """So many of the 151,936 tokens end an answer: a random model draws all of them alike."""
    return tuple(range(FIRST_STOP, FIRST_STOP + count))


def prompts_of(count: int = PROMPTS) -> list[list[int]]:
    return torch.randint(
        10, 49000, (count, PROMPT), generator=torch.Generator().manual_seed(1)
    ).tolist()


def save_for_peer(model: CausalModel, tokenizer: str, folder: Path) -> Path:
    """The model as a directory that any library loads; the tokenizer is only there because they
    want one.
    """
    from transformers import AutoTokenizer

    model.module.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def run_peer(python: str, path: str, script: str, *args: str) -> list[dict[str, Any]]:
    """The JSON lines that a peer's script printed; its own complaints go to our stderr. What it
    said until it is interrupted counts.
    """
    # where a process that a peer starts looks too
    peers = Path(__file__).resolve().parent / "peers"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([path or os.environ.get("PYTHONPATH", ""), str(peers)]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    command = [python, str(peers / script), *args]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        process = subprocess.Popen(
            command, env=env, stdout=said, stderr=complained, start_new_session=True
        )
        try:
            process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            print(f"{script} was cut off", file=sys.stderr)
        said.seek(0)
        complained.seek(0)
        lines = said.read().splitlines()
        whole = [line for line in lines if line.startswith('{"peer"') and line.endswith("}")]
        if not whole or process.returncode:
            print("\n".join(lines)[-2000:], complained.read()[-4000:], file=sys.stderr)
    return [json.loads(line) for line in whole]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--lengths", choices=("fixed", "varied"), default="fixed")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", type=int, default=0, help="tokens per micro-batch; 0 = auto")
    parser.add_argument("--no-train", action="store_true")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument(
        "--lean", action="store_true", help="split masters, 8-bit moments, bfloat16 gradients"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--exact", action="store_true", help="model.exact")
    parser.add_argument(
        "--replay", choices=("off", "count", "on", "differing"), default="off", help="of experts"
    )
    parser.add_argument(
        "--lora", type=int, default=0, help="train an adapter of this rank instead of all weights"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels that take most of a training pass"
    )
    parser.add_argument(
        "--peer", choices=("vllm", "transformers"), help="TRL's engine; without it TRL does not run"
    )
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peer-path", default="")
    parser.add_argument("--tokenizer", default="", help="a tokenizer directory for the peer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(args.shape, device)
    if args.lora:
        model = CausalModel(add_adapter(model.module, AdapterConfig(rank=args.lora), seed=0))
    if args.exact:
        model = CausalModel(model.module, exact=True)
    if args.compile:
        model.compile_layers()
    prompts = prompts_of(args.prompts)
    params = sampling_of(args.lengths, args.response)
    engine = NativeEngine(
        model,
        max_batch=args.prompts * GROUP,
        longest=PROMPT + args.response,
        routes=args.replay != "off",
    )
    cfg = TrainConfig(
        steps=args.steps,
        learning_rate=1e-6,
        tokens_per_microbatch=args.budget or "auto",
        router_replay=args.replay,
        optimizer=OptimizerConfig(name="adamw_8bit", masters="split", gradients="bfloat16")
        if args.lean
        else OptimizerConfig(),
    )
    backend = LocalBackend(model, cfg, total_steps=args.steps)
    algorithm = build("grpo", max_new_tokens=args.response)
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    rows: list[dict[str, Any]] = []
    for step in range(args.steps):
        sync()
        start = time.perf_counter()
        completions = asyncio.run(rollouts(engine, prompts, params, step))
        asyncio.run(engine.sleep())
        sync()
        generated = time.perf_counter()
        batches = pack(to_samples(prompts, completions), backend.budget, share=backend.share)
        algorithm.advantages(batches)
        prepared = time.perf_counter()
        metrics: dict[str, float] = {}
        if not args.no_train:
            metrics = (
                backend.forward_backward(batches, algorithm.loss, Totals.of(batches, args.response))
                | backend.step().metrics()
            )
        sync()
        done = time.perf_counter()
        tokens = sum(len(c.tokens) for group in completions for c in group)
        row = {
            "generate": generated - start,
            "prepare": prepared - generated,
            "train": done - prepared,
            "step": done - start,
            "tokens": tokens,
            "tokens_per_second": tokens / (generated - start),
            "mismatch_mean": metrics.get("mismatch/mean"),
            "mismatch_max": metrics.get("mismatch/max"),
            "disagreement": metrics.get("experts/disagreement"),
            "disagreement_left": metrics.get("experts/disagreement_left"),
        }
        rows.append(row)
        print(
            json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}),
            flush=True,
        )
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            backend.forward_backward(batches[:2], algorithm.loss, Totals.of(batches, args.response))
            sync()
        print(
            profile.key_averages().table(
                sort_by="cuda_time_total", row_limit=22, max_name_column_width=70
            )
        )
    mean = rows[-1]["tokens"] / (args.prompts * GROUP)
    floor = floors(model, mean, args.prompts)
    best = {k: min(r[k] for r in rows[1:] or rows) for k in ("generate", "train", "step")}
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    result = {
        "shape": args.shape,
        "lengths": args.lengths,
        "budget": backend.budget,
        "best": best,
        "floor": floor,
        "peak_gib": peak,
        "rows": rows,
        "share_of_floor": {k: floor[k] / best[k] for k in floor if best[k]},
        "captures": engine.decoder.captures,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}))
    if args.peer:
        del batches, completions, engine, backend
        folder = save_for_peer(model, args.tokenizer, Path(tempfile.mkdtemp()) / args.shape)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        result["peers"] = run_peer(
            args.peer_python,
            args.peer_path,
            "trl_step.py",
            str(folder),
            str(args.response),
            "8" if args.shape == "1.5b" else "16",
            args.peer,
        )
        for peer in result["peers"]:
            print(json.dumps(peer))
            print(
                f"{peer['peer']}: {peer['step']:.1f} s and {peer['peak_gib']:.0f} GiB a step; ours"
                f" {best['step']:.2f} s and {peak:.1f} GiB: {peer['step'] / best['step']:.1f} times"
                " faster"
            )
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
