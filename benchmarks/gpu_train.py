"""One GPU: seconds and memory of `reinforge train` as a user runs it, on a random model of a known
shape.

    python benchmarks/gpu_train.py [--shape 0.5b|1.5b|7b|moe|hybrid] [--repeat 2] [KEY=VALUE ...]
    python benchmarks/gpu_train.py --shape 7b --prompts 32 --steps 4 adapter.kind=lora
                                   --then "train.precision=fp8 rollout.precision=fp8"
    python benchmarks/gpu_train.py --shape tiny --prompts 2 --prompt 16 --response 8 --steps 4
                                                        # that it runs, on a CPU
    python benchmarks/gpu_train.py --shape 7b --sft --prompts 1 --response 261888 --steps 3
                                   adapter.kind=lora model.gradient_checkpointing=true
    python benchmarks/gpu_train.py --shape 32b --nf4 --sft --prompts 8 --response 2048 --steps 4
                                   adapter.kind=qlora

GRPO, 64 prompts of 256 tokens x 8 answers of 1,024, 20 steps. The configuration holds the work and
nothing else: every other setting is the default, or one of KEY=VALUE, as on the command line of
`reinforge train`. It runs in a process of its own. Prompts are words that are one token each, and
the tokenizer has no end of text, so that every answer has its full length.

--sft: supervised, on rows of a prompt and a response of these lengths. --nf4: the model is made
layer by layer on the device and saved in 4 bits, so that no host needs room for all of it.

Prints one JSON line for each run: median seconds of the steps from the third on, of a step and of
each phase; seconds of the first step and of the whole process, from its start to its end
(imports, loading, compiling, the checkpoint at the end); the largest GiB of each phase; and what
the run expected before it began: GiB of each phase, and seconds (`plan` says the same). --repeat 2
starts it again in a fresh directory, with the caches on disk that the first left: the second start.
--then runs it once more with further settings, on the model and the rows that are there; it may be
given several times. --dir keeps the model, the runs and their logs.
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
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
import yaml  # noqa: E402
from gpu_step import KINDS, SHAPES  # noqa: E402

from reinforge.watch.runs import read_lines  # noqa: E402

VOCABULARY = 151936
PAD = "<pad>"
FIRST = 2  # of the steps whose median is taken; those before compile and capture
REWARD = '''"""A reward that depends on every word and costs nothing."""

import zlib


def checksum(completions):
    return [zlib.crc32(text.encode()) % 7 / 6 for text in completions]
'''


def write_tokenizer(folder: Path, ends: bool = False) -> None:
    """Words t0, t1, ...: one token each. A directory of its own, since beside a Qwen's weights
    transformers takes it for a Qwen's tokenizer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {PAD if i == 1 else f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = {"eos_token": "t2"} if ends else {}  # rows to learn from need one
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, **end).save_pretrained(
        folder
    )


def write_model(folder: Path, shape: str, longest: int, nf4: bool) -> None:
    """Random weights of the shape in bfloat16, or in NF4, as a directory that a run loads."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = KINDS.get(shape, Qwen2Config)(
        vocab_size=VOCABULARY,
        max_position_embeddings=max(65536, longest),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=1,
        dtype="bfloat16",
        **{"tie_word_embeddings": True, **SHAPES[shape]},
    )
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta" if nf4 else device):
        module = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    if nf4:
        save_in_4_bits(module, folder, device)
    else:
        module.save_pretrained(folder)
    del module
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def save_in_4_bits(module: Any, folder: Path, device: torch.device) -> None:
    """Of a model without numbers: one layer after the other gets random ones, which are rounded to
    NF4 before the next one has any.
    """
    from bitsandbytes.nn import Params4bit
    from huggingface_hub import save_torch_state_dict
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    from reinforge.models.adapters import quantization

    how = quantization(torch.bfloat16)
    module = replace_with_bnb_linear(module, ["lm_head"], how)
    state: dict[str, torch.Tensor] = {}
    for name, part in module.named_modules():
        for own, p in part.named_parameters(recurse=False):
            numbers = torch.ones(p.shape, dtype=torch.bfloat16, device=device)
            if p.ndim > 1:
                numbers.normal_(std=0.02)
            if type(part).__name__ == "Linear4bit" and own == "weight":
                packed = Params4bit(
                    numbers, requires_grad=False, compress_statistics=True, quant_type="nf4"
                )
                packed = packed.to(device)
                state[f"{name}.weight"] = packed.data
                facts = packed.quant_state.as_dict(packed=True)
                state |= {f"{name}.weight.{key}": value for key, value in facts.items()}
            else:
                state[f"{name}.{own}"] = torch.zeros_like(numbers) if own == "bias" else numbers
    folder.mkdir(parents=True)
    save_torch_state_dict({k: v.cpu() for k, v in state.items()}, folder)
    module.config.quantization_config = how
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(folder)


def write_rows(path: Path, args: argparse.Namespace) -> None:
    """Prompts; with --sft each with its response."""
    tokens = args.prompt + (args.response if args.sft else 0)
    rows = (args.prompts * args.steps, tokens)
    ids = torch.randint(10, 49000, rows, generator=torch.Generator().manual_seed(1))
    with path.open("w") as file:
        for row in ids.tolist():
            words = [f"t{i}" for i in row]
            written = {"prompt": " ".join(words[: args.prompt])}
            if args.sft:
                written["completion"] = " " + " ".join(words[args.prompt :])
            file.write(json.dumps(written) + "\n")


def config(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What a user writes: the work, and where things are."""
    model = {"path": str(folder / "model"), "tokenizer": str(folder / "tokenizer")}
    if args.sft:
        return {
            "model": model,
            "algorithm": {"name": "sft"},
            "data": {"source": str(folder / "rows.jsonl")},
            "train": {
                "steps": args.steps,
                "prompts_per_step": args.prompts,
                "learning_rate": 1e-6,
            },
        }
    return {
        "model": model,
        "algorithm": {"name": "grpo", "group_size": args.group},
        "data": {"source": str(folder / "rows.jsonl")},
        "rewards": [{"name": f"{folder / 'checksum.py'}:checksum"}],
        "rollout": {"max_new_tokens": args.response},
        "train": {
            "steps": args.steps,
            "prompts_per_step": args.prompts,
            "learning_rate": 1e-6,
        },
    }


