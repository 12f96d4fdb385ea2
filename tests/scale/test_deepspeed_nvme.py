"""Masters, moments and weights in files: the same numbers as in memory.

Where libaio is missing, the error says so. Where it is there, DeepSpeed compiles its disk access on
first use, for minutes: that one is long.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("pip install 'reinforge[deepspeed]'", allow_module_level=True)

from helpers.toys import make_module, make_samples, relative, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.deepspeed.backend import DeepSpeedBackend
from reinforge.backends.distributed.ranks import Ranks
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import InputError
from reinforge.models.causal import CausalModel


def compiles() -> bool:
    """Whether DeepSpeed finds what it compiles its disk access with."""
    return bool(import_module("deepspeed.ops").__compatible_ops__["async_io"])


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


def load() -> CausalModel:
    """Large enough that a rank's piece is more than the megabyte below which DeepSpeed writes
    nothing.
    """
    return CausalModel(
        make_module("llama", 0, vocab_size=67, hidden_size=256, intermediate_size=512, spread=1.0)
    )


def many(ranks: Ranks, **more: Any) -> DeepSpeedBackend:
    cfg = train_config(
        backend="deepspeed", deepspeed={"stage": 3, **more}, learning_rate=1e-3, max_grad_norm=0.5
    )
    return DeepSpeedBackend(ranks, load, cfg, total_steps=10)


def update(backend: DeepSpeedBackend, seed: int) -> dict[str, float]:
    batches = pack(make_samples((20, 5, 12, 3, 9, 31, 4, 2), seed), 40)
    return {
        **backend.forward_backward(batches, NLLLoss(), Totals.of(batches, 32)),
        **backend.step().metrics(),
    }


def in_files(ranks: Ranks, folder: Path) -> DeepSpeedBackend:
    return many(ranks, offload_optimizer="nvme", nvme_path=str(folder))


def test_where_libaio_is_missing_the_error_says_so(ranks: Ranks, tmp_path: Path) -> None:
    if compiles():
        pytest.skip("libaio is installed")
    with pytest.raises(InputError, match=r"train\.deepspeed\.offload_optimizer.*libaio"):
        in_files(ranks, tmp_path)


@pytest.mark.long  # eight minutes on two cores
@pytest.mark.timeout(1800)
def test_files_hold_what_memory_holds(ranks: Ranks, tmp_path: Path) -> None:
    if not compiles():
        pytest.skip("no libaio, or no compiler (apt-get install libaio-dev)")
    plain = many(ranks)
    moved = in_files(ranks, tmp_path)
    for seed in range(3):
        found = update(plain, seed)
        again = update(moved, seed)
        assert again == pytest.approx(found, rel=1e-5)
    a = plain.state()
    b = moved.state()
    assert a.tensors.keys() == b.tensors.keys() and relative(b.tensors, a.tensors) < 1e-6
    moved.load(a)
    b = moved.state()
    assert a.meta == b.meta and relative(b.tensors, a.tensors) == 0
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.swp")) > 2 * 3 * (1 << 20)
    assert update(moved, 3)["train/loss"] == pytest.approx(update(plain, 3)["train/loss"], rel=1e-5)
