"""What a layer asks of attention, beside its queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """How scores become weights in one layer. Made from what transformers hands our attention
    (`models.attention`); every layout and every kernel is given it whole, so that what one more
    architecture needs is one more field.
    """

    scale: float = 1.0  # of products of queries and keys
    # a token sees so many, itself the last of them; None: all before it
    window: int | None = None
    # a token sees those of its own chunk of so many; None: there are no chunks
    chunk: int | None = None
    softcap: float | None = None  # scores are kept within it, by tanh
    # [H] a score for each query head that takes its share of the softmax and gives no value
    sinks: Tensor | None = None
