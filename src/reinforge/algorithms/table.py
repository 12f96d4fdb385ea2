"""Every algorithm as a row: which functions it names, and its defaults. A further algorithm is a function and a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

from torch import Tensor

from reinforge.algorithms import corrections, surrogates
from reinforge.algorithms.advantages import Advantage, AdvantageOptions, Rollouts, Scale, group_relative
from reinforge.algorithms.corrections import Correction
from reinforge.algorithms.kl import ESTIMATORS, NOTES
from reinforge.algorithms.loss import NLLLoss, PolicyLoss
from reinforge.algorithms.reduce import REDUCERS
from reinforge.algorithms.surrogates import Surrogate
from reinforge.core.backend import Loss
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError


@dataclass(frozen=True)
class Options:
    """Everything that can be set about an algorithm. A row replaces some defaults, the user the rest."""

    advantage: str | Advantage = "group_relative"
    surrogate: str | Surrogate = "ppo_clip"
    correction: str | Correction = "none"
    reduce: str = "token_mean"
    scale: Scale = "group"
    std: Literal["sample", "population"] = "sample"
    eps: float = 1e-4
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    entropy: float = 0.0
    cap: float = 2.0  # of the correction
    overlong: Literal["keep", "mask"] = "keep"
    overlong_buffer: int | None = None  # None: a fifth of max_new_tokens in a row with `shaped`, otherwise 0
    dynamic_sampling: bool = False
    max_new_tokens: int = 0  # the limit of a response
    updates: int = 1  # optimizer steps per rollout batch


@dataclass(frozen=True)
class Row:
    kind: Literal["rl", "sft"]
    paper: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    shaped: bool = False  # has a soft length penalty unless told otherwise


@dataclass(frozen=True)
class Algorithm:
    """What a training loop needs of an algorithm. It never asks for the name."""

    name: str
    kind: Literal["rl", "sft"]
    paper: str
    loss: Loss
    advantage: Callable[[Rollouts], Any] | None  # Rollouts -> [M]; None: the loss needs no advantages
    dynamic_sampling: bool  # replace groups whose rewards are all equal
    overlong: Literal["keep", "mask"]  # mask: truncated samples are not trained
    overlong_buffer: int  # for `overlong_penalty`; 0 = none
    options: Options
    notes: tuple[str, ...] = ()  # what a user should know about these settings

    def advantages(self, batches: Sequence[Batch]) -> None:
        """Fills the stream `advantages` of every pack of one optimizer batch (float32, zero for unscored rows)."""
        if self.advantage is None or not batches:
            return
        values = self.advantage(Rollouts.of(batches)).float()
        for batch, part in zip(batches, values.split([b.n_trained for b in batches]), strict=True):
            batch.streams["advantages"] = part.to(batch.targets.device)


TABLE: dict[str, Row] = {
    "sft": Row("sft", ""),
    "grpo": Row("rl", "2402.03300", {"reduce": "sequence_mean"}),
    "dr_grpo": Row("rl", "2503.20783", {"scale": "none", "reduce": "fixed_length"}),
    "dapo": Row("rl", "2503.14476", {"clip_high": 0.28, "dynamic_sampling": True}, shaped=True),
}

ADVANTAGES: dict[str, Advantage] = {"group_relative": group_relative}

SURROGATES: dict[str, Callable[[Options], Surrogate]] = {
    "ppo_clip": lambda o: partial(surrogates.ppo_clip, low=o.clip_low, high=o.clip_high, dual=o.clip_dual),
    "reinforce": lambda o: surrogates.reinforce,
}

CORRECTIONS: dict[str, Callable[[Options], Correction]] = {
    "none": lambda o: corrections.none,
    "tis": lambda o: partial(corrections.tis, cap=o.cap),
    "mis": lambda o: partial(corrections.mis, cap=o.cap),
}


def build(name: str, **options: Any) -> Algorithm:
    """The named algorithm with `options` (fields of `Options`; None = the algorithm's own)."""
    row = _pick(TABLE, name, "algorithm.name")
    o = replace(Options(), **{**row.defaults, **{k: v for k, v in options.items() if v is not None}})
    buffer = _buffer(o, row)
    o = replace(o, overlong_buffer=buffer)
    reduce = _pick(REDUCERS, o.reduce, "algorithm.reduce")
    _check(o, buffer)
    loss: Loss
    notes: tuple[str, ...] = ()
    if row.kind == "sft":
        loss, advantage = NLLLoss(reduce), None
    else:
        function = o.advantage if callable(o.advantage) else _pick(ADVANTAGES, o.advantage, "algorithm.advantage")
        advantage = partial(_call, function, AdvantageOptions(o.scale, o.std, o.eps))
        loss = PolicyLoss(
            surrogate=o.surrogate if callable(o.surrogate) else _pick(SURROGATES, o.surrogate, "algorithm.surrogate")(o),
            reduce=reduce,
            correction=o.correction if callable(o.correction) else _pick(CORRECTIONS, o.correction, "algorithm.correction.name")(o),
            kl=_pick(ESTIMATORS, o.kl_estimator, "algorithm.kl.estimator"),
            kl_coefficient=o.kl_coefficient,
            entropy_coefficient=o.entropy,
            off_policy=o.updates > 1,
        )
        notes = (NOTES[o.kl_estimator],) if o.kl_coefficient > 0 and o.kl_estimator in NOTES else ()
    return Algorithm(name, row.kind, row.paper, loss, advantage, o.dynamic_sampling, o.overlong, buffer, o, notes)


def describe() -> list[dict[str, str]]:
    """One entry per algorithm, for people: its parts, its defaults where they are not everybody's, its paper."""
    entries = []
    for name, row in TABLE.items():
        o = replace(Options(), **row.defaults)
        supervised = row.kind == "sft"
        defaults = [
            f"{key}={value}" for key, value in row.defaults.items() if key not in ("advantage", "surrogate", "correction", "reduce")
        ]
        defaults += ["overlong_buffer=max_new_tokens/5"] if row.shaped else []
        entries.append({
            "name": name, "kind": row.kind, "advantage": "-" if supervised else str(o.advantage),
            "surrogate": "nll" if supervised else str(o.surrogate), "correction": "-" if supervised else str(o.correction),
            "reduce": o.reduce, "defaults": ", ".join(defaults), "paper": row.paper,
        })  # fmt: skip
    return entries


def _call(function: Advantage, options: AdvantageOptions, rollouts: Rollouts) -> Any:
    values = function(rollouts, options)
    name, want = getattr(function, "__name__", "advantage"), tuple(rollouts.sequence.shape)
    if not isinstance(values, Tensor) or tuple(values.shape) != want:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise InputError(f"{name} returned {got}, not a tensor of one value per trained token, {want}.", where="algorithm.advantage",
                         fix="Compute one value per row and index it with rollouts.sequence.")  # fmt: skip
    if not bool(values.isfinite().all()):
        raise InputError(f"{name} returned values that are not finite.", where="algorithm.advantage",
                         fix="Rewards of unscored rows are nan: leave them out, and give their tokens 0.")  # fmt: skip
    return values


def _buffer(o: Options, row: Row) -> int:
    if o.overlong_buffer is not None:
        return o.overlong_buffer
    return o.max_new_tokens // 5 if row.shaped else 0  # the paper: 4096 of 20480


def _check(o: Options, buffer: int) -> None:
    if o.clip_dual is not None and o.clip_dual <= 1:
        raise InputError(f"dual clip must be above 1, not {o.clip_dual}", where="algorithm.clip.dual", fix="3.0 is usual.")
    if o.max_new_tokens and buffer > o.max_new_tokens:
        raise InputError(f"{buffer} is more than max_new_tokens ({o.max_new_tokens})", where="algorithm.overlong_buffer",
                         fix="Give the number of last tokens that cost reward, e.g. a fifth of max_new_tokens.")  # fmt: skip


def _pick(choices: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in choices:
        near = get_close_matches(name, choices, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise InputError(f"unknown name {name!r}.", where=where, fix=f"{hint}There are: {', '.join(choices)}.")
    return choices[name]
