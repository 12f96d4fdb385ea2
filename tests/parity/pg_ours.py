"""Our policy-gradient functions on the numbers of pg_trl.json and pg_verl.json, through the doors
that a user has.

An `Ours` is a call, in words, and a function that makes its outputs in a precision. Losses go
through `build` and `PolicyLoss`, cut into two micro-batches; advantages, selections, corrections,
KL and the critic's loss through their functions.

Legend: M trained tokens, S rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforge.algorithms.build import build
from reinforge.algorithms.losses.policy import PolicyLoss
from reinforge.algorithms.losses.value import ValueLoss
from reinforge.algorithms.parts.advantages import ADVANTAGES, AdvantageOptions, Rollouts
from reinforge.algorithms.parts.corrections import CORRECTIONS
from reinforge.algorithms.parts.kl import ESTIMATORS, k1
from reinforge.algorithms.parts.reduce import REDUCERS
from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import Totals
from reinforge.core.metrics import tensor_of

HERE = Path(__file__).parent
PEERS: dict[str, dict[str, Any]] = {
    "TRL": json.loads((HERE / "pg_trl.json").read_text()),
    "veRL": json.loads((HERE / "pg_verl.json").read_text()),
}
GIVEN: dict[str, Any] = PEERS["TRL"]["inputs"]
LENGTHS = torch.tensor(GIVEN["lengths"])
SEQUENCE = torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS)
FIRST = LENGTHS.cumsum(0) - LENGTHS  # [S]: the first token of each row
CUT = 5  # rows of the first micro-batch
Outputs = dict[str, Any]


@dataclass(frozen=True)
class Ours:
    call: str
    run: Callable[[torch.dtype], Outputs]


def stream(name: str, dtype: torch.dtype) -> Tensor:
    """[M]. `advantages` are those of the rows; `x as float32` is rounded before."""
    if name.endswith(" as float32"):
        return stream(name.removesuffix(" as float32"), torch.float32).to(dtype)
    value = torch.tensor(GIVEN[name], dtype=dtype)
    return value[SEQUENCE] if name == "advantages" else value


def rows(values: list[float | None], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([float("nan") if v is None else v for v in values], dtype=dtype)


def said(name: str, **settings: Any) -> str:
    """A call in words, for the table."""
    flat = {
        k: v
        for key, value in settings.items()
        for k, v in (value.items() if isinstance(value, Mapping) else {key: value}.items())
    }
    return ", ".join([name, *(f"{k}={v}" for k, v in flat.items())])


def rollouts_of(
    dtype: torch.dtype,
    *,
    ragged: bool = False,
    rewards: list[float | None] | None = None,
    **changes: Any,
) -> Rollouts:
    group, own = ("ragged", "ragged_rewards") if ragged else ("group", "rewards")
    found = Rollouts(
        rows(rewards or GIVEN[own], dtype),
        torch.tensor(GIVEN[group]),
        torch.arange(len(LENGTHS)),
        SEQUENCE,
        LENGTHS,
    )
    return replace(found, **changes)


def one_token_each(rollouts: Rollouts) -> Rollouts:
    """The same rows with one trained token each: statistics over tokens are then statistics over
    rows.
    """
    return replace(rollouts, sequence=torch.arange(len(LENGTHS)), lengths=torch.ones_like(LENGTHS))


def advantage(
    name: str, *, ragged: bool = False, rewards: str = "", tokens: bool = False, **options: Any
) -> Ours:
    """`rewards`: another vector of rewards of the inputs; `tokens`: with token rewards."""

    def run(dtype: torch.dtype) -> Outputs:
        rollouts = rollouts_of(dtype, ragged=ragged, rewards=GIVEN[rewards] if rewards else None)
        streams = {"values": stream("old_values", dtype)} if name == "gae" else {}
        rollouts = replace(rollouts, streams=streams, baseline=rows(GIVEN["baseline"]))
        if tokens:
            rollouts = rollouts.with_token_rewards(stream("token_rewards", dtype))
        found = ADVANTAGES[name](rollouts, AdvantageOptions(**options))
        return dict(found) if isinstance(found, dict) else {"advantages": found}

    return Ours(said(name, **options), run)


def over_packs(
    loss: Loss,
    dtype: torch.dtype,
    streams: Mapping[str, Tensor],
    keep: Tensor | None = None,
    entropy: bool = False,
) -> Outputs:
    """Loss and gradients of all rows in two micro-batches; `keep` [M]: only these tokens are
    trained.
    """
    keep = torch.ones_like(SEQUENCE, dtype=torch.bool) if keep is None else keep
    lengths = torch.bincount(SEQUENCE[keep], minlength=len(LENGTHS))
    totals = Totals(int(keep.sum()), int((lengths > 0).sum()), GIVEN["max_length"], {})
    leaf = stream("logprobs", dtype).requires_grad_()
    entropies = stream("entropy", dtype).requires_grad_()
    total = torch.zeros((), dtype=dtype)
    metrics = []
    for start, end in ((0, CUT), (CUT, len(LENGTHS))):
        at = keep & (start <= SEQUENCE) & (end > SEQUENCE)
        part = {name: value[at] for name, value in streams.items()}
        row = SEQUENCE[at]
        found, measured = loss(
            TrainedTokens(
                leaf[at], entropies[at], row - start, lengths[start:end], lengths[row], part
            ),
            totals,
        )
        total = total + found
        metrics.append({name: float(tensor_of(part)) for name, part in measured.items()})
    total.backward()
    assert leaf.grad is not None and float(leaf.grad.abs().max()) > 1e-3
    done: Outputs = {"loss": total.detach(), "gradient": leaf.grad, "metrics": metrics}
    return done | {"entropy_gradient": entropies.grad} if entropy else done


def policy(
    name: str,
    *,
    streams: tuple[str, ...] = ("old",),
    keep: Tensor | None = None,
    bonus: bool = False,
    kl_importance: bool = True,
    select_on: str = "logprobs",
    **options: Any,
) -> Ours:
    """A policy loss made by `build`. `select_on`: what the selection takes for old log-probs."""
    algorithm = build(name, max_new_tokens=GIVEN["max_length"], **options)
    loss = algorithm.loss
    assert isinstance(loss, PolicyLoss)
    loss.kl_importance = kl_importance

    def run(dtype: torch.dtype) -> Outputs:
        found = {s.removesuffix(" as float32"): stream(s, dtype) for s in (*streams, "advantages")}
        if algorithm.selection is not None:
            seen = {
                "advantages": found["advantages"],
                "behaviour": stream("behaviour", dtype),
                "entropy": stream("entropy", dtype),
            }
            rollouts = rollouts_of(dtype, streams=seen | {"old": stream(select_on, dtype)})
            found["selected"] = algorithm.selection(rollouts).to(dtype)
        return over_packs(loss, dtype, found, keep, bonus)

    return Ours(said(name, **options, **({} if kl_importance else {"kl_importance": False})), run)


def correction(
    name: str, behaviour: str = "behaviour", kept: bool = False, **settings: Any
) -> Ours:
    """The weights; or, with `kept`, only whether they are above 0."""

    def run(dtype: torch.dtype) -> Outputs:
        weights, _ = CORRECTIONS[name](
            stream("old", dtype), stream(behaviour, dtype), SEQUENCE, **settings
        )
        return {"kept": (weights > 0).to(dtype)} if kept else {"weights": weights}

    return Ours(
        said(name, **{k: round(v, 4) if isinstance(v, float) else v for k, v in settings.items()}),
        run,
    )


def kl(name: str) -> Ours:
    def run(dtype: torch.dtype) -> Outputs:
        leaf = stream("logprobs", dtype).requires_grad_()
        value = ESTIMATORS[name](leaf, stream("reference", dtype))
        value.sum().backward()
        return {"value": value.detach(), "gradient": leaf.grad}

    return Ours(name, run)


def kl_in_reward(name: str, coefficient: float) -> Ours:
    def run(dtype: torch.dtype) -> Outputs:
        extra = -coefficient * k1(stream("old", dtype), stream("reference", dtype))
        found = ADVANTAGES[name](rollouts_of(dtype).with_token_rewards(extra), AdvantageOptions())
        return {"advantages": found}

    return Ours(f"{name}, kl.placement=reward, kl.estimator=k1", run)


def reduced_entropy(reduce: str) -> Ours:
    def run(dtype: torch.dtype) -> Outputs:
        entropy = stream("entropy", dtype)
        tokens = TrainedTokens(entropy, None, SEQUENCE, LENGTHS, LENGTHS[SEQUENCE], {})
        weights = REDUCERS[reduce](
            tokens, Totals(len(SEQUENCE), len(LENGTHS), GIVEN["max_length"], {})
        )
        return {"value": (weights * entropy).sum()}

    return Ours(f"entropy, reduce={reduce}", run)


def value_loss(clip: float) -> Ours:
    def run(dtype: torch.dtype) -> Outputs:
        leaf = stream("values", dtype).requires_grad_()
        streams = {"values": stream("old_values", dtype), "returns": stream("returns", dtype)}
        tokens = TrainedTokens(
            leaf, None, SEQUENCE, LENGTHS, LENGTHS[SEQUENCE], streams, values=leaf
        )
        loss, metrics = ValueLoss(clip)(
            tokens, Totals(len(SEQUENCE), len(LENGTHS), GIVEN["max_length"], {})
        )
        loss.backward()
        return {
            "loss": loss.detach(),
            "gradient": leaf.grad,
            "clip_fraction": metrics["critic/clip_fraction"],
        }

    return Ours(f"ValueLoss, clip={clip}", run)
