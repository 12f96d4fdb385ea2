"""The load-balancing loss of a mixture's routers against TRL 1.16.0, from numbers that its own
trainers made (trl_experts_reference.py, trl_experts.json).

Where TRL differs from us by design:
- Micro-batches: TRL takes the mean of their losses, whatever is in them. Ours are weighted with
  their share of the trained tokens, so that it does not matter on which rank a row is.
- GRPO: TRL computes a prompt once for each of its answers, and it counts as often. Ours does too
  where prompts are not shared (`train.share_prompts`); a shared one counts once.
- Without a coefficient of the run TRL takes that of the model's config wherever there is one. Ours
  does where the config asks for the loss (`output_router_logits`), as transformers itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_experts_reference import COEFFICIENT, KINDS, ROWS, mixture, routers

from helpers.toys import gradients, relative, train_config
from reinforge.algorithms.losses.policy import PolicyLoss
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.algorithms.parts.reduce import REDUCERS
from reinforge.algorithms.parts.surrogates import ppo_clip
from reinforge.backends.local import LocalBackend
from reinforge.core.batch import Totals, pack
from reinforge.core.sample import Sample
from reinforge.models.causal import CausalModel

TRL: dict[str, Any] = json.loads((Path(__file__).parent / "trl_experts.json").read_text())["cases"]


def samples() -> list[Sample]:
    return [
        Sample(
            uid=f"s{i}",
            group="g",
            episode=f"s{i}",
            tokens=torch.tensor(ids),
            trained=torch.arange(len(ids)) >= prompt,
            logprobs=torch.zeros(len(ids)),
            versions=torch.zeros(len(ids), dtype=torch.int32),
            reward=0.0,
            streams={"advantages": torch.zeros(len(ids))},
        )
        for i, (ids, prompt) in enumerate(ROWS)
    ]


def one_pass(
    kind: str, loss: Any, rows: list[Sample], budget: int = 1000
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """What is told, and the gradients of the routers."""
    cfg = train_config(router_aux_loss=COEFFICIENT)
    backend = LocalBackend(CausalModel(mixture(kind)), cfg, total_steps=10)
    batches = pack(rows, budget)
    told = backend.forward_backward(batches, loss, Totals.of(batches))
    found = gradients(backend)
    return told, {name: found[name] for name in routers(backend.model.module)}


def theirs(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(grad) for name, grad in case["routers"].items()}


@pytest.mark.parametrize("kind", KINDS)
def test_sft(kind: str) -> None:
    """Loss, the routers' part of it and their gradient, over rows that TRL pads and we do not."""
    want = TRL[kind]["sft"]
    told, found = one_pass(kind, NLLLoss(), samples())
    assert told["train/router_aux_loss"] == pytest.approx(want["aux_loss"], abs=1e-5)
    assert told["train/loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert relative(found, theirs(want)) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_at_a_time(kind: str) -> None:
    """The plain mean over the micro-batches is TRL's; ours is weighted with the trained tokens."""
    want = TRL[kind]["sft, a row at a time"]
    alone = [one_pass(kind, NLLLoss(), [row])[0]["train/router_aux_loss"] for row in samples()]
    assert sum(alone) / len(alone) == pytest.approx(want["aux_loss"], abs=1e-5)
    trained = [row.n_trained for row in samples()]
    mean = sum(a * n for a, n in zip(alone, trained, strict=True)) / sum(trained)
    told, _ = one_pass(kind, NLLLoss(), samples(), 1)
    assert told["train/router_aux_loss"] == pytest.approx(mean, abs=1e-5)
    assert abs(mean - want["aux_loss"]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_grpo(kind: str) -> None:
    """Advantages are 0, so the loss is that of the routers, over prompts and answers."""
    want = TRL[kind]["grpo"]
    told, found = one_pass(kind, PolicyLoss(ppo_clip, REDUCERS["token_mean"]), samples())
    assert told["train/router_aux_loss"] == pytest.approx(want["aux_loss"], abs=1e-5)
    assert told["train/loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert relative(found, theirs(want)) < 1e-4