def prepare(args: argparse.Namespace, folder: Path) -> Path:
    """Writes model, data, reward and configuration; the configuration's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", args.shape, args.prompt + args.response + 8, args.nf4)
    write_tokenizer(folder / "tokenizer", ends=args.sft)
    write_rows(folder / "rows.jsonl", args)
    (folder / "checksum.py").write_text(REWARD)
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(config(args, folder)))
    return path


def train(path: Path, run: Path, settings: list[str]) -> tuple[int, float]:
    """`reinforge train` in a process of its own: its exit code, and its seconds."""
    python_path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "reinforge", "train", str(path), *settings, f"run.dir={run}"]
    start = time.perf_counter()
    with run.with_suffix(".log").open("w") as log:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return done.returncode, time.perf_counter() - start


def measured(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the metrics of a run say; of a run that broke off early what there is."""
    steps = [line for line in lines if "time/step" in line]
    timed = steps[FIRST:] or steps
    names = sorted({name for line in steps for name in line})

    def middle(name: str) -> float:
        return round(median(line.get(name, 0.0) for line in timed), 4)

    def most(name: str) -> float:
        return round(max(line.get(name, 0.0) for line in steps), 2)

    if not steps:
        return {"steps": 0}
    return {
        "steps": len(steps),
        "step": middle("time/step"),
        "phases": {n.removeprefix("time/"): middle(n) for n in names if n.startswith("time/")},
        "fastest": round(min(line["time/step"] for line in timed), 4),
        "slowest": round(max(line["time/step"] for line in timed), 4),
        "first_step": round(steps[0]["time/step"], 2),
        "all_steps": round(sum(line["time/step"] for line in steps), 2),
        "gib": {n.removeprefix("memory/"): most(n) for n in names if n.startswith("memory/")},
        "tokens_per_second": middle("tokens_per_second"),
        "answer_tokens": middle("response/length"),
        "mismatch": middle("mismatch/mean"),
    }


def predicted(run: Path) -> dict[str, Any]:
    """What the run expected of itself."""
    file = run / "prediction.json"
    if not file.is_file():
        return {}
    found = json.loads(file.read_text())
    return {
        "gib": {phase: parts["peak"] for phase, parts in found["memory_gib"].items()},
        "seconds": found["seconds"],
        "tokens_per_microbatch": found["assumed"]["tokens_per_microbatch"],
    }


def said(log: str) -> list[str]:
    """What the run chose by itself, in its words."""
    return [line.strip() for line in log.splitlines() if line.rstrip().endswith(": auto)")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of reinforge train")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--response", type=int, default=1024, help="tokens")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sft", action="store_true", help="supervised, nothing is generated")
    parser.add_argument("--nf4", action="store_true", help="the model is saved in 4 bits")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--then",
        action="append",
        default=[],
        metavar="KEY=VALUE ...",
        help="one more run, with these settings too",
    )
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = (args.dir or Path(tempfile.mkdtemp())).resolve()
    path = prepare(args, folder)
    results = []
    more = [[]] * args.repeat + [words.split() for words in args.then]
    for k, further in enumerate(more):
        run = folder / f"run-{time.strftime('%H%M%S')}-{k}"
        settings = [*args.settings, *further]
        code, seconds = train(path, run, settings)
        result = {
            "shape": args.shape,
            "settings": settings,
            "start": k + 1,
            "rc": code,
            "whole": round(seconds, 1),
            **measured(read_lines(run / "metrics.jsonl")),
            "predicted": predicted(run),
            "said": said(run.with_suffix(".log").read_text()),
        }
        results.append(result)
        print(json.dumps(result), flush=True)
        if args.dir is None:  # they may be larger than what is left of the disk
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if code:
            print(run.with_suffix(".log").read_text()[-4000:], file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    return int(any(result["rc"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
