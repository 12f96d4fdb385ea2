"""Our policy gradient beside TRL's and veRL's: which call of ours stands against which case of
theirs.

`METHODS` has our call for each case. Where a peer computes something else on purpose, `CONVERTED`
turns our numbers into its numbers by the rule that pg_differences.py states, so that the statement
is tested too. `differences(peer, method)` measures.

Legend: M trained tokens, S rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pg_ours import (
    FIRST,
    GIVEN,
    LENGTHS,
    PEERS,
    SEQUENCE,
    Ours,
    Outputs,
    advantage,
    correction,
    kl,
    kl_in_reward,
    one_token_each,
    over_packs,
    policy,
    reduced_entropy,
    rollouts_of,
    rows,
    stream,
    value_loss,
)
from torch import Tensor

from reinforge.algorithms.build import build
from reinforge.algorithms.parts.advantages import ADVANTAGES, AdvantageOptions
from reinforge.algorithms.parts.kl import k3
from reinforge.algorithms.parts.ratios import safe_ratio, sequence_log_ratio
from reinforge.algorithms.parts.selections import clip_cov
from reinforge.algorithms.parts.shaping import overlong_penalty
from reinforge.algorithms.parts.statistics import whiten
from reinforge.algorithms.parts.surrogates import ppo_clip
from reinforge.algorithms.parts.terms import adaptive_entropy, adaptive_kl
from reinforge.rewards.combine import total

LIMITS = {"float64": 1e-9, "float32": 1e-5}  # of the largest number of theirs
TRAINED = ~torch.isin(SEQUENCE, torch.tensor(GIVEN["truncated"]))  # [M]
RAGGED = torch.tensor(GIVEN["ragged"])
ALONE = (torch.bincount(RAGGED)[RAGGED] == 1)[SEQUENCE]  # [M]: in a group of one
KL: dict[str, Any] = {"kl_coefficient": 0.1, "streams": ("old", "reference")}
SEQ = {"clip_low": 0.05, "clip_high": 0.1}
HIGH = {"clip_high": 0.28}
ENGINE = ("behaviour as float32",)  # TRL keeps the sampler's log-probs in float32


# ---- ours for each case


def _controller(move: Callable[[float, float], float], start: float) -> Ours:
    def run(dtype: torch.dtype) -> Outputs:
        found = [start]
        for seen in GIVEN["controller"]:
            found.append(move(found[-1], seen))
        return {"coefficients": found[1:]}

    return Ours("", run)


def _components(name: str, none: float | None = None) -> Callable[[torch.dtype], Outputs]:
    """`none`: what stands for a component that could not be scored."""

    def run(dtype: torch.dtype) -> Outputs:
        parts = {
            n: [none if v is None else v for v in values]
            for n, values in GIVEN["components"].items()
        }
        rewards = [
            total(dict(zip(parts, v, strict=True)), GIVEN["weights"])
            for v in zip(*parts.values(), strict=True)
        ]
        rollouts = rollouts_of(
            dtype, rewards=rewards, components={n: rows(v) for n, v in parts.items()}
        )
        if none is None:
            return {
                "advantages": ADVANTAGES[name](rollouts, AdvantageOptions(weights=GIVEN["weights"]))
            }
        plain = ADVANTAGES[name](
            rollouts, AdvantageOptions(weights=GIVEN["weights"], eps=1e-6, whiten=False)
        )
        return {
            "advantages": (
                whiten(
                    plain.double(), torch.ones_like(TRAINED), AdvantageOptions(eps=_eps(plain))
                ).to(dtype)
            )
        }

    return run


SCALES = {"": "group", ", scale batch": "batch", ", scale none": "none"}
REDUCE = {
    "token_mean": ("dapo", {}),
    "sequence_mean": ("grpo", HIGH),
    "fixed_length": ("dr_grpo", HIGH),
    "sequence_sum": ("dapo", {"reduce": "sequence_sum"}),
}

METHODS: dict[str, Ours] = {
    **{f"group_relative{n}": advantage("group_relative", scale=s) for n, s in SCALES.items()},
    **{
        f"group_relative{n}, unscored rows": advantage(
            "group_relative", scale=s, rewards="unscored"
        )
        for n, s in SCALES.items()
    },
    "group_relative, weighted components": Ours(
        "group_relative of the weighted total", _components("group_relative")
    ),
    "group_relative, vectorised": advantage("group_relative"),
    "decoupled": Ours("decoupled", _components("decoupled")),
    "leave_one_out": advantage("leave_one_out"),
    "leave_one_out, vectorised": advantage("leave_one_out"),
    "leave_one_out, vectorised, a group of one": advantage("leave_one_out", ragged=True),
    "leave_one_out, unscored rows": advantage("leave_one_out", rewards="unscored"),
    "leave_one_out, KL in the reward": kl_in_reward("leave_one_out", 0.1),
    "optimal_baseline": advantage("optimal_baseline"),
    "greedy_baseline": advantage("greedy_baseline"),
    "pass_at_k": advantage("pass_at_k", k=4),
    **{f"ppo_clip, {r}": policy(n, **o) for r, (n, o) in REDUCE.items()},
    **{
        f"truncated rows left out, {r}": policy(n, keep=TRAINED, **o)
        for r, (n, o) in REDUCE.items()
    },
    "ppo_clip, token_mean, one micro-batch": policy("dapo"),
    "ppo_clip, delta": policy("grpo", clip_delta=1.5, **HIGH),
    "ppo_clip, dual": policy("dapo", clip_dual=1.5),
    "ppo_clip, corrected by tis": policy(
        "dapo", correction="tis", cap=1.5, streams=("old", *ENGINE)
    ),
    "ppo_clip, corrected by seq_mask": policy(
        "dapo", correction="seq_mask", cap=1.5, floor=0.5, streams=("old", *ENGINE)
    ),
    "ppo_clip, old engine": policy("dapo", old="engine", streams=("behaviour",)),
    "gspo": policy("gspo", **SEQ),
    "gspo_token": policy("gspo_token", **SEQ),
    "luspo": policy("luspo", **SEQ),
    "gmpo": policy("gmpo"),
    "cispo": policy("cispo", settings={"cap": 1.5}),
    "sapo": policy("sapo", reduce="sequence_mean", settings={"tau_negative": 1.25}),
    "vespo": policy("vespo", reduce="token_mean", old="auto"),
    "vespo, old engine": policy("vespo", reduce="token_mean", streams=("old", *ENGINE)),
    "sequence_clip": policy("rloo", surrogate="sequence_clip", **HIGH),
    "reinforce, token_mean": policy("reinforce", streams=()),
    "reinforce, sequence_sum": policy("rloo", streams=()),
    "reinforce, corrected by tis": policy(
        "reinforce", correction="tis", cap=1.5, streams=("behaviour",)
    ),
    "kl_cov": policy("kl_cov", penalty=0.7, settings={"share": 0.2}),
    "clip_cov, on-policy": policy(
        "clip_cov", streams=(), settings={"share": 1.0, "lower": 0.3, "upper": 2.0}, **HIGH
    ),
    "top_entropy, share 0.2": policy("dapo", selection="top_entropy", settings={"share": 0.2}),
    "top_entropy, share 0.5": policy("dapo", selection="top_entropy", settings={"share": 0.5}),
    "off_policy_mask": policy("grpo", selection="off_policy_mask", settings={"drift": 0.1}, **HIGH),
    "kl k3 in the loss": policy("grpo", kl_importance=False, **HIGH, **KL),
    "kl k3+ in the loss, weighted": policy("grpo", kl_estimator="k3+", **HIGH, **KL),
    "kl k3 in the loss, corrected by tis": policy(
        "dapo",
        correction="tis",
        cap=1.5,
        kl_importance=False,
        kl_coefficient=0.1,
        streams=("old", "reference", *ENGINE),
    ),
    "gspo, kl k3 in the loss": policy("gspo", kl_importance=False, **SEQ, **KL),
    "entropy bonus, token_mean": policy("dapo", entropy=0.1, bonus=True),
    **{f"kl {name}": kl(name) for name in ("k1", "k2", "k3", "k3+")},
    "tis": correction("tis", *ENGINE, cap=1.5),
    "mis": correction("mis", *ENGINE, cap=1.5),
    "icepop": correction("icepop", *ENGINE, cap=1.5, floor=0.5),
    "seq_tis": correction("seq_tis", *ENGINE, cap=1.5),
    "seq_mask": correction("seq_mask", *ENGINE, cap=1.5, floor=0.5),
    "ValueLoss": value_loss(0.2),
    "adaptive_kl": replace(
        _controller(lambda c, kl: adaptive_kl(c, kl, target=0.2, horizon=100, samples=16), 0.1),
        call="adaptive_kl",
    ),
    "overlong_penalty": Ours(
        "overlong_penalty",
        lambda _: {"value": [overlong_penalty(n, 100, 20) for n in (0, 79, 80, 81, 95, 100, 101)]},
    ),
}


# ---- the same turned into what a peer computes


def _eps(values: Tensor) -> float:
    """veRL divides by sqrt(var + 1e-8), we by std + eps: the eps that makes them one."""
    var = float(values.double().var())
    return (var + 1e-8) ** 0.5 - var**0.5


def _scaled(ours: Ours, factor: float) -> Ours:
    return Ours(
        ours.call,
        lambda dtype: {
            name: factor * value for name, value in ours.run(dtype).items() if name != "metrics"
        },
    )


def _whitened(name: str, ragged: bool = False, tokens: bool = False, **options: Any) -> Ours:
    """An advantage that whitens, with veRL's eps."""

    def run(dtype: torch.dtype) -> Outputs:
        plain = advantage(name, ragged=ragged, tokens=tokens, whiten=False, **options).run(dtype)
        if ragged:  # a group of one has its reward there
            raw = torch.where(
                ALONE, rows(GIVEN["ragged_rewards"])[SEQUENCE], plain["advantages"].double()
            )
            return {
                "advantages": (
                    whiten(raw, torch.ones_like(ALONE), AdvantageOptions(eps=_eps(raw))).to(dtype)
                )
            }
        found = advantage(name, tokens=tokens, eps=_eps(plain["advantages"]), **options).run(dtype)
        return {"returns": plain["advantages"], **found} if tokens else found

    return Ours(advantage(name, **options).call, run)


