"""Four ranks: two that share each pack, twice; and two that share each pack and each matrix."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from helpers.split_backends import LENGTHS, both, load, one_pass, policy_loss
from helpers.toys import make_samples, relative
from reinforge.backends.distributed.ranks import Ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks.open(4, "cpu") as opened:
        yield opened


@pytest.mark.parametrize(
    ("sequence", "tensor", "data_parallel"),
    [(2, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1)],
    ids=["2 groups of 2 slices", "slices and matrices", "2 groups of cut matrices", "4 slices"],
)
def test_gradients_on_four_ranks(
    four: Ranks, sequence: int, tensor: int, data_parallel: int
) -> None:
    local, cut = both(
        four, partial(load, "head", "qwen3"), sequence_parallel=sequence, tensor_parallel=tensor
    )
    assert cut.parallel.data_parallel == data_parallel
    samples = make_samples(LENGTHS)
    loss = policy_loss()
    want, metrics, old, size = one_pass(local, samples, 10_000, loss, True)
    for budget in (10_000, 30):
        found, again, mine, norm_here = one_pass(cut, samples, budget, loss, True)
        assert relative(found, want) < 1e-6 and float((mine - old).abs().max()) < 2e-5
        assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6) and norm_here == pytest.approx(
            size, rel=1e-5
        )
    cut.close()
