"""Our losses on the numbers of trl_preference.json.

`CASES` maps a label to a function that gives (loss difference, gradient difference).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforge.algorithms.losses import distillation
from reinforge.algorithms.losses.preference import PairLoss
from reinforge.algorithms.losses.reward_model import RewardLoss
from reinforge.algorithms.losses.supervised import DFTLoss, NLLLoss
from reinforge.algorithms.losses.unpaired import UnpairedLoss
from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Batch, Totals
from reinforge.core.sample import Sample
from reinforge.models.divergence import LogitHead, chunked_divergence

TRL: dict[str, Any] = json.loads((Path(__file__).parent / "trl_preference.json").read_text())
INPUTS = {
    name: torch.tensor(value, dtype=torch.int64 if name == "ids" else torch.float64)
    for name, value in TRL["inputs"].items()
}
MASK = INPUTS["mask"].bool()
# TRL's chosen rows, then its rejected ones; here they are neighbours
PAIRED = [0, 4, 1, 5, 2, 6, 3, 7]
SMOOTHED = {"robust", "exo_pair", "aot", "aot_unpaired"}  # TRL's sigmoid knows no label smoothing
NAMES = {"js_divergence": "js", "alpha_divergence": "alpha"}
Difference = tuple[float, float]


def row(i: int, **streams: Tensor) -> Sample:
    """Row i: a prompt of one token and its trained ones."""
    n = TRL["lengths"][i]
    padded = {
        name: torch.cat(
            (torch.zeros(1, dtype=x.dtype), x[i, :n] if x.ndim == 2 else x[i].expand(n))
        )
        for name, x in streams.items()
    }
    return Sample.from_tokens(f"r{i}", [0] * (n + 1), [False] + [True] * n, streams=padded)


def over_packs(
    loss: Any,
    order: list[int],
    leaf: Tensor,
    per_token: Tensor,
    rows_per_pack: int,
    companions: Any = (),
    **streams: Tensor,
) -> Tensor:
    """The loss of all rows, cut into packs of `rows_per_pack`."""
    samples = [row(i, **streams) for i in order]
    batches = [
        Batch.pack(samples[a : a + rows_per_pack]) for a in range(0, len(order), rows_per_pack)
    ]
    totals = Totals.of(batches)
    if hasattr(loss, "prepare"):
        loss.prepare(batches, companions)
    total = leaf.sum() * 0
    for a, batch in zip(range(0, len(order), rows_per_pack), batches, strict=True):
        flat = torch.cat([per_token[i][: TRL["lengths"][i]] for i in order[a : a + rows_per_pack]])
        lengths = batch.trained_lengths()
        total = (
            total
            + loss(
                TrainedTokens(
                    flat,
                    None,
                    batch.sequence,
                    lengths,
                    lengths[batch.sequence],
                    batch.streams,
                    values=flat,
                ),
                totals,
            )[0]
        )
    return total


def differ(case: dict[str, Any], leaf: Tensor, loss: Tensor) -> Difference:
    loss.backward()
    assert leaf.grad is not None and float(leaf.grad.abs().max()) > 1e-4
    return abs(loss.item() - case["loss"]), float(
        (leaf.grad - torch.tensor(case["gradient"], dtype=leaf.dtype)).abs().max()
    )


def pair(case: dict[str, Any], rows_per_pack: int = 4) -> Difference:
    given = {k: v for k, v in case["settings"].items() if v is not None}
    names = case["name"].split("+")
    weights = given.pop("weights", [1.0])
    settings: dict[str, Any] = {"beta": given.get("beta", 0.3)} | {
        k: given[k] for k in ("ld_alpha", "wpo", "tau") if k in given
    }
    if SMOOTHED & set(names):
        settings["label_smoothing"] = 0.1
    if "divergence" in given:
        settings |= {
            "divergence": NAMES.get(given["divergence"], given["divergence"]),
            "divergence_alpha": given.get("alpha", 0.5),
        }
    loss = PairLoss(dict(zip(names, weights, strict=True)), **settings)
    leaf = INPUTS["logprobs"].clone().requires_grad_()
    streams = {name: INPUTS[name] for name in ("reference", "collision")} | {
        "old": INPUTS["logprobs"]
    }
    return differ(case, leaf, over_packs(loss, PAIRED, leaf, leaf, rows_per_pack, **streams))


def from_logits(case: dict[str, Any], rows_per_pack: int = 4) -> Difference:
    leaf = INPUTS["logits"].clone().requires_grad_()
    logprobs = leaf.log_softmax(-1)[:, :-1].gather(-1, INPUTS["ids"][:, 1:, None])[..., 0]
    loss = PairLoss(case["name"], beta=0.3, **case["settings"])
    return differ(case, leaf, over_packs(loss, PAIRED, leaf, logprobs, rows_per_pack))


def unpaired(case: dict[str, Any], rows_per_pack: int = 3) -> Difference:
    leaf = INPUTS["logprobs"].clone().requires_grad_()
    mismatched = Batch.pack(
        [row(i, old=INPUTS["kl_logprobs"], reference=INPUTS["kl_reference"]) for i in range(8)]
    )
    loss = UnpairedLoss(case["name"], beta=0.3, **case["settings"])
    label = torch.tensor(TRL["labels"], dtype=torch.float64)
    return differ(
        case,
        leaf,
        over_packs(
            loss,
            list(range(8)),
            leaf,
            leaf,
            rows_per_pack,
            [mismatched],
            label=label,
            reference=INPUTS["reference"],
        ),
    )


def reward(case: dict[str, Any], rows_per_pack: int = 4) -> Difference:
    leaf = INPUTS["scores"].clone().requires_grad_()
    values = torch.zeros_like(INPUTS["mask"])
    # the score stands at the last trained token
    values = values.scatter(1, torch.tensor(TRL["lengths"])[:, None] - 1, leaf[:, None])
    loss = RewardLoss(case["name"], centre=case["settings"].get("centre") or 0.0)
    return differ(
        case,
        leaf,
        over_packs(
            loss,
            PAIRED,
            leaf,
            values,
            rows_per_pack,
            gap=torch.cat((INPUTS["margin"], torch.zeros(4))),
        ),
    )


def sft(case: dict[str, Any], rows_per_pack: int = 3) -> Difference:
    leaf = INPUTS["logprobs"].clone().requires_grad_()
    loss = {"nll": NLLLoss, "dft": DFTLoss}[case["name"]]()
    return differ(case, leaf, over_packs(loss, list(range(8)), leaf, leaf, rows_per_pack))


def divergence(case: dict[str, Any]) -> Difference:
    name = case["name"]
    settings = case["settings"]
    leaf = INPUTS["student"].clone().requires_grad_()
    if name == "jsd":
        return differ(case, leaf, distillation.jsd(leaf, INPUTS["teacher"], **settings).mean())
    if name == "uld":
        return differ(case, leaf, distillation.uld(leaf, INPUTS["wide_teacher"], **settings).mean())
    # TRL's support is the student's best tokens, ours the teacher's: the divergence on a support is
    # the same
    if name == "student top-k":
        best = leaf.log_softmax(-1).topk(settings["k"], -1)
        teacher = INPUTS["teacher"].log_softmax(-1).gather(-1, best.indices)
        return differ(
            case,
            leaf,
            distillation.support_kl(best.values, teacher, reverse=settings["reverse"]).mean(),
        )
    h, w, goal, other = (
        INPUTS[k].float() for k in ("hidden", "head", "teacher_hidden", "teacher_head")
    )
    h.requires_grad_(), w.requires_grad_()
    loss, grad = differ(
        case,
        h,
        chunked_divergence(
            h, LogitHead(w), goal, LogitHead(other), partial(distillation.jsd, **settings)
        ).mean(),
    )
    assert w.grad is not None
    return loss, max(grad, float((w.grad - torch.tensor(case["gradient_head"])).abs().max()))


KINDS: dict[str, Callable[..., Difference]] = {
    "pairs": pair,
    "logits": from_logits,
    "unpaired": unpaired,
    "reward": reward,
    "sft": sft,
    "divergences": divergence,
}


def label(case: dict[str, Any]) -> str:
    settings = ", ".join(
        f"{k}={v}" for k, v in case["settings"].items() if v is not None and v is not False
    )
    return case["name"] + (f" ({settings})" if settings else "")


CASES: dict[str, Callable[..., Difference]] = {
    f"{kind}: {label(case)}": partial(function, case)
    for kind, function in KINDS.items()
    for case in TRL[kind]
}
