"""Two tensor groups of two: Megatron's layers cut over ranks, and gradients added up over groups;
and ranks of a group that round apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("megatron") is None:
    pytest.skip("pip install 'reinforge[megatron]'", allow_module_level=True)

from helpers.split_backends import LENGTHS, load, policy_loss, update
from helpers.toys import make_samples, relative, train_config
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.local import LocalBackend
from reinforge.backends.megatron.backend import MegatronBackend
from reinforge.backends.megatron.worker import MegatronWorker

MAKE = partial(load, "full", "qwen3")
SETTINGS: dict[str, Any] = {"total_steps": 10, "temperature": 0.8, "reference": True}
STEPS: dict[str, Any] = {"learning_rate": 1e-4, "max_grad_norm": 0.02}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(4, "cpu") as opened:
        yield opened


def test_two_groups_of_two_train_as_one_process(ranks: Ranks) -> None:
    local = LocalBackend(MAKE(), train_config(**STEPS), **SETTINGS)
    cut = MegatronBackend(
        ranks,
        MAKE,
        train_config(backend="megatron", tensor_parallel=2, **STEPS),
        full=MAKE(),
        **SETTINGS,
    )
    for seed in range(3):
        found, again = (update(b, make_samples(LENGTHS, seed), policy_loss()) for b in (local, cut))
        assert again == pytest.approx(found, rel=1e-4, abs=1e-6)
    ours = cut.state().tensors
    theirs = local.state().tensors
    moments = [k for k in theirs if k.endswith("/exp_avg")]
    assert relative({k: ours[k] for k in moments}, {k: theirs[k] for k in moments}) < 1e-5
    cut.close()


@pytest.mark.long
def test_copies_stay_equal_where_ranks_round_apart(ranks: Ranks) -> None:
    """As sums in another order would on a GPU: rank 1's gradients are off in their last digits."""
    cut = MegatronBackend(
        ranks,
        MAKE,
        train_config(backend="megatron", tensor_parallel=2, **STEPS),
        full=MAKE(),
        **SETTINGS,
    )
    ranks.call(cut.id, jittery)
    for seed in range(3):
        update(cut, make_samples(LENGTHS, seed), policy_loss())
    first, *others = ranks.call(cut.id, copies)
    assert first and all(
        torch.equal(first[name], other[name]) for other in others for name in first
    )
    cut.close()


def jittery(shard: MegatronWorker) -> None:
    reduce = shard.optimizer.reduce

    def noisy() -> None:
        for master in shard.optimizer.masters.values():
            if shard.member.rank == 1 and master.grad is not None:
                master.grad *= 1 + 1e-6
        reduce()

    shard.optimizer.reduce = noisy  # type: ignore[method-assign]


def copies(shard: MegatronWorker) -> dict[str, torch.Tensor]:
    """What every rank has whole."""
    return {
        name: p.detach().clone()
        for name, p in shard.optimizer.parameters.items()
        if name not in shard.optimizer.cut
    }
