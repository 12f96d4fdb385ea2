"""What the files of several libraries have in common."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from reinforge.algorithms import catalogue
from reinforge.migrate.draft import Draft
from reinforge.migrate.readers.values import value_of

SINKS = ("tensorboard", "wandb", "mlflow", "trackio")
ALL_LINEAR = {"all", "all-linear", "all_linear"}
MATH_ROWS = re.compile(r"math|numina|deepscale|aime|orz|openr1|skywork", re.IGNORECASE)
NUMBER_ROWS = re.compile(r"gsm8k|gsm-8k|multiplication|countdown", re.IGNORECASE)
CLIPPED = ("ppo_clip", "gspo", "gspo_token", "gmpo")  # surrogates with a lower and an upper clip
HELD_OUT = 100  # rows, where theirs are a split or a share


def listed(value: Any) -> list[Any]:
    """A value or several, in a list or with commas between them."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def numbers(value: Any) -> list[float]:
    """The numbers of a value or of several, however they are written."""
    found = [value_of(item) for item in listed(value)]
    return [float(item) for item in found if isinstance(item, int | float)]


def put_sources(draft: Draft, sources: Sequence[str], weights: Sequence[float] = ()) -> None:
    """One source, or a mixture of several; one that stands there twice is taken once."""
    sources = list(dict.fromkeys(sources))
    if len(sources) == 1:
        draft.put("data.source", sources[0])
    elif sources:
        draft.put("data.source", "mixture")
        items: list[dict[str, Any]] = [{"source": source} for source in sources]
        for item, weight in zip(items, weights, strict=False):
            item["weight"] = weight
        draft.put("data.mixture", items)


def put_held_out(draft: Draft, sources: Sequence[str], key: str, size: int | None = None) -> None:
    """Held-out rows: the first of the sources, as only one can be."""
    if not sources:
        return
    draft.put("data.eval.source", sources[0])
    if size is not None and size > 0:
        draft.put("data.eval.size", size)
    if len(sources) > 1:
        draft.tell(
            key, "differs", says="one source of held-out rows; the first of theirs is written"
        )


def put_eval_every(draft: Draft, every: float | None) -> None:
    """Evaluations, where there is something to evaluate on."""
    if every and every > 0 and (draft.is_set("data.eval.source") or draft.is_set("data.eval.size")):
        draft.put("eval.every", round(every))


def put_sinks(draft: Draft, names: Sequence[Any]) -> None:
    sinks = [name for name in SINKS if name in [str(each).lower() for each in names]]
    if sinks:
        draft.put("run.log.sinks", sinks)


def put_adapter(
    draft: Draft, *, rank: Any, alpha: Any = None, targets: Any = None, dropout: Any = None
) -> None:
    draft.put("adapter.rank", rank)
    if alpha is not None:
        draft.put("adapter.alpha", alpha)
    names = listed(targets)
    if names and not ALL_LINEAR & {str(name) for name in names}:
        draft.put("adapter.targets", [str(name) for name in names])
    if dropout:
        draft.put("adapter.dropout", dropout)


def put_warmup(draft: Draft, ratio: float, *, updates: int = 1) -> None:
    """A share of the steps, as a number of them where the file says how many there are."""
    steps = draft.at("train.steps")
    if steps and ratio:
        draft.put("train.schedule.warmup", math.ceil(ratio * steps * updates))
    elif 0 < ratio < 1:
        draft.put("train.schedule.warmup", ratio)


def put_deepspeed(draft: Draft, stage: int | None, *, offload: bool = False) -> None:
    draft.put("train.backend", "deepspeed")
    if stage == 3:
        draft.put("train.deepspeed.stage", 3)
    if offload:
        draft.put("train.deepspeed.offload_optimizer", "cpu")


def without_megatron(draft: Draft) -> None:
    """What Megatron's layers do not do is done by FSDP2."""
    reasons = [name for name in ("adapter", "critic", "teacher") if draft.is_set(name)]
    if draft.at("train.router_replay") == "on" or draft.at("train.router_bias_rate"):
        reasons.append("experts")
    if draft.at("train.backend") == "megatron" and reasons:
        draft.put("train.backend", "fsdp")
        draft.remarks.append(
            f"train.backend: fsdp in place of megatron, which has no {' and no '.join(reasons)}"
        )


def reward_for(rows: str) -> dict[str, Any]:
    """The built-in reward that fits rows by the name of their source."""
    if NUMBER_ROWS.search(rows):
        return {"name": "exact_number"}
    return {"name": "math" if MATH_ROWS.search(rows) else "exact_match"}


def names_of_rows(draft: Draft) -> str:
    """All sources of a draft in one text, to look for names in."""
    mixture = draft.at("data.mixture") or []
    return " ".join([str(draft.at("data.source")), *(str(item["source"]) for item in mixture)])


def put_loss(draft: Draft, key: str, name: str) -> None:
    """The algorithm with a loss over pairs; dpo in place of one that is not there."""
    if name not in catalogue.TABLE:
        draft.tell(key, "missing", says=f"{name} is not there; dpo is written")
        name = "dpo"
    draft.put("algorithm.name", name)


def put_minibatches(draft: Draft, key: str, samples: float, per_update: float | None) -> int:
    """Optimizer steps that are made of one batch."""
    if not per_update or per_update >= samples:
        return 1
    number = max(1, round(samples / per_update))
    draft.put("algorithm.minibatches", number)
    if number * per_update != samples:
        draft.tell(
            key,
            "differs",
            says=f"{samples:g} / {per_update:g} is no whole number: {number} optimizer steps",
        )
    return number


def fit_clip(draft: Draft, keys: Sequence[str], *, bound: float = 1.0) -> None:
    """Clips go where the surrogate has them. `bound`: what is added to their upper clip to make the
    largest ratio.
    """
    clip = draft.at("algorithm.clip")
    name = draft.at("algorithm.name")
    surrogate = draft.at("algorithm.surrogate") or catalogue.TABLE[name].parts.get("surrogate")
    if not clip or surrogate == "ppo_clip":
        return
    if surrogate in CLIPPED:
        for key in ("dual", "delta"):
            _drop_clip(draft, f"algorithm.clip.{key}", keys, f"{name} has none")
        return
    high = clip.get("high")
    draft.drop("algorithm.clip")
    draft.defaults.pop("algorithm.clip.dual", None)
    if surrogate == "cispo" and high is not None:
        cap = round(bound + high, 6)
        options = draft.at("algorithm.options") or {}
        draft.put("algorithm.options", {**options, "cap": cap})
        says = f"cispo has an upper bound alone, the largest ratio itself: cap {cap:g}"
    else:
        says = f"{name} clips no ratio"
    for key in keys:
        draft.tell(key, "differs", ours="algorithm.options", says=says)


def _drop_clip(draft: Draft, ours: str, keys: Sequence[str], why: str) -> None:
    if draft.drop(ours):
        draft.defaults.pop(ours, None)
        for key in keys:
            note = draft.notes.get(key)
            if note is not None and note.ours == ours:
                draft.tell(key, "missing", says=why)
