"""Every recipe of an algorithm runs: two steps with a tiny random model, in seconds.

They differ in the algorithm and in what it needs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.paths import ROOT
from helpers.toys import SilentView
from reinforge.algorithms.catalogue import TABLE
from reinforge.build.run import train_config
from reinforge.config.load import load_config

RECIPES = ROOT / "recipes"
NAMES = sorted(path.stem for path in (RECIPES / "algorithms").glob("*.yaml"))
SMALL = [
    "train.steps=2",
    "train.prompts_per_step=4",
    "data.eval={}",
    "eval={}",
    "rollout.kv_gib=0.01",
    "run.log.samples_every=0",
]
# a random model adds nothing up, and rewards that are all 0 would train nothing
SIGNAL = "rewards.0.name=helpers.toy_rewards:odd"


def steps(path: Path, model: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    cfg = load_config(
        path,
        [
            f"model.path={model}",
            "model.device=cpu",
            f"run.dir={folder / 'run'}",
            *SMALL,
            *overrides,
        ],
    )
    train_config(cfg, view=SilentView())
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("name", NAMES)
def test_two_steps(name: str, tiny_dir: str, tmp_path: Path) -> None:
    """Both steps have rewards that differ, a finite loss, and a gradient that moves something; a
    critic learns first, alone.
    """
    critic = TABLE[name].parts.get("advantage") == "gae"
    overrides = (
        ["rewards=[]"] if name == "sft" else [SIGNAL, *(["critic.warmup=1"] if critic else [])]
    )
    lines = steps(RECIPES / "algorithms" / f"{name}.yaml", tiny_dir, tmp_path, *overrides)
    assert len(lines) == 2
    if critic:
        assert lines[0]["critic/grad_norm"] > 0 and "policy/loss" not in lines[0]
        lines = lines[1:]
    for line in lines:
        assert (
            line["train/grad_norm"] > 0
            and line["train/skipped"] == line["train/empty"] == 0
            and line["tokens/trained"] > 0
        )
        assert math.isfinite(line["train/loss"])
        assert name == "sft" or (line["reward/std"] > 0 and math.isfinite(line["policy/loss"]))


def test_recipes_differ_in_the_algorithm_only() -> None:
    allowed = {"algorithm", "run", "critic"}
    base = yaml.safe_load((RECIPES / "algorithms" / "grpo.yaml").read_text())
    for name in NAMES:
        found = yaml.safe_load((RECIPES / "algorithms" / f"{name}.yaml").read_text())
        assert (
            found["algorithm"]["name"] == name and found["run"]["dir"] == f"runs/algorithms/{name}"
        )
        different = {key for key in base.keys() | found.keys() if base.get(key) != found.get(key)}
        assert different <= allowed | (
            {"rewards"} if name == "gdpo" else {"train"} if name == "sft" else set()
        ), name


def test_ppo_against_a_reward_model(tiny_dir: str, tmp_path: Path) -> None:
    """Four models: the reference agrees with the policy at first, the reward model's scores are the
    reward, the critic learns.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_pretrained(tiny_dir, num_labels=1).save_pretrained(
            tmp_path / "reward"
        )
    AutoTokenizer.from_pretrained(tiny_dir).save_pretrained(tmp_path / "reward")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}: "}) + "\n" for i in range(32))
    )
    lines = steps(
        RECIPES / "ppo_rlhf.yaml",
        tiny_dir,
        tmp_path,
        f"data.source={tmp_path / 'prompts.jsonl'}",
        f"rewards.0.options.path={tmp_path / 'reward'}",
        "data.max_length=32",
        "rollout.max_new_tokens=8",
        "train.learning_rate=1e-3",
        "train.prompts_per_step=8",
        "train.steps=3",
        "critic.warmup=1",
    )
    assert [round(line["policy/kl"], 4) for line in lines[:2]] == [0, 0] and abs(
        lines[2]["policy/kl"]
    ) > 1e-3
    assert all(line["critic/loss"] > 0 and line["reward/std"] > 0 for line in lines)
    assert "policy/loss" not in lines[0] and lines[1]["train/grad_norm"] > 0


def test_the_model_that_recipes_start_from(tmp_path: Path) -> None:
    """`reinforge tiny`, but for its length: a directory that transformers loads, and 250 steps of
    which two change the weights.
    """
    from transformers import AutoModelForCausalLM

    from reinforge.cli.main import main
    from reinforge.offline.starter_model import make_taught_model

    one, two = (
        AutoModelForCausalLM.from_pretrained(make_taught_model(tmp_path / str(n), steps=n))
        for n in (1, 2)
    )
    assert one.num_parameters() < 150_000
    assert any((a != b).any() for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert main(["tiny", str(tmp_path / "1")]) == 2  # not empty
