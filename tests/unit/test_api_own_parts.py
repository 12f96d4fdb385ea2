"""Plain functions in place of parts of a run: advantage, loss, sampler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reinforge
from helpers.tiny_runs import DATA, digest, launch, lines
from helpers.toy_rewards import odd
from reinforge.algorithms.parts.advantages import group_relative
from reinforge.config.schema import Config
from reinforge.core.errors import InputError

Make = Callable[..., Config]


def train(cfg: Config, **more: Any) -> reinforge.RunResult:
    return reinforge.train(cfg, data=DATA, rewards=[odd], **more)


def surrogate(
    logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE: -A log p."""
    return -advantages * logprobs, {"mine": torch.ones_like(logprobs)}


def test_an_advantage_and_a_loss_of_ones_own(make: Make) -> None:
    """An advantage that is GRPO's gives GRPO's weights; twice as large, twice the gradient."""
    own = make("own", "grpo", "train.max_grad_norm=0", "train.steps=1")
    double = make("double", "grpo", "train.max_grad_norm=0", "train.steps=1")
    plain = make("plain", "grpo", "train.max_grad_norm=0", "train.steps=1")
    launch(plain)
    seen = []

    def doubled(rollouts: Any, options: Any) -> Tensor:
        seen.append(len(rollouts.rewards))
        found = group_relative(rollouts, options)
        assert isinstance(found, Tensor)
        return 2 * found

    same = train(own, advantage=lambda rollouts, options: group_relative(rollouts, options))
    twice = train(double, advantage=doubled)
    norm = lines(plain)[-1]["train/grad_norm"]
    assert same.metrics["train/grad_norm"] == norm and seen == [16]
    assert twice.metrics["train/grad_norm"] == pytest.approx(2 * norm, rel=1e-4)
    longer = Path(double.run.dir, "longer.json")
    asked = json.loads(Path(double.run.dir, "config.json").read_text())
    longer.write_text(json.dumps(asked | {"train": asked["train"] | {"steps": 2}}))
    with pytest.raises(InputError, match=r"algorithm\.advantage: doubled was given as a Python"):
        reinforge.train(longer, data=DATA, rewards=[odd])


def test_a_loss_that_can_be_imported_is_found_again(make: Make) -> None:
    cfg = make("run", "grpo", "train.steps=1")
    result = train(cfg, loss=surrogate)
    assert result.metrics["policy/mine"] == 1.0


def test_a_sampler_chooses_rows(make: Make) -> None:
    """Even rows in the first step, odd ones in the second."""
    cfg = make("run", "grpo", "train.steps=2")
    rows: list[list[int]] = []

    def sampler(row: reinforge.Row, step: int) -> float:
        return float(int(str(row.prompt).split("+")[0]) % 2 == step % 2)

    with reinforge.Trainer(cfg, data=DATA, rewards=[odd], sampler=sampler) as trainer:
        for step in trainer:
            rows.append([int(str(g.row.prompt).split("+")[0]) % 2 for g in step.groups])
    assert rows == [[0] * 4, [1] * 4]
    with pytest.raises(InputError, match=r"sampler: <lambda> returned 2 for row"):
        train(make("wrong", "grpo"), sampler=lambda row, step: 2.0)
    with pytest.raises(InputError, match=r"sampler: <lambda> raised ZeroDivisionError"):
        train(make("raises", "grpo"), sampler=lambda row, step: 1 / 0)
    always = make("always", "grpo")
    plain = make("plain", "grpo")
    train(always, sampler=lambda row, step: 1.0)
    launch(plain)
    assert digest(always) == digest(plain)
