"""Whether llama.cpp says what we say: the same greedy text from an exported GGUF file.

    python benchmarks/gguf_llama_cpp.py --python ENV_WITH_LLAMA_CPP/bin/python [--model DIR]
                                        [--precision f16] [--tokens 48]

Makes a small Llama, Qwen2 and Qwen3 (or takes `--model`, a model directory), trains each on a few
sums so that the likeliest token is clearly so, writes the GGUF file, and asks llama-cpp-python, in
an environment of its own, to go on from the same texts. Compared are the ids of the prompts, which
shows the tokenizer, and the ids of the answers. transformers computes with the weights as the file
has them. Exits with 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from reinforge.models.tiny import tiny_tokenizer
from reinforge.offline.gguf_file import PRECISIONS, end_token, write_gguf

SUMS = [f"{a}+{b}={a + b}, it's the sum" for a in range(1, 40) for b in range(1, 40)]
PROMPTS = ["3+4=", "12+ 7=", "It's 25+1", "9+9=18\n\n2", "déjà 7+", "x\t1+1=2 don't"]

THEIRS = """
import json, sys
from llama_cpp import Llama
path, tokens, prompts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
model = Llama(model_path=path, n_ctx=256, verbose=False, logits_all=False)
for prompt in prompts:
    ids = model.tokenize(prompt.encode(), add_bos=False, special=True)
    answer = []
    for token in model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
        answer.append(token)
        if len(answer) == tokens or token == model.token_eos():
            break
    print(json.dumps({"ids": ids, "answer": answer}), flush=True)
    model.reset()
"""


def trained(kind: Any, folder: Path) -> Path:
    """A small model that has seen some sums."""
    # transformers gives each family a tokenizer of its own, which cuts text in its own way
    tiny_tokenizer(SUMS, 300).save_pretrained(folder)
    kind().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = kind(
        vocab_size=len(tokenizer) + 7,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    order = torch.Generator().manual_seed(0)
    for _ in range(200):
        chosen = [SUMS[i] for i in torch.randint(len(SUMS), (24,), generator=order)]
        ids = torch.tensor(tokenizer.encode("\n".join(chosen)))[None]
        loss = model(ids[:, :250], labels=ids[:, :250]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{kind.model_type}: trained to a loss of {loss.item():.2f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def ours(folder: Path, precision: str, tokens: int) -> list[dict[str, list[int]]]:
    """Greedy answers of the weights as they are in the file, computed in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.copy_(weight.to(PRECISIONS[precision]).float())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = end_token(tokenizer, folder)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer: list[int] = []
        while len(answer) < tokens and end not in answer[-1:]:
            answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
        found.append({"ids": ids, "answer": answer})
    return found


def compare(folder: Path, args: argparse.Namespace) -> bool:
    path = write_gguf(folder, args.precision)
    mine = ours(folder, args.precision, args.tokens)
    asked = [args.python, "-c", THEIRS, str(path), str(args.tokens), json.dumps(PROMPTS)]
    said = subprocess.run(asked, capture_output=True, text=True, check=False)
    if said.returncode:
        raise SystemExit(f"llama.cpp could not read {path}:\n{said.stderr[-2000:]}")
    theirs = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    same = 0
    for prompt, one, other in zip(PROMPTS, mine, theirs, strict=True):
        equal = one == other
        same += equal
        text = tokenizer.decode(other["answer"])
        print(f"  {'same ' if equal else 'OTHER'} {prompt!r} -> {text[:40]!r}")
        if not equal:
            print(f"        ours   {one}\n        theirs {other}")
    print(f"{folder.name}, {args.precision}: {same} of {len(PROMPTS)} answers are the same")
    return same == len(PROMPTS)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of an environment with llama-cpp-python")
    parser.add_argument("--model", type=Path, help="a model directory instead of small models")
    parser.add_argument("--precision", choices=PRECISIONS, default="f16")
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    if args.model is not None:
        return 0 if compare(args.model, args) else 1
    with tempfile.TemporaryDirectory() as room:
        kinds = (LlamaConfig, Qwen2Config, Qwen3Config)
        found = [compare(trained(kind, Path(room) / kind.model_type), args) for kind in kinds]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
