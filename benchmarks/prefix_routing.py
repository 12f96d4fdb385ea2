"""Episodes of many turns on two vLLM servers: how much of each prompt is found in a prefix cache,
with routing that keeps an episode where it began and with routing by load alone.

    python benchmarks/prefix_routing.py --engine-python .venv-vllm/bin/python [--out FILE]

The environment answers every turn with a few words, for --turns turns, and steps take a random time
so that episodes do not come in turn. The model is small and random: what is counted are tokens, by
vLLM's own counters (vllm:prefix_cache_queries_total, vllm:prefix_cache_hits_total). Each server has
a cache for --cache-tokens: all episodes fit into two, and not into one. Prints for each routing the
hit rate, the seconds, and the rate of a single server with room for everything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from reinforge.build.served import trainer_score
from reinforge.config.data import DataConfig
from reinforge.config.engine import EngineConfig
from reinforge.config.model import ModelConfig
from reinforge.core.engine import Sampling
from reinforge.core.env import Action, Observation, RolloutContext, Step
from reinforge.core.sample import Row
from reinforge.core.weights import Weights
from reinforge.data.chat import Renderer
from reinforge.engines.routing import KEPT
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.served.make import make_served
from reinforge.envs.calls import tool_template_of
from reinforge.models.load import load_model
from reinforge.models.tiny import make_tiny_model
from reinforge.rollout.dialogue.env_player import EnvPlayer
from reinforge.rollout.dialogue.episode import EpisodeLimits

CHAT = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
CONTEXT = 4096
BLOCK = 32  # tokens that a cache keeps or drops together


class Talk:
    """Says something new in every turn, after a while."""

    pure = True

    def __init__(self, turns: int):
        self.turns = turns

    async def reset(self, row: Row, seed: int) -> Observation:
        told = random.Random(seed)
        task = " ".join(str(told.randrange(1000)) for _ in range(40))
        return Observation([{"role": "user", "content": f"Task {seed}: {task}"}])

    async def step(self, action: Action) -> Step:
        chance = random.Random(action.seed)
        await asyncio.sleep(chance.random() * 0.2)
        said = f"turn {action.turn}: {chance.randrange(10**9)}"
        done = action.turn + 1 >= self.turns
        return Step(Observation([{"role": "user", "content": said}]), reward=1.0, done=done)

    async def close(self) -> None:
        """Nothing was opened."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine-python", required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cache-tokens", type=int, default=27_000, help="of each server")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=4, help="of each group")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=24, help="of each turn")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


async def counters(engine: ServedEngine) -> dict[str, float]:
    """Tokens that were looked up in the prefix caches of all servers, and those found there."""
    total = {"queries": 0.0, "hits": 0.0}
    for replica in engine.replicas:
        assert replica.http is not None
        for line in str(await replica.http.get("/metrics")).splitlines():
            for name in total:
                if line.startswith(f"vllm:prefix_cache_{name}_total"):
                    total[name] += float(line.rpartition(" ")[2])
    return total


async def play(engine: ServedEngine, player: EnvPlayer, args: argparse.Namespace) -> dict[str, Any]:
    before = await counters(engine)
    by_replica = [0] * len(engine.replicas)
    place = engine.router.place

    def counted(tokens, loads):  # type: ignore[no-untyped-def]
        at = place(tokens, loads)
        by_replica[at] += 1
        return at

    engine.router.place = counted  # type: ignore[method-assign]
    began = time.monotonic()
    sampling = Sampling(args.new_tokens, ignore_eos=True)
    row = Row("row", "")
    names = [
        (f"group{g}", f"group{g}#{e}") for g in range(args.groups) for e in range(args.episodes)
    ]
    episodes = await asyncio.gather(
        *(player.play(row, RolloutContext(group), uid, sampling) for group, uid in names)
    )
    seconds = time.monotonic() - began
    engine.router.place = place  # type: ignore[method-assign]
    failed = [str(e.failed.why) for e in episodes if e.failed is not None]
    assert not failed, failed[0]
    found = {name: value - before[name] for name, value in (await counters(engine)).items()}
    return {
        "prompt_tokens": found["queries"],
        "found_in_cache": found["hits"],
        "hit_rate": found["hits"] / found["queries"],
        "seconds": seconds,
        "turns": sum(e.turns for e in episodes),
        "requests": by_replica,
    }


def best_rate(answered: list[tuple[list[int], list[int]]]) -> float:
    """Of a single cache that keeps everything, prompts and answers, in blocks."""
    seen: set[tuple[int, ...]] = set()
    shared = 0
    for prompt, answer in answered:
        whole = [*prompt, *answer]
        for end in range(BLOCK, len(whole) + 1, BLOCK):
            mark = tuple(whole[:end])
            shared += BLOCK if mark in seen and end <= len(prompt) else 0
            seen.add(mark)
    return shared / sum(len(prompt) for prompt, _ in answered)


async def main(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path = make_tiny_model(
        folder / "model", width=64, layers=2, heads=2, kv_heads=1, context=CONTEXT, spread=0.2
    )
    model = load_model(ModelConfig(path=str(path), device="cpu"))
    setup = ServerSetup(
        kind="vllm",
        cfg=EngineConfig(
            python=args.engine_python,
            replicas=args.replicas,
            start_seconds=900,
            args={"block-size": BLOCK, "num-gpu-blocks-override": args.cache_tokens // BLOCK},
        ),
        model=str(path),
        folder=folder / "run",
        dtype="float32",
        device="cpu",
        context=CONTEXT,
        vocabulary=int(model.head.weight.shape[0]),
        max_batch=64,
    )
    model.tokenizer.chat_template = CHAT
    renderer = Renderer(model.tokenizer, DataConfig(source="rows.jsonl"))
    engine = make_served(setup, trainer_score(model))
    player = EnvPlayer(
        engine,
        renderer,
        tool_template_of("auto", renderer),
        lambda row: Talk(args.turns),
        EpisodeLimits(CONTEXT - 64, args.turns),
        seed=0,
    )
    answered: list[tuple[list[int], list[int]]] = []
    generate = engine.generate

    async def noted(tokens, params, *, key, n=1):  # type: ignore[no-untyped-def]
        done = await generate(tokens, params, key=key, n=n)
        answered.extend((list(tokens), one.tokens) for one in done)
        return done

    engine.generate = noted  # type: ignore[method-assign]
    results: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("replicas", "turns", "groups", "episodes", "new_tokens", "cache_tokens")
    }
    try:
        for number, (name, kept) in enumerate((("by load", 0), ("sticky", KEPT))):
            engine.router.kept = kept
            await engine.update(Weights("shared", module=model.module), number)
            answered.clear()
            results[name] = await play(engine, player, args)
            results[name]["best_rate"] = best_rate(answered)
            print(name, json.dumps(results[name]), flush=True)
    finally:
        engine.close()
    return results


if __name__ == "__main__":
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(main(args, Path(folder)))
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