def _alone(ours: Ours, scale: float = 1.0) -> Ours:
    """A group of one: veRL takes the reward itself."""

    def run(dtype: torch.dtype) -> Outputs:
        return {
            "advantages": torch.where(
                ALONE,
                scale * rows(GIVEN["ragged_rewards"], dtype)[SEQUENCE],
                ours.run(dtype)["advantages"],
            )
        }

    return Ours(ours.call, run)


def _gpg(ragged: bool) -> Ours:
    ours = advantage("gpg", ragged=ragged)
    rewards, group = (
        (GIVEN["ragged_rewards"], GIVEN["ragged"]) if ragged else (GIVEN["rewards"], GIVEN["group"])
    )
    of = [{r for r, g in zip(rewards, group, strict=True) if g == wanted} for wanted in set(group)]
    signal = len(of) / sum(len(values) > 1 for values in of)
    # float32 there
    share = float(torch.tensor(len(rewards)) / torch.tensor(sum(r != 0 for r in rewards)))
    return _alone(_scaled(ours, share / signal), share) if ragged else _scaled(ours, share / signal)


def _pass_at_k_over_std(dtype: torch.dtype) -> Outputs:
    std = rows(GIVEN["rewards"], dtype).view(3, 4).std(1)
    return {
        "advantages": (
            METHODS["pass_at_k"].run(dtype)["advantages"]
            / (std.repeat_interleave(4)[SEQUENCE] + 1e-6)
        )
    }


