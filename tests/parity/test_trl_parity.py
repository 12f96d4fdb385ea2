"""Our advantages, losses and gradients against TRL 1.16.0, from numbers that its own code made
(trl_reference.py, trl_grpo.json).

Where TRL differs from us by design, and why these cases still agree:
- Advantages: same formula (ddof 1, eps 1e-4). TRL works in float32 and subtracts a rounded mean, so
  a group of equal rewards can keep a residue; ours is exactly 0. TRL reads groups from the position
  of a row, we from its id.
- KL: TRL's plain k3 (`use_bias_correction_kl=False`) is our `k3` with `kl_importance=False`. Its
  default multiplies k3 by the ratio and lets the gradient through the ratio: d(rho k3) = rho (k3 +
  k3') = rho k2', which is our `k3+` (value of k3, gradient of k2) with the detached ratio as
  weight. So both have the reverse-KL gradient, and ours says so in the estimator's name.
- dapo: both divide by the trained tokens of the whole batch. grpo and dr_grpo: TRL averages means
  of micro-batches, which is the global mean only while all micro-batches have equally many rows, as
  here. Rows without a trained token count in TRL's divisor, not in ours.
- Ratios: TRL takes a plain exp; ours is clamped at exp(+-20), out of reach here. TRL's dapo
  `loss_type` changes only the divisor: clip 0.28, dynamic sampling and overlong shaping are
  separate settings there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from reinforge.algorithms.build import build
from reinforge.algorithms.losses.policy import PolicyLoss
from reinforge.algorithms.parts.advantages import AdvantageOptions, Rollouts, group_relative
from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Totals

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parent / "trl_grpo.json").read_text())
INPUTS = {
    name: torch.tensor(value, dtype=torch.float64) for name, value in REFERENCE["inputs"].items()
}


@pytest.mark.parametrize("case", REFERENCE["advantages"], ids=lambda c: f"{c['case']}-{c['scale']}")
def test_advantages(case: dict[str, Any]) -> None:
    n = len(case["rewards"])
    rewards = torch.tensor(
        [float("nan") if r is None else r for r in case["rewards"]], dtype=torch.float64
    )
    rollouts = Rollouts(
        rewards,
        torch.tensor(REFERENCE["group"]),
        torch.arange(n),
        torch.arange(n),
        torch.ones(n, dtype=torch.int64),
    )
    ours = group_relative(rollouts, AdvantageOptions(scale=case["scale"]))
    torch.testing.assert_close(
        ours, torch.tensor(case["advantages"], dtype=torch.float64), atol=1e-6, rtol=1e-6
    )


def label(case: dict[str, Any]) -> str:
    kl = f"beta{case['beta']}{'-weighted' if case['kl_weighted'] else ''}"
    return (
        f"{case['name']}-{kl}-{case['micro_batches']}x-{'old' if case['with_old'] else 'onpolicy'}"
    )


@pytest.mark.parametrize("case", REFERENCE["losses"], ids=label)
def test_loss_and_gradient(case: dict[str, Any]) -> None:
    algorithm = build(
        case["name"],
        kl_coefficient=case["beta"],
        kl_estimator="k3+" if case["kl_weighted"] else "k3",
        max_new_tokens=REFERENCE["max_length"],
    )
    assert [algorithm.options.clip_low, algorithm.options.clip_high] == case["clip"]
    loss_function = algorithm.loss
    assert isinstance(loss_function, PolicyLoss)
    loss_function.kl_importance = case["kl_weighted"]

    mask = INPUTS["mask"].bool()
    row = torch.arange(len(mask))[:, None].expand(mask.shape)[mask]
    lengths = mask.sum(1)
    leaf = INPUTS["logprobs"].clone().requires_grad_()
    streams = {
        name: INPUTS[name][mask]
        for name in ("old", "reference")
        if name != "old" or case["with_old"]
    }
    streams["advantages"] = INPUTS["advantages"][row]
    totals = Totals(int(mask.sum()), len(mask), REFERENCE["max_length"], {})
    tokens = TrainedTokens(leaf[mask], None, row, lengths, lengths[row], streams)
    loss, _ = loss_function(tokens, totals)
    loss.backward()

    assert loss.item() == pytest.approx(case["loss"], abs=1e-9)
    assert leaf.grad is not None and leaf.grad.abs().max() > 1e-3
    torch.testing.assert_close(
        leaf.grad, torch.tensor(case["gradient"], dtype=torch.float64), atol=1e-9, rtol=0
    )
