"""From tokens to rows: one number per sequence out of the flat [M] vectors that a loss sees.

Legend: M trained tokens of the micro-batch in the order of their sequences, S sequences, P pairs
(rows 2i and 2i+1).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reinforge.core.errors import InputError
from reinforge.core.sample import Sample


def sums(values: Tensor, sequence: Tensor, rows: int) -> Tensor:
    """[S] the sum of `values` [M] over each sequence; 0 where a sequence has no trained token."""
    assert values.shape == sequence.shape and values.ndim == 1
    return torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(
        0, sequence, values
    )


def last(values: Tensor, lengths: Tensor) -> Tensor:
    """[S] the value at each sequence's last trained token; 0 where there is none. Of several heads,
    [M, A], those of each: [S, A].

    Counted by length and never by looking at ids, so a pad that equals eos cannot move it.
    """
    if not len(values):
        return values.new_zeros(len(lengths), *values.shape[1:])
    found = values[(lengths.cumsum(0) - 1).clamp(min=0)]
    there = (lengths > 0).view(-1, *[1] * (values.ndim - 1))
    return torch.where(there, found, torch.zeros_like(found))


def constant(streams: Mapping[str, Tensor], name: str, lengths: Tensor) -> Tensor:
    """[S] the number of each whole answer (a label, a score), which every trained token of it
    carries.

    An answer without a trained token has none left. Taking 0 for it would be another label, or
    another score: an error.
    """
    if bool((lengths == 0).any()):
        what = (
            f"row {int((lengths == 0).nonzero()[0])} of a micro-batch has no trained token, so its"
            f" {name} is lost."
        )
        raise InputError(
            what, where="data", fix="Leave answers without a token out, each with its pair."
        )
    return last(streams[name], lengths)


def with_stream(sample: Sample, name: str, value: float) -> Sample:
    """The sample with a stream that is `value` at every token: how a score or a label of a whole
    answer reaches a loss.
    """
    return sample.with_(
        streams={**sample.streams, name: torch.full((len(sample.tokens),), float(value))}
    )


def places(sequence: Tensor, lengths: Tensor) -> Tensor:
    """[M] which trained token of its sequence a token is, from 0."""
    return (
        torch.arange(len(sequence), device=sequence.device)
        - (lengths.cumsum(0) - lengths)[sequence]
    )


def sides(rows: Tensor) -> tuple[Tensor, Tensor]:
    """([P] chosen, [P] rejected) of numbers per row [2P]: row 2i is chosen, row 2i+1 rejected."""
    assert rows.ndim == 1 and len(rows) % 2 == 0, (
        f"{len(rows)} rows are not pairs: pack with unit=2"
    )
    return rows[0::2], rows[1::2]
