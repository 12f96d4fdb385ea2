"""A small mixture of experts learns to add, with and without its load being balanced, on a CPU.

    python benchmarks/experts.py --seeds 0 1 [--out benchmarks/results/experts.json]
                                 [--plot docs/plots/experts_load.svg]

A Qwen3-MoE of random numbers, two layers of eight experts of which two see a token, learns by SFT
from demonstrations of sums of which two in five are wrong, then by GRPO; both with the same
`train.router_aux_loss`, and once more without. Results are added to `--out` as they come, and what
is there is not run again. Exits with 1 unless every model learned by both, and the load of those
that were balanced is more even than that of the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from plots import Point, lines  # noqa: E402

from reinforge.build.run import train_config  # noqa: E402
from reinforge.config.load import config_from_dict  # noqa: E402
from reinforge.loops.view import NoView  # noqa: E402
from reinforge.models.tiny import tiny_tokenizer  # noqa: E402
from reinforge.offline.export import export  # noqa: E402
from reinforge.watch.runs import read_lines  # noqa: E402

EXPERTS = 8
WINDOW = 10  # steps that are one point of a curve
LOADS = ("experts/load_max", "experts/entropy", "experts/dead")
SUMS = {"terms": 3, "max_value": 9, "operators": "+"}
SFT = {"prompts_per_step": 64, "learning_rate": 4e-3, "schedule": {"kind": "cosine", "warmup": 10}}
GRPO = {"prompts_per_step": 32, "learning_rate": 1e-3}


def make_mixture(path: Path, seed: int) -> Path:
    """0.3 M random numbers; its config says nothing of a loss of routers."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    tokenizer = tiny_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run(seed: int, coefficient: float, steps: tuple[int, int], folder: Path) -> dict[str, Any]:
    """SFT and then GRPO of one model: accuracy on held-out sums and the load of its experts."""
    began = time.monotonic()
    model = make_mixture(folder / "model", seed)
    found: dict[str, Any] = {"seed": seed, "coefficient": coefficient}
    for name, count, settings in (("sft", steps[0], SFT), ("grpo", steps[1], GRPO)):
        sloppy = {"size": 4000, "sloppy": 0.4} if name == "sft" else {"size": 500}
        cfg: dict[str, Any] = {
            "model": {"path": str(model), "device": "cpu"},
            "algorithm": {"name": name, **({"group_size": 8} if name == "grpo" else {})},
            "data": {
                "source": "arithmetic:chain",
                "options": {**SUMS, **sloppy, "seed": seed},
                "eval": {
                    "source": "arithmetic:chain",
                    "size": 96,
                    "options": {**SUMS, "split": "eval", "seed": seed},
                },
            },
            "rewards": [{"name": "exact_number"}],
            "rollout": {"max_new_tokens": 6},
            "train": {"steps": count, "router_aux_loss": coefficient, **settings},
            "eval": {"temperature": 1.0, "samples": 4, "every": count},
            "run": {
                "dir": str(folder / name),
                "seed": seed,
                "checkpoint": {"every": 0},
            },
        }
        done = train_config(config_from_dict(cfg, where=name), view=NoView())
        rows = list(read_lines(Path(done.run_dir) / "metrics.jsonl"))
        held_out = [row for row in rows if "eval/accuracy" in row]
        loads = [row for row in rows if LOADS[0] in row]
        found[name] = {
            "before": _accuracy(held_out[0]),
            "after": _accuracy(held_out[-1]),
            **{key: [round(row[key], 4) for row in loads] for key in LOADS},
        }
        model = export(done.run_dir, folder / f"{name}-model", parent="random weights")
    return {**found, "seconds": round(time.monotonic() - began)}


def _accuracy(row: dict[str, Any]) -> list[float]:
    """With the interval of 95%."""
    return [round(row[f"eval/accuracy{part}"], 4) for part in ("", "_low", "_high")]


def loads(result: dict[str, Any], key: str) -> list[float]:
    """Of all steps, those of SFT first."""
    return [*result["sft"][key], *result["grpo"][key]]


def last(result: dict[str, Any], stage: str, key: str) -> float:
    """Of the last window of a stage."""
    values = result[stage][key][-WINDOW:]
    return float(sum(values) / len(values))


def curve(results: Sequence[dict[str, Any]], key: str) -> list[Point]:
    """Of several seeds: the mean, step by step, with the lowest and highest."""
    points = []
    seeds = [loads(result, key) for result in results]
    for at in range(0, len(seeds[0]) - WINDOW + 1, WINDOW):
        means = [sum(values[at : at + WINDOW]) / WINDOW for values in seeds]
        points.append((at + WINDOW / 2, sum(means) / len(means), min(means), max(means)))
    return points


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    coefficients = sorted({result["coefficient"] for result in results})
    series = {
        f"router_aux_loss {c:g}": curve(
            [result for result in results if result["coefficient"] == c], LOADS[0]
        )
        for c in coefficients
    }
    stage = len(results[0]["sft"][LOADS[0]])
    seeds = len({result["seed"] for result in results})
    lines(
        series,
        f"Load of the busiest of {EXPERTS} experts, mean and range of {seeds} seeds",
        f"step: SFT up to {stage}, then GRPO",
        "share of the tokens, times the number of experts",
        path,
    )


def holds(results: Sequence[dict[str, Any]]) -> bool:
    """Whether all learned, by both, and balancing made every load more even."""
    learned = all(
        result[stage]["after"][1] > result[stage]["before"][2]
        for result in results
        for stage in ("sft", "grpo")
    )
    plain = [result for result in results if not result["coefficient"]]
    balanced = [result for result in results if result["coefficient"]]
    even = all(
        last(b, stage, LOADS[0]) < last(p, stage, LOADS[0])
        for b in balanced
        for p in plain
        for stage in ("sft", "grpo")
    )
    return learned and even


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--coefficients", nargs="+", type=float, default=[0.0, 0.01])
    parser.add_argument("--steps", nargs=2, type=int, default=[300, 200], help="of SFT, of GRPO")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    if args.out is not None and args.out.exists():
        results = json.loads(args.out.read_text())
    known = {(result["seed"], result["coefficient"]) for result in results}
    for seed in args.seeds:
        for coefficient in args.coefficients:
            if (seed, coefficient) in known:
                continue
            with tempfile.TemporaryDirectory(prefix="reinforge-experts-") as folder:
                results.append(run(seed, coefficient, tuple(args.steps), Path(folder)))
            _tell(results[-1])
            if args.out is not None:
                args.out.write_text(json.dumps(results) + "\n")
    if args.plot is not None:
        draw(results, args.plot)
    return 0 if holds(results) else 1


def _tell(result: dict[str, Any]) -> None:
    print(f"seed {result['seed']}, router_aux_loss {result['coefficient']:g}:")
    for stage in ("sft", "grpo"):
        found = result[stage]
        told = ", ".join(f"{key} {last(result, stage, key):.3g}" for key in LOADS)
        print(f"  {stage:4} {found['before'][0]:.1%} -> {found['after'][0]:.1%}; {told}")
    print(f"  {result['seconds']} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