def _greedy_to_go(dtype: torch.dtype) -> Outputs:
    silent = rollouts_of(dtype, rewards=[0.0] * len(LENGTHS)).with_token_rewards(
        stream("token_rewards", dtype)
    )
    to_go = ADVANTAGES["return_to_go"](silent, AdvantageOptions(whiten=False))
    return {"advantages": METHODS["greedy_baseline"].run(dtype)["advantages"] + to_go}


def _whiten_over_rows(dtype: torch.dtype) -> Outputs:
    return {
        "advantages": ADVANTAGES["leave_one_out"](
            one_token_each(rollouts_of(dtype)), AdvantageOptions(whiten=True)
        )
    }


def _times_logprobs(ours: Ours) -> Ours:
    """The loss is a detached weight times the log-prob: the same gradient, and gradient * logprob
    as value.
    """

    def run(dtype: torch.dtype) -> Outputs:
        found = ours.run(dtype)
        return {
            "gradient": found["gradient"],
            "loss": (found["gradient"] * stream("logprobs", dtype)).sum(),
        }

    return Ours(ours.call, run)


def _cispo_floor(dtype: torch.dtype) -> Outputs:
    ratio = safe_ratio(stream("logprobs", dtype), stream("old", dtype))
    gradient = METHODS["cispo"].run(dtype)["gradient"] * torch.where(ratio < 0.9, 0.9 / ratio, 1.0)
    return {"gradient": gradient, "loss": (gradient * stream("logprobs", dtype)).sum()}


