"""Megatron's layers on a GPU with one rank: what CPU processes cannot show (nccl, its CUDA paths,
variable-length attention in bfloat16).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from helpers.split_backends import LENGTHS, frozen, load, policy_loss, update
from helpers.toys import make_samples, relative, train_config
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.local import LocalBackend
from reinforge.backends.megatron.backend import MegatronBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(find_spec("megatron") is None, reason="pip install 'reinforge[megatron]'"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(1, "cuda") as opened:
        yield opened


@pytest.mark.parametrize("kind", ["full", "tied", "bfloat16", "checkpointed"])
def test_it_trains_as_one_process_without_it(ranks: Ranks, kind: str) -> None:
    make = partial(
        load, kind, "qwen3" if kind == "checkpointed" else "qwen2" if kind == "full" else "llama"
    )
    settings = {"total_steps": 10, "temperature": 0.8, "reference": True}
    model = make()
    model.module.cuda()
    local = LocalBackend(model, train_config(learning_rate=1e-4), **settings)
    backend = MegatronBackend(
        ranks, make, train_config(backend="megatron", learning_rate=1e-4), full=make(), **settings
    )
    exact = kind != "bfloat16"
    for seed in range(3):
        found, again = (
            update(b, make_samples(LENGTHS, seed), policy_loss(), 64) for b in (local, backend)
        )
        assert again == pytest.approx(
            found, rel=1e-3 if exact else 0.2, abs=1e-5 if exact else 0.05
        )
    ours = frozen(backend.state()).tensors
    theirs = local.state().tensors
    moments = [k for k in theirs if k.endswith("/exp_avg")]
    assert moments and ours.keys() == theirs.keys()
    assert relative({k: ours[k] for k in moments}, {k: theirs[k].cpu() for k in moments}) < (
        1e-4 if exact else 0.1
    )
    whole = backend.weights().module
    assert all(
        torch.equal(p.detach().cpu(), ours[f"model/{name}"]) for name, p in whole.named_parameters()
    )
    backend.close()
