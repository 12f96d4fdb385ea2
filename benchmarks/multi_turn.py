"""A small model learns to use a tool, over several turns, on a CPU: the share of problems solved
before and after.

A Llama of 0.2 M parameters is made from random numbers. SFT shows it transcripts of products that
it cannot work out: in two of five the assistant calls the calculator and copies the result, in the
others it makes a number up. GRPO in the environment `calculator` then lets it try for itself.
Held-out problems occur in neither.

Two arms start from the same taught model, with the same settings: the environment, and an agent
program written against the OpenAI client (recipes/agents/calculator_agent.py), which knows nothing
of training. Before they learn, both play the held-out problems greedily: the rows that this would
train must be the same, id by id.

    python benchmarks/multi_turn.py [--quick] [--arms env agent] [--out results/multi_turn.json]
                                    [--plot docs/plots/multi_turn.svg]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.build.caller_objects import CallerObjects  # noqa: E402
from reinforge.build.evaluation import build_heldout  # noqa: E402
from reinforge.build.inputs import read_inputs  # noqa: E402
from reinforge.build.local import LocalFactories  # noqa: E402
from reinforge.build.run import train_config  # noqa: E402
from reinforge.config.load import config_from_dict  # noqa: E402
from reinforge.core.aio import run_sync  # noqa: E402
from reinforge.core.sample import Group, Sample  # noqa: E402
from reinforge.envs.shipped import calculator, shipped  # noqa: E402
from reinforge.models.tiny import make_tiny_model  # noqa: E402
from reinforge.offline.export import export  # noqa: E402
from reinforge.watch.view import View  # noqa: E402

HELD_OUT = 7  # problems whose numbers add up to a multiple of it are never trained on
SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "width": 64,
        "layers": 2,
        "transcripts": 4000,
        "sft_steps": 700,
        "rl_steps": 60,
        "prompts": 16,
        "held_out": 128,
        "eval_every": 10,
    },
    "quick": {
        "width": 32,
        "layers": 2,
        "transcripts": 300,
        "sft_steps": 30,
        "rl_steps": 2,
        "prompts": 4,
        "held_out": 8,
        "eval_every": 0,
    },
}


def problems(seed: int, size: int, *, held_out: bool) -> list[dict[str, Any]]:
    """Distinct products of two numbers of two digits."""
    pairs = [
        (a, b)
        for a in range(10, 100)
        for b in range(10, 100)
        if ((a + b) % HELD_OUT == 0) == held_out
    ]
    random.Random(seed).shuffle(pairs)
    return [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs[:size]]


def transcript(problem: dict[str, Any], uses_tool: bool, rng: random.Random) -> dict[str, Any]:
    expression = problem["prompt"].removesuffix("=")
    tool = shipped("calculator", {})
    assert tool is not None
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem["prompt"]}]
    if uses_tool:
        call = {
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expression": expression}},
        }
        result = calculator(expression)
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": result},
            {"role": "assistant", "content": result},
        ]
    else:
        messages.append({"role": "assistant", "content": str(rng.randint(100, 9999))})
    return {"messages": messages, "tools": [tool.schema]}


ARMS: dict[str, dict[str, Any]] = {
    "env": {"env": {"name": "calculator", "max_turns": 3, "max_tokens": 128}},
    "agent": {
        "agent": {
            "name": f"{ROOT / 'recipes' / 'agents' / 'calculator_agent.py'}:agent",
            "max_tokens": 128,
        }
    },
}
SAMPLED = {"temperature": 1.0, "samples": 2}  # how success is measured


def config(
    folder: Path,
    name: str,
    model: Path,
    algorithm: dict[str, Any],
    train: dict[str, Any],
    seed: int,
    player: dict[str, Any],
    evaluation: dict[str, Any],
) -> Any:
    return config_from_dict(
        {
            "model": {"path": str(model), "device": "cpu"},
            "algorithm": algorithm,
            "data": {"source": "python"},
            **player,
            "rollout": {"max_new_tokens": 40},
            "train": train,
            "eval": evaluation,
            "run": {
                "dir": str(folder / name),
                "seed": seed,
                "checkpoint": {"every": 0},
                "log": {"samples_every": 20},
            },
        },
        where="multi_turn",
    )


def teach(folder: Path, size: dict[str, Any], seed: int = 0) -> Path:
    """The model that both arms start from: random numbers, then SFT on transcripts."""
    rng = random.Random(seed)
    rows = [
        transcript(p, rng.random() < 0.4, rng)
        for p in problems(seed, size["transcripts"], held_out=False)
    ]
    words = [
        '<tool_call>{"name": "calculator", "arguments": {"expression": "12*34"}}</tool_call>',
        "T: calculator\nQ:12*34=\nA:408\nR:408\n",
    ]
    model = make_tiny_model(
        folder / "model",
        seed=seed,
        width=size["width"],
        layers=size["layers"],
        heads=4,
        kv_heads=4,
        context=128,
        text=words * 50,
        vocabulary=420,
        spread=0.08,
        chat=True,
    )
    sft = train_config(
        config(
            folder,
            "sft",
            model,
            {"name": "sft"},
            {
                "steps": size["sft_steps"],
                "prompts_per_step": 64,
                "learning_rate": 3e-3,
                "schedule": {"kind": "cosine", "warmup": 20},
            },
            seed,
            ARMS["env"],
            {},
        ),
        CallerObjects(data=rows, eval_data=None),
    )
    return export(sft.run_dir, folder / "sft-model")


def learn(
    folder: Path, taught: Path, size: dict[str, Any], seed: int = 0, arm: str = "env"
) -> dict[str, Any]:
    """GRPO from the taught model; success before, on the way and after, and the mean reward of
    every step.
    """
    start = time.monotonic()
    train = problems(seed, size["transcripts"], held_out=False)
    held_out = problems(seed, size["held_out"], held_out=True)
    rl = train_config(
        config(
            folder,
            f"grpo-{arm}",
            taught,
            {"name": "grpo", "group_size": 8},
            {"steps": size["rl_steps"], "prompts_per_step": size["prompts"], "learning_rate": 3e-4},
            seed,
            ARMS[arm],
            {**SAMPLED, "at_start": True, "every": size["eval_every"]},
        ),
        CallerObjects(data=train, eval_data=held_out),
    )
    lines = [json.loads(line) for line in (rl.run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "eval/accuracy" in line]
    return {
        "before": found[0]["eval/accuracy"],
        "after": found[-1]["eval/accuracy"],
        "tool_use_before": found[0].get(f"eval/{arm}/used_tools"),
        "tool_use_after": found[-1].get(f"eval/{arm}/used_tools"),
        "n": found[-1]["eval/n"],
        "turns": found[-1][f"eval/{arm}/turns"],
        "curve": [
            [
                line["step"],
                *(round(line[f"eval/accuracy{part}"], 4) for part in ("", "_low", "_high")),
            ]
            for line in found
        ],
        "reward": [round(line["reward/mean"], 4) for line in lines if "reward/mean" in line],
        "seconds_rl": round(time.monotonic() - start, 1),
    }


def run(
    folder: Path, size: dict[str, Any], seed: int = 0, arms: Sequence[str] = ("env",)
) -> dict[str, Any]:
    start = time.monotonic()
    taught = teach(folder, size, seed)
    seconds = round(time.monotonic() - start, 1)
    same = {"greedy": compared(taught, size, seed)} if len(arms) > 1 else {}
    return {
        "seed": seed,
        "seconds_sft": seconds,
        **same,
        **{arm: learn(folder, taught, size, seed, arm) for arm in arms},
    }


def compared(taught: Path, size: dict[str, Any], seed: int = 0) -> dict[str, int]:
    """Held-out problems played greedily through both: rows that are the same, id by id.

    Where a tool call cannot be read, the environment says so and lets the model try again; to the
    agent it is an answer like any other. Those are counted apart.
    """
    rows = problems(seed, 1, held_out=False)
    held_out = problems(seed, size["held_out"], held_out=True)
    groups: dict[str, list[Group]] = {arm: [] for arm in ARMS}
    for arm, player in ARMS.items():
        cfg = config(
            taught.parent,
            "check",
            taught,
            {"name": "grpo"},
            {"steps": 1},
            seed,
            player,
            {"temperature": 0.0},
        )
        given = CallerObjects(data=rows, eval_data=held_out)
        factories = LocalFactories()
        inputs = read_inputs(cfg, given, View(), factories.make_rewards)
        heldout = build_heldout(inputs, factories, View(), on_groups=groups[arm].extend)
        assert heldout is not None
        run_sync(heldout())
    read = [
        (a, b)
        for a, b in zip(*groups.values(), strict=True)
        if not a.metrics.get("env/malformed_calls")
    ]
    return {
        "problems": len(held_out),
        "calls_readable": len(read),
        "same_rows": sum(same(a.samples, b.samples) for a, b in read),
        "ids": sum(len(s.tokens) for a, _ in read for s in a.samples),
    }


def same(a: Sequence[Sample], b: Sequence[Sample]) -> bool:
    return [(s.tokens.tolist(), s.trained.tolist(), s.reward) for s in a] == [
        (s.tokens.tolist(), s.trained.tolist(), s.reward) for s in b
    ]


def holds(result: dict[str, Any]) -> bool:
    """Both learn, end within five points of each other, and put the same ids before the model."""
    env = result["env"]
    agent = result["agent"]
    greedy = result["greedy"]
    learned = all(arm["after"] > arm["before"] + 0.3 for arm in (env, agent))
    return (
        learned
        and abs(env["after"] - agent["after"]) <= 0.05
        and greedy["same_rows"] == greedy["calls_readable"] > 0
    )


def draw(result: dict[str, Any], path: Path) -> None:
    import plots

    names = {"env": "environment", "agent": "agent (OpenAI client)"}
    series = {
        names[arm]: [tuple(point) for point in result[arm]["curve"]]
        for arm in ARMS
        if arm in result
    }
    plots.lines(
        series,
        "Learning to use a calculator, 0.2 M parameters, one CPU core",
        "GRPO step",
        "held-out problems solved",
        path,
        percent=True,
    )  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; learns nothing"
    )
    parser.add_argument("--arms", nargs="+", choices=sorted(ARMS), default=["env", "agent"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--runs",
        type=Path,
        help="keep the runs there; each has a report with transcripts from before and after",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reinforge-multi-turn-") as folder:
        result = run(
            args.runs or Path(folder),
            SIZES["quick" if args.quick else "full"],
            args.seed,
            args.arms,
        )
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot is not None:
        draw(result, args.plot)
    if not args.quick and len(args.arms) == len(ARMS):
        sys.exit(0 if holds(result) else 1)


if __name__ == "__main__":
    main()
