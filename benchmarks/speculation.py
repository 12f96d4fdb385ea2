"""What drafts do for generation with few rows alive: the same prompts for several epochs, with
speculation and without.

    python benchmarks/speculation.py --model DIR [--prompts 32] [--group 8] [--rows 32]
                                     [--response 256] [--drafts 3] [--temperature 1.0] [--epochs 3]
                                     [--questions FILE] [--exact] [--out FILE]
    python benchmarks/speculation.py --model DIR --learn ROWS.jsonl [--recipe anchor|best]
                                     [--steps 40] ...
    python benchmarks/speculation.py --smoke

Prompts are questions of reasoning-gym's chain_sum, or the field `question` of the lines of a file;
at most `--rows` answers are generated at once, with other random numbers in every epoch. `--learn`
first trains the model for some steps on rows {"q", "a", "split"} by a recipe of gpu_learn.py (one
answers with a number, the other works the sum out) and asks those rows: a policy that has begun to
learn says similar things again. All
epochs run twice, since the first time graphs are captured, and the second time is told, without
what was remembered before. Prints seconds, steps, tokens and the accepted length (tokens per
sequence and step) of each epoch, and the speed-up of those after the first. Exits with 1 if, with
`--exact`, any token differs. `--smoke` runs a random tiny model, exact, anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_learn import BEST, TEMPLATE, config
from gpu_step import random_model

from reinforge.build.run import train_config
from reinforge.config.model import ModelConfig
from reinforge.core.engine import Completion, Sampling
from reinforge.engines.native import NativeEngine
from reinforge.engines.native.drafts import AnswerMemory, Speculation
from reinforge.loops.view import NoView
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_model, stop_tokens
from reinforge.offline.export import export

TEMPLATES = {"anchor": TEMPLATE, "best": BEST["data.template"]}


def questions(tokenizer: Any, count: int, file: Path | None, recipe: str) -> list[list[int]]:
    if file is not None:
        rows = [json.loads(line) for line in file.read_text().splitlines()[:count]]
        if "q" in rows[0]:
            rows = [{"question": TEMPLATES[recipe].format(**row)} for row in rows]
    else:
        import reasoning_gym

        rows = reasoning_gym.create_dataset("chain_sum", size=count, seed=1)
    found = []
    for row in rows:
        text = row["question"]
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        found.append(tokenizer.encode(text, add_special_tokens=False))
    return found


def learned(args: argparse.Namespace, folder: Path) -> Path:
    """The model after some steps of GRPO on `args.learn`."""
    settings = argparse.Namespace(
        model=str(args.model),
        rows=args.learn,
        compile=False,
        every=0,
        seed=0,
        seconds=None,
        recipe=args.recipe,
        set=[f"train.steps={args.steps}", f"run.checkpoint.every={args.steps}"],
    )
    cfg = config(settings, str(folder / "run"))
    train_config(cfg, view=NoView())
    return export(folder / "run", folder / "learned")


async def epoch(
    engine: NativeEngine, prompts: list[list[int]], params: Sampling, args: argparse.Namespace
) -> list[Completion]:
    """All prompts, as many at once as rows may be alive."""
    found: list[Completion] = []
    at_once = max(1, args.rows // args.group)
    for first in range(0, len(prompts), at_once):
        some = enumerate(prompts[first : first + at_once], first)
        asked = [
            engine.generate(prompt, params, key=args.key * 100_003 + i, n=args.group)
            for i, prompt in some
        ]
        found += [c for group in await asyncio.gather(*asked) for c in group]
    return found


def digest(completions: list[Completion]) -> str:
    content = json.dumps([(c.tokens, c.logprobs) for c in completions])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def measure(
    model: CausalModel,
    prompts: list[list[int]],
    args: argparse.Namespace,
    speculation: Speculation | None,
) -> list[dict[str, Any]]:
    engine = NativeEngine(
        model,
        stop_tokens=() if args.smoke else stop_tokens(model),
        max_batch=args.rows,
        longest=max(map(len, prompts)) + args.response,
        kv_gib=0.01 if args.smoke else None,
        speculation=speculation,
    )
    params = Sampling(args.response, args.temperature)
    rows: list[dict[str, Any]] = []
    for number in (*range(args.epochs), *range(args.epochs)):  # the first series captures graphs
        if number == 0:
            rows.clear()
            engine.answers = AnswerMemory(speculation.memory if speculation else 0)
        args.key = number
        before = replace(engine.stats)
        start = time.perf_counter()
        completions = asyncio.run(epoch(engine, prompts, params, args))
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        done = engine.stats.since(before)
        rows.append(
            {
                "drafts": 0 if speculation is None else speculation.drafts,
                "epoch": number + 1,
                "seconds": round(seconds, 3),
                "rounds": done.steps,
                "tokens": done.generated_tokens,
                "tokens_per_second": round(done.generated_tokens / seconds, 1),
                "accepted_length": round(done.draft_tokens / max(1, done.draft_steps), 3),
                "digest": digest(completions),
            }
        )
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of the model and its tokenizer")
    parser.add_argument("--smoke", action="store_true", help="a random tiny model, exact")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="answers per prompt")
    parser.add_argument("--rows", type=int, default=32, help="answers under way at once")
    parser.add_argument("--response", type=int, default=256, help="tokens of an answer, at most")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--exact", action="store_true", help="compare tokens and log-probs")
    parser.add_argument("--questions", type=Path, help="a JSONL file instead of chain_sum")
    parser.add_argument("--learn", type=Path, metavar="ROWS", help="train on these rows first")
    parser.add_argument("--recipe", choices=TEMPLATES, default="anchor", help="of that training")
    parser.add_argument("--steps", type=int, default=40, help="of that training")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.learn is not None and args.questions is None:
        args.questions = args.learn
    if args.smoke:
        args.exact = True
        args.prompts, args.group, args.rows, args.response = 2, 2, 4, 24
        args.temperature = 0.05
        args.epochs = 2
    elif args.model is None:
        parser.error("give --model DIR, or --smoke")
    return args


def main() -> int:
    args = parse()
    room = tempfile.TemporaryDirectory()
    if args.learn is not None:
        args.model = learned(args, Path(room.name))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.smoke:
        plain = random_model("tiny", device)
        model = CausalModel(plain.module, exact=True)
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(10, 400, (args.prompts, 12), generator=generator).tolist()
    else:
        model = load_model(ModelConfig(path=str(args.model), exact=args.exact))
        prompts = questions(model.tokenizer, args.prompts, args.questions, args.recipe)
    found = {
        drafts: measure(model, prompts, args, Speculation(drafts, args.rows) if drafts else None)
        for drafts in (0, args.drafts)
    }
    later = {
        drafts: sum(r["tokens"] for r in rows[1:]) / sum(r["seconds"] for r in rows[1:])
        for drafts, rows in found.items()
    }
    same = [r["digest"] for r in found[0]] == [r["digest"] for r in found[args.drafts]]
    result = {
        "model": "tiny" if args.smoke else args.model.name,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "exact": args.exact,
        "same": same,
        "speedup": round(later[args.drafts] / later[0], 3),
        "plain": found[0],
        "speculation": found[args.drafts],
    }
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, list)}))
    room.cleanup()
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if args.exact and not same else 0


if __name__ == "__main__":
    sys.exit(main())
