"""Seconds per GRPO step on a CPU: reinforge against TRL, same model file, same prompts, same number
of samples, one run.

    # an environment with trl==1.16.0
    python benchmarks/cpu_vs_trl.py --trl-python PATH/TO/ENV/bin/python

Two workloads of 128 samples (16 prompts x 8): `fixed`, where every completion has 32 tokens, and
`varied`, where lengths are geometric with mean 12 under a cap of 64. The model (about 2 M
parameters) is first trained for a moment to end its texts with that frequency, so both libraries
sample freely from the same distribution. Each library runs in a process of its own, one after the
other, with all cores; the median of the steps after the first counts. Prints seconds, ratios and
mean lengths.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PROMPT_TOKENS = 24
PROMPTS = 16
GROUP = 8
WORKLOADS = {"fixed": {"mean": None, "cap": 32}, "varied": {"mean": 12, "cap": 64}}


def make_model(folder: Path, mean: int | None, cap: int) -> Path:
    """A Llama of about 2 M parameters that writes letters and stops with probability 1/mean (or
    never).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from reinforge.models.tiny import make_tiny_model

    words = ["".join(random.Random(i).choices("abcdefghij", k=5)) + " " for i in range(4000)]
    path = make_tiny_model(
        folder, width=192, layers=4, heads=6, kv_heads=2, text=words, vocabulary=2048
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(60):
        ids = torch.randint(300, 1000, (32, PROMPT_TOKENS + cap))
        if mean is not None:
            ids[torch.rand(ids.shape) < 1 / mean] = tokenizer.eos_token_id
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    return path


def write_prompts(path: Path, model: Path, count: int) -> None:
    """Prompts of about PROMPT_TOKENS tokens, as text: both libraries tokenise them themselves."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(1)
    rows = [
        {"prompt": tokenizer.decode([rng.randrange(300, 1000) for _ in range(PROMPT_TOKENS)])}
        for _ in range(count)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))


def measure(
    python: str, script: str, model: Path, prompts: Path, cap: int, steps: int
) -> dict[str, float]:
    command = [
        python,
        str(HERE / "peers" / script),
        str(model),
        str(prompts),
        str(cap),
        str(steps),
        str(PROMPTS),
        str(GROUP),
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    if out.returncode:
        sys.exit(f"{script} failed:\n{out.stderr[-3000:]}")
    return json.loads(out.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu_vs_trl.json")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, load in WORKLOADS.items():
            model = make_model(Path(folder) / name, load["mean"], load["cap"])
            prompts = Path(folder) / f"{name}.jsonl"
            write_prompts(prompts, model, PROMPTS * (args.steps + 2))
            ours = measure(sys.executable, "ours_grpo.py", model, prompts, load["cap"], args.steps)
            peer = measure(args.trl_python, "trl_grpo.py", model, prompts, load["cap"], args.steps)
            results[name] = {
                "reinforge": ours,
                "trl": peer,
                "ratio": (
                    statistics.median(peer["steps"][1:]) / statistics.median(ours["steps"][1:])
                ),
            }
    print(f"{'workload':<10}{'reinforge s':>12}{'TRL s':>9}{'ratio':>8}{'mean length':>22}")
    for name, r in results.items():
        ours = r["reinforge"]
        peer = r["trl"]
        lengths = f"{ours['length']:.1f} / {peer['length']:.1f}"
        print(
            f"{name:<10}{statistics.median(ours['steps'][1:]):>12.2f}{statistics.median(peer['steps'][1:]):>9.2f}{r['ratio']:>7.2f}x{lengths:>22}"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