def _clip_cov_off_policy(dtype: torch.dtype) -> Outputs:
    now, old, advantages = (stream(name, dtype) for name in ("logprobs", "old", "advantages"))
    algorithm = build("clip_cov", **HIGH)
    selected = clip_cov(
        rollouts_of(dtype, streams={"old": now, "advantages": advantages}),
        share=1.0,
        lower=0.3,
        upper=2.0,
    )
    clipped = ppo_clip(now, old, advantages, high=0.28)[1]["clip_fraction"]
    assert bool((selected * clipped).any())
    return over_packs(
        algorithm.loss,
        dtype,
        {"old": old, "advantages": advantages, "selected": selected * (1 - clipped)},
    )


def _vespo_capped(dtype: torch.dtype) -> Outputs:
    old = stream("old", dtype)
    weight = safe_ratio(old, stream(*ENGINE, dtype)).clamp(max=1.5)
    return over_packs(
        build("vespo", reduce="token_mean").loss,
        dtype,
        {"behaviour": old - weight.log(), "advantages": stream("advantages", dtype)},
    )


def _gspo_weighted_kl(dtype: torch.dtype) -> Outputs:
    """The surrogate is ours; the KL term is weighted by the ratio of the sequence, through which
    the gradient goes.
    """
    found = METHODS["gspo"].run(dtype)
    leaf = stream("logprobs", dtype).requires_grad_()
    ratio = sequence_log_ratio(leaf, stream("old", dtype), SEQUENCE, mean=True).exp()
    term = (
        0.1 * ratio * k3(leaf, stream("reference", dtype)) / (LENGTHS[SEQUENCE] * len(LENGTHS))
    ).sum()
    term.backward()
    assert leaf.grad is not None
    return {"loss": found["loss"] + term.detach(), "gradient": found["gradient"] + leaf.grad}


def _bonus_over_tokens(dtype: torch.dtype) -> Outputs:
    entropy = stream("entropy", dtype)
    found = METHODS["ppo_clip, sequence_mean"].run(dtype)
    return {
        "loss": found["loss"] - 0.1 * entropy.mean(),
        "gradient": found["gradient"],
        "entropy_gradient": torch.full_like(entropy, -0.1 / len(entropy)),
    }


def _adaptive_entropy(dtype: torch.dtype) -> Outputs:
    def move(coefficient: float, entropy: float) -> float:
        # TRL also rises at the target itself
        below = entropy - 1e-6 if entropy == 0.25 else entropy
        return adaptive_entropy(coefficient, below, target=0.25, rate=0.01, limit=0.035)

    found = _controller(move, 0.02).run(dtype)["coefficients"]
    before = [0.02, *found[:-1]]
    seen = [9.0, *GIVEN["controller"][:-1]]
    return {
        "coefficients": found,
        "applied": [c if e <= 0.25 else 0.0 for c, e in zip(before, seen, strict=True)],
    }


SMALL = {"eps": 1e-6}
LEFT_OUT = 1 - len(GIVEN["truncated"]) / len(LENGTHS)
INVERSE = {"cap": 1 / 0.7, "floor": 1 / 1.2}

