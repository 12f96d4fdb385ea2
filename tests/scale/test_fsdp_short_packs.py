"""Packs with fewer tokens than the ranks that share them: nobody's slice is computed apart."""

from __future__ import annotations

from functools import partial

import pytest

from helpers.split_backends import both, load, one_pass
from helpers.toys import make_samples, relative
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.distributed.ranks import Ranks

pytestmark = pytest.mark.timeout(600)


def test_a_pack_of_three_tokens_on_four_ranks() -> None:
    """Alone and beside longer ones: loss and gradient of one process, also with noise on the
    embeddings, which is a function of the row.
    """
    with Ranks.open(4, "cpu") as four:
        for neftune in (None, 5.0):
            local, split = both(
                four, partial(load, "full"), False, sequence_parallel=4, neftune=neftune
            )
            for lengths in ((2,), (2, 9)):
                samples = make_samples(lengths, prompt=1)
                want, metrics, old, _ = one_pass(local, samples, 3, NLLLoss(), False)
                found, again, mine, _ = one_pass(split, samples, 3, NLLLoss(), False)
                assert relative(found, want) < 1e-6
                assert again == pytest.approx(metrics, rel=1e-5)
                assert float((mine - old).abs().max()) < 2e-5
            split.close()
