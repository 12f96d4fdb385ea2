from __future__ import annotations

import pytest
import torch

from reinforge.algorithms.parts.reduce import REDUCERS
from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Batch, Totals
from reinforge.core.sample import Sample


def tokens_of(lengths: list[int], episode_tokens: list[int] | None = None) -> TrainedTokens:
    sizes = torch.tensor(lengths)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    return TrainedTokens(
        torch.zeros(len(owner), dtype=torch.float64),
        None,
        owner,
        sizes,
        torch.tensor(episode_tokens or lengths)[owner],
        {},
    )


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [  # lengths 10 and 100, limit 128: the weight of one token of each
        ("token_mean", 1 / 110, 1 / 110),
        ("sequence_mean", 1 / (10 * 2), 1 / (100 * 2)),
        ("sequence_sum", 1 / 2, 1 / 2),
        ("fixed_length", 1 / (128 * 2), 1 / (128 * 2)),
    ],
)
def test_token_weights_for_lengths_10_and_100(name: str, short: float, long: float) -> None:
    totals = Totals(tokens=110, sequences=2, max_length=128, episode_tokens={"a": 10, "b": 100})
    weights = REDUCERS[name](tokens_of([10, 100]), totals)
    assert weights.tolist() == pytest.approx([short] * 10 + [long] * 100, abs=1e-18)
    assert not weights.requires_grad


def test_the_weights_of_a_micro_batch_are_those_of_the_batch() -> None:
    totals = Totals(110, 2, 128, {})
    for reduce in REDUCERS.values():
        whole = reduce(tokens_of([10, 100]), totals)
        assert torch.equal(
            torch.cat([reduce(tokens_of([10]), totals), reduce(tokens_of([100]), totals)]), whole
        )


def test_an_episode_of_several_rows_is_one_sequence() -> None:
    """Rows of 3 and 5 tokens from one episode, and one of 4 alone: means over (8, 4) tokens, two
    sequences.
    """
    rows = [("a1", "a", 3), ("a2", "a", 5), ("b", "b", 4)]
    samples = [
        Sample.from_tokens(uid, [0] * (n + 1), [False] + [True] * n).with_(episode=e)
        for uid, e, n in rows
    ]
    totals = Totals.of([Batch.pack(samples[:1]), Batch.pack(samples[1:])])
    assert (totals.tokens, totals.sequences) == (12, 2)
    weights = REDUCERS["sequence_mean"](tokens_of([3, 5, 4], [8, 8, 4]), totals)
    assert weights.tolist() == pytest.approx([1 / 16] * 8 + [1 / 8] * 4)
    assert weights.sum() == pytest.approx(1.0)


def test_nothing_trained_gives_no_division_by_zero() -> None:
    for reduce in REDUCERS.values():
        assert reduce(tokens_of([0]), Totals.of([])).tolist() == []