CONVERTED: dict[tuple[str, str], Ours] = {
    ("TRL", "leave_one_out, whiten"): Ours("leave_one_out, whiten=True", _whiten_over_rows),
    **{
        (peer, f"truncated rows left out, {r}"): _scaled(
            METHODS[f"truncated rows left out, {r}"], LEFT_OUT
        )
        for peer, r in (
            ("TRL", "sequence_mean"),
            ("TRL", "fixed_length"),
            ("veRL", "sequence_mean"),
            ("veRL", "fixed_length"),
            ("veRL", "sequence_sum"),
        )
    },
    ("TRL", "vespo, old engine and a cap"): Ours("vespo, reduce=token_mean", _vespo_capped),
    ("TRL", "gspo, kl in the loss, weighted"): Ours(
        METHODS["gspo, kl k3 in the loss"].call, _gspo_weighted_kl
    ),
    ("TRL", "entropy bonus, sequence_mean"): Ours("grpo, entropy=0.1", _bonus_over_tokens),
    ("TRL", "adaptive_entropy"): Ours("adaptive_entropy", _adaptive_entropy),
    **{
        ("veRL", f"group_relative{n}"): advantage("group_relative", **SMALL)
        for n in ("", ", vectorised")
    },
    **{
        ("veRL", f"group_relative{n}, a group of one"): _alone(
            advantage("group_relative", ragged=True, **SMALL), 1 / float(torch.tensor(1.0) + 1e-6)
        )
        for n in ("", ", vectorised")
    },
    ("veRL", "group_relative, scale none, a group of one"): _alone(
        advantage("group_relative", ragged=True, scale="none")
    ),
    ("veRL", "leave_one_out, a group of one"): _alone(advantage("leave_one_out", ragged=True)),
    ("veRL", "optimal_baseline, a group of one"): _alone(
        advantage("optimal_baseline", ragged=True)
    ),
    ("veRL", "decoupled"): Ours("decoupled", _components("decoupled", none=0.0)),
    ("veRL", "group_whitened"): _whitened("group_whitened"),
    ("veRL", "group_whitened, a group of one"): _whitened("group_whitened", ragged=True),
    ("veRL", "return_to_go"): _whitened("return_to_go", tokens=True, gamma=0.9),
    ("veRL", "gae"): _whitened("gae", tokens=True, gamma=0.9, lam=0.8),
    ("veRL", "gpg"): _gpg(False),
    ("veRL", "gpg, a group of one"): _gpg(True),
    ("veRL", "pass_at_k, divided by the std"): Ours("pass_at_k, k=4", _pass_at_k_over_std),
    ("veRL", "greedy_baseline, with token rewards"): Ours("greedy_baseline", _greedy_to_go),
    ("veRL", "ppo_clip, corrected by tis"): policy(
        "dapo", correction="tis", cap=1.5, streams=("old", "behaviour")
    ),
    ("veRL", "cispo"): METHODS["cispo"],
    ("veRL", "cispo, with a lower bound"): Ours(METHODS["cispo"].call, _cispo_floor),
    ("veRL", "dppo_tv"): _times_logprobs(
        policy("dppo_tv", old="auto", settings={"threshold": 0.1, "truncate": 20.0})
    ),
    ("veRL", "dppo_tv, truncate"): _times_logprobs(
        policy("dppo_tv", old="auto", settings={"threshold": 0.1, "truncate": 1.5})
    ),
    ("veRL", "dppo_kl"): _times_logprobs(
        policy("dppo_kl", old="auto", settings={"threshold": 0.05, "truncate": 20.0})
    ),
    ("veRL", "clip_cov"): Ours(METHODS["clip_cov, on-policy"].call, _clip_cov_off_policy),
    ("veRL", "tis"): correction("tis", cap=1.5),
    ("veRL", "seq_tis"): correction("seq_tis", cap=1.5),
    ("veRL", "icepop"): correction("icepop", cap=1.5, floor=0.5),
    ("veRL", "seq_mask"): correction("seq_mask", cap=1.5, floor=0.5),
    ("veRL", "mis"): correction("mis", kept=True, **INVERSE),
    ("veRL", "seq_mask, kept"): correction("seq_mask", kept=True, **INVERSE),
    ("veRL", "seq_mask geometric, kept"): correction(
        "seq_mask", kept=True, geometric=True, **INVERSE
    ),
    ("veRL", "entropy bonus, token_mean"): reduced_entropy("token_mean"),
    ("veRL", "entropy bonus, sequence_mean"): reduced_entropy("sequence_mean"),
}


# ---- measuring


def ours(peer: str, method: str) -> Ours:
    return CONVERTED.get((peer, method)) or METHODS[method]


def differences(peer: str, method: str) -> dict[str, float]:
    """For each precision that the peer has: the largest difference of any output, as a share of the
    output's largest number.
    """
    found = {}
    for precision, outputs in PEERS[peer]["cases"][method]["outputs"].items():
        mine = ours(peer, method).run(getattr(torch, precision))
        found[precision] = max(_difference(mine[name], theirs) for name, theirs in outputs.items())
    return found


def _difference(mine: Any, theirs: Any) -> float:
    want = torch.tensor(theirs, dtype=torch.float64)
    have = torch.as_tensor(mine, dtype=torch.float64)
    if have.shape == SEQUENCE.shape and want.shape == LENGTHS.shape:  # TRL's advantages are of rows
        have = have[FIRST]
    assert have.shape == want.shape, (have.shape, want.shape)
    return float((have - want).abs().max() / max(1e-30, float(want.abs().max())))
