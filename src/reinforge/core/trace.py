"""What a loss did with single samples, so that people can look at it afterwards.

Samples that are traced have a slot each, numbered from 1; the stream `trace` says for every trained
token whose slot it counts in, and 0 is nobody's. A loss that meets the stream hands out one number
per slot beside its metrics (`traced`). They travel as metrics do, in the same transfer, through
every backend; the training loop takes them out again (`take_traced`).

Legend: M trained tokens and S sequences of the micro-batch, K slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Totals
from reinforge.core.metrics import Extreme, LossMetrics, Metrics, StepMetrics

STREAM = "trace"
PREFIX = "trace/"
TOKENS = "tokens"  # how many tokens of a slot the loss has seen
EXTREMES = ("ratio",)  # numbers of which the least and the largest are kept beside the sum
LOSS = PREFIX + "loss"


def traced(
    tokens: TrainedTokens,
    totals: Totals,
    of_tokens: Mapping[str, Tensor],
    of_rows: Mapping[str, Tensor] | None = None,
) -> LossMetrics:
    """[K] each: the sums of `of_tokens` [M] over the tokens of every slot, and of `of_rows` [S],
    which count at the last token of their row. Nothing where nothing is traced.
    """
    slots = totals.traced
    if not slots:
        return {}
    slot_M = tokens.streams[STREAM].long()
    of_tokens = {TOKENS: torch.ones_like(tokens.logprobs), **of_tokens}
    found: LossMetrics = dict(_sums(of_tokens, slot_M, slots))
    for name in EXTREMES:
        if name in of_tokens:
            largest = _extremes(of_tokens[name], slot_M, slots, "amax")
            smallest = _extremes(of_tokens[name], slot_M, slots, "amin")
            found[f"{name}/max"] = Extreme.largest(largest)
            found[f"{name}/min"] = Extreme.smallest(smallest)
    if of_rows:
        lengths = tokens.lengths
        slot_S = slot_M[(lengths.cumsum(0) - 1).clamp(min=0)]
        found |= _sums(of_rows, torch.where(lengths > 0, slot_S, 0), slots)
    return {PREFIX + name: values for name, values in found.items()}


def _sums(columns: Mapping[str, Tensor], slot: Tensor, slots: int) -> dict[str, Tensor]:
    """In float64 by a sorted scatter, so that they are the same in every run.

    Such a scatter adds up one place after the other, as long as its list is. Nobody's tokens, which
    are nearly all, would be the longest one by far: each of them has a place of its own.
    """
    wide = torch.stack([values.detach().double() for values in columns.values()], 1)
    nobodys = slots + torch.arange(len(slot), device=slot.device)
    place = torch.where(slot > 0, slot - 1, nobodys)
    sums = wide.new_zeros(slots + len(slot), len(columns)).index_put(
        (place,), wide, accumulate=True
    )
    return dict(zip(columns, sums[:slots].unbind(1), strict=True))


def _extremes(values: Tensor, slot: Tensor, slots: int, which: str) -> Tensor:
    """Of a slot without a token: infinity, which loses against any number."""
    wide = values.detach().double()
    nothing = -torch.inf if which == "amax" else torch.inf
    return wide.new_full((slots + 1,), nothing).scatter_reduce(0, slot, wide, which)[1:]


def numbered(name: str, slot: int) -> str:
    """The name of one slot's number.

    >>> numbered("trace/ratio/max", 3)
    'trace/3/ratio/max'
    """
    head, _, rest = name.partition("/")
    return f"{head}/{slot}/{rest}"


def take_traced(metrics: StepMetrics) -> dict[int, Metrics]:
    """Takes the numbers of the slots out of the metrics: {slot, from 1: {name: number}}.

    Slots that the loss has not seen are left out.

    >>> metrics = {"policy/loss": 0.5, "trace/0/tokens": 2.0, "trace/0/ratio/max": 1.5}
    >>> metrics["trace/1/tokens"] = 0.0
    >>> take_traced(metrics), metrics
    ({1: {'tokens': 2.0, 'ratio/max': 1.5}}, {'policy/loss': 0.5})
    """
    found: dict[int, Metrics] = {}
    for name in [name for name in metrics if name.startswith(PREFIX)]:
        _, place, rest = name.split("/", 2)
        found.setdefault(int(place) + 1, {})[rest] = metrics.pop(name)
    return {slot: numbers for slot, numbers in found.items() if numbers[TOKENS]}
