"""`reinforge check`: can this pipeline learn anything at all?

A trivial reward, a few steps, a pass or a fail.

A model that cannot learn to prefer half of the letters and digits will not learn mathematics; what
fails here is plumbing (masks, signs, shifts, learning rate, sampling), and it fails in a minute.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.errors import StoppedByPolicy
from reinforge.models.tiny import make_tiny_model
from reinforge.watch.runs import read_lines

STEPS = 40
RISE = 0.3  # how much the reward must rise
SHARE = 0.6  # a model that begins high need only make this share of the way to 1


def share_of_even(prompts: list[Any], completions: list[str], **columns: Any) -> list[float | None]:
    """The trivial reward: how much of the text are characters with an even code (0, 2, 4 ..., b, d,
    f ..., the blank). Whatever a model writes, it has some of both, also one that was taught to
    answer in digits.
    """
    return [sum(ord(ch) % 2 == 0 for ch in c) / max(1, len(c)) for c in completions]


def rise_from(before: float) -> float:
    """How much the reward must rise from there.

    >>> rise_from(0.2), round(rise_from(0.8), 2)
    (0.3, 0.12)
    """
    return min(RISE, SHARE * (1 - before))


def check(config: Config | None = None) -> dict[str, Any]:
    """Trains with the trivial reward and compares the first step, before any update, with the last
    ones. With a config: its model, algorithm and sampling on its own prompts, with short
    completions; without: a tiny model made for it.
    """
    with tempfile.TemporaryDirectory(prefix="reinforge-check-") as folder:
        data = None
        if config is None:
            model = make_tiny_model(Path(folder) / "model", width=64, layers=2, heads=4)
            raw: dict[str, Any] = {
                "model": {"path": str(model)},
                "algorithm": {"name": "grpo"},
                "data": {"source": "python"},
                "train": {"steps": STEPS, "learning_rate": 3e-3},
                "run": {"dir": folder},
            }
            data = [{"prompt": f"{i}: "} for i in range(64)]
        else:
            raw = config.model_dump(mode="json")
            if config.algorithm.family != "policy_gradient":
                raw["algorithm"] = {"name": "grpo"}
            raw["train"].update(steps=STEPS, epochs=None)
        raw["data"] = {**raw["data"], "eval": {}}
        raw["rewards"] = [{"name": "reinforge.check.learning:share_of_even"}]
        raw["rollout"] = {**raw.get("rollout", {}), "max_new_tokens": 12, "stop": []}
        raw["train"]["prompts_per_step"] = 8
        raw["run"] = {
            "dir": str(Path(folder) / "run"),
            "checkpoint": {"every": 0},
            "log": {"samples_every": 0},
        }
        raw["eval"] = {}
        raw["env"] = None  # single turns: what is proved is that the reward rises
        before, after = _first_and_last(
            config_from_dict(raw, where="check"), CallerObjects(data=data)
        )
    wanted = rise_from(before)
    result = {
        "reward_before": before,
        "reward_after": after,
        "steps": STEPS,
        "learned": after >= before + wanted and after > before,
    }
    if not result["learned"]:
        raise StoppedByPolicy(
            f"the reward went from {before:.2f} to {after:.2f} in {STEPS} steps; it should rise by"
            f" {wanted:.2f}. The pipeline does not learn: try a larger train.learning_rate, and"
            " look at train/grad_norm, policy/clip_fraction and groups/zero_variance."
        )
    return result


def _first_and_last(config: Config, given: CallerObjects) -> tuple[float, float]:
    result = train_config(config, given)
    rewards = [
        line["reward/mean"]
        for line in read_lines(result.run_dir / "metrics.jsonl")
        if line.get("reward/mean") is not None
    ]
    return rewards[0], sum(rewards[-3:]) / 3
