"""DeepSpeed's ZeRO on a GPU with one rank: what CPU processes cannot show (nccl, its CUDA
accelerator and streams, bfloat16 kernels). None of its own kernels is compiled for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from helpers.split_backends import LENGTHS, frozen, load, policy_loss, update
from helpers.toys import make_samples, relative, train_config
from reinforge.backends.deepspeed.backend import DeepSpeedBackend
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.local import LocalBackend

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install 'reinforge[deepspeed]'"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(1, DEVICE) as opened:
        yield opened


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        *((0, "full"), (1, "full"), (2, "full"), (3, "tied")),
        *((1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")),
    ],
)
def test_it_trains_as_one_process_without_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, stage: int, kind: str
) -> None:
    """Three steps with everything that a loss can ask for; stage 0 is for float32."""
    built = []
    monkeypatch.setattr(
        "torch.utils.cpp_extension.load", lambda *given, **named: built.append(named.get("name"))
    )
    make = partial(load, kind)
    settings = {"total_steps": 10, "temperature": 0.8, "reference": True}
    model = make()
    model.module.to(DEVICE)
    local = LocalBackend(model, train_config(learning_rate=1e-4), **settings)
    cfg = train_config(backend="deepspeed", learning_rate=1e-4, deepspeed={"stage": stage})
    backend = DeepSpeedBackend(ranks, make, cfg, full=make(), **settings)
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
    assert built == []
    backend.close()
