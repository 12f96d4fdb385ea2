"""A small model learns to use a tool, over several turns, on a CPU: the share of problems solved before and after.

A Llama of 0.2 M parameters is made from random numbers. SFT shows it transcripts of products that it cannot work out: in two of
five the assistant calls the calculator and copies the result, in the others it makes a number up. GRPO in the environment
`calculator` then lets it try for itself. Held-out problems occur in neither.

With --agent an agent program (recipes/agents/calculator_agent.py) plays in place of the environment.

    python benchmarks/multi_turn.py [--quick] [--agent] [--out results/multi_turn.json]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.app.api import train_config  # noqa: E402
from reinforge.app.build import Given  # noqa: E402
from reinforge.app.export import export  # noqa: E402
from reinforge.app.tiny import make_tiny_model  # noqa: E402
from reinforge.config.load import config_from_dict  # noqa: E402
from reinforge.envs.shipped import calculator, shipped  # noqa: E402

HELD_OUT = 7  # problems whose numbers add up to a multiple of it are never trained on
SIZES: dict[str, dict[str, Any]] = {
    "full": {"width": 64, "layers": 2, "transcripts": 4000, "sft_steps": 700, "rl_steps": 60, "prompts": 16, "held_out": 64},
    "quick": {"width": 32, "layers": 2, "transcripts": 300, "sft_steps": 30, "rl_steps": 2, "prompts": 4, "held_out": 8},
}


def problems(seed: int, size: int, *, held_out: bool) -> list[dict[str, Any]]:
    """Distinct products of two numbers of two digits."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if ((a + b) % HELD_OUT == 0) == held_out]
    random.Random(seed).shuffle(pairs)
    return [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs[:size]]


def transcript(problem: dict[str, Any], uses_tool: bool, rng: random.Random) -> dict[str, Any]:
    expression = problem["prompt"].removesuffix("=")
    tool = shipped("calculator", {})
    assert tool is not None
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem["prompt"]}]
    if uses_tool:
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
        result = calculator(expression)
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "name": "calculator", "content": result},
                     {"role": "assistant", "content": result}]  # fmt: skip
    else:
        messages.append({"role": "assistant", "content": str(rng.randint(100, 9999))})
    return {"messages": messages, "tools": [tool.schema]}


ENV = {"env": {"name": "calculator", "max_turns": 3, "max_tokens": 128}}
AGENT = {"agent": {"name": f"{ROOT / 'recipes' / 'agents' / 'calculator_agent.py'}:agent", "max_tokens": 128}}


def config(
    folder: Path, name: str, model: Path, algorithm: dict[str, Any], train: dict[str, Any], seed: int, player: dict[str, Any] = ENV
) -> Any:
    return config_from_dict({
        "model": {"path": str(model), "device": "cpu"}, "algorithm": algorithm, "data": {"source": "python"},
        **player, "rollout": {"max_new_tokens": 40},
        "train": train, "eval": {"temperature": 1.0, "samples": 2, "at_start": algorithm["name"] == "grpo"},
        "run": {"dir": str(folder / name), "seed": seed, "checkpoint": {"every": 0}, "log": {"samples_every": 0}},
    }, where="multi_turn")  # fmt: skip


def run(folder: Path, size: dict[str, Any], seed: int = 0, agent: bool = False) -> dict[str, Any]:
    start = time.monotonic()
    rng = random.Random(seed)
    train, held_out = problems(seed, size["transcripts"], held_out=False), problems(seed, size["held_out"], held_out=True)
    rows = [transcript(p, rng.random() < 0.4, rng) for p in train]
    words = [
        '<tool_call>{"name": "calculator", "arguments": {"expression": "12*34"}}</tool_call>',
        "T: calculator\nQ:12*34=\nA:408\nR:408\n",
    ]
    model = make_tiny_model(folder / "model", seed=seed, width=size["width"], layers=size["layers"], heads=4, kv_heads=4, context=128, text=words * 50,
                            vocabulary=420, spread=0.08, chat=True)  # fmt: skip
    sft = train_config(config(folder, "sft", model, {"name": "sft"}, {
        "steps": size["sft_steps"], "prompts_per_step": 64, "learning_rate": 3e-3, "schedule": {"kind": "cosine", "warmup": 20}}, seed),
        Given(data=rows, eval_data=None))  # fmt: skip
    taught = export(sft.run_dir, folder / "sft-model")
    middle = time.monotonic()
    rl = train_config(config(folder, "grpo", taught, {"name": "grpo", "group_size": 8}, {
        "steps": size["rl_steps"], "prompts_per_step": size["prompts"], "learning_rate": 3e-4}, seed, AGENT if agent else ENV), Given(data=train, eval_data=held_out))  # fmt: skip
    lines = [json.loads(line) for line in (rl.run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "eval/accuracy" in line]
    name = "agent" if agent else "env"
    return {
        "before": found[0]["eval/accuracy"], "after": found[-1]["eval/accuracy"], "tool_use_before": found[0].get(f"eval/{name}/used_tools"),
        "tool_use_after": found[-1].get(f"eval/{name}/used_tools"), "n": found[-1]["eval/n"], "turns": found[-1][f"eval/{name}/turns"],
        "seconds_sft": round(middle - start, 1), "seconds_rl": round(time.monotonic() - middle, 1), "seed": seed,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; learns nothing")
    parser.add_argument("--agent", action="store_true", help="an agent program instead of the environment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reinforge-multi-turn-") as folder:
        result = run(Path(folder), SIZES["quick" if args.quick else "full"], args.seed, args.agent)
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
