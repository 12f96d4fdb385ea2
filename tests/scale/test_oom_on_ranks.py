"""Memory that runs out in one of several ranks: a vote before the backward, and all of them do the
pass again in smaller micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from helpers.split_backends import identical, load, policy_loss
from helpers.toys import make_samples, train_config
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.distributed.worker import RankWorker
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import InputError
from reinforge.core.report import OutOfMemory

pytestmark = pytest.mark.timeout(600)
LENGTHS = (6, 5, 4, 7, 5, 6) * 4  # two packs of several rows for each of three ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(3, "cpu") as opened:
        yield opened


def run_out(worker: RankWorker, rank: int, at: int, part: str, backward: bool = False) -> None:
    """Stands in for a device: in forward (or backward) number `at` of this rank, a part of the
    model finds no memory.
    """
    if worker.member.rank != rank:
        return
    module = worker.model.module
    if worker.reference is not None and worker.reference.copy is not None and part[0] == "*":
        module = worker.reference.copy.module
    count = -1

    def fail(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            handle.remove()
            raise torch.OutOfMemoryError("no memory")

    found = module.get_submodule(part.lstrip("*"))
    handle = (
        found.register_full_backward_pre_hook(fail)
        if backward
        else found.register_forward_pre_hook(fail)
    )


def make_backend(
    ranks: Ranks, kind: str = "full", backend: type[Any] = FsdpBackend, **changes: Any
) -> Any:
    cfg = train_config(**{"tokens_per_microbatch": 30, "learning_rate": 1e-2, **changes})
    settings = {"total_steps": 10, "temperature": 0.8, "reference": True}
    return backend(ranks, partial(load, kind), cfg, **settings)


def two_steps(backend: Any, smaller: str = "", budget: int = 0) -> list[Any]:
    """What two optimizer steps report, on packs of up to 30 tokens. `smaller`: before which pass
    of the first step the micro-batches become so.
    """
    loss = policy_loss()
    told = []
    for seed in range(2):
        batches = pack(make_samples(LENGTHS, seed), 30)
        for name in ("annotate", "train"):
            if smaller == name and seed == 0:
                backend.budget = budget
                backend._call("limit", budget)
            if name == "annotate":
                backend.annotate(batches, loss.needs | {"old", "reference"})
        metrics = backend.forward_backward(batches, loss, Totals.of(batches))
        told.append((metrics, backend.step()))
    return told


@pytest.mark.parametrize(
    ("kind", "part", "at", "rank", "pass_"),
    [
        # the model annotates two packs, then it trains two; what is computed again counts too
        ("full", "model.embed_tokens", 2, 0, "train"),
        ("full", "model.layers.1.mlp", 3, 1, "train"),
        pytest.param("full", "model.norm", 1, 1, "annotate", marks=pytest.mark.long),
        ("full", "*model.layers.1", 0, 0, "annotate"),  # in the reference
        ("lora", "base_model.model.model.layers.1", 5, 1, "train"),
        pytest.param(
            "checkpointed", "model.layers.0.self_attn", 4, 0, "train", marks=pytest.mark.long
        ),
    ],
)
def test_all_ranks_do_the_pass_again(
    ranks: Ranks, kind: str, part: str, at: int, rank: int, pass_: str
) -> None:
    """Weights, moments and metrics are bit for bit those of ranks that had that micro-batch size
    before the pass.
    """
    backend = make_backend(ranks, kind)
    ranks.call(backend.id, run_out, [(rank, at, part)] * 3)
    told = two_steps(backend)
    budget = backend.budget
    assert budget < 30 and ranks.call(backend.id, own_budget) == [budget] * 3
    assert told[0][1].out_of_memory == OutOfMemory(1, 30, budget)
    assert told[1][1].out_of_memory is None
    plain = make_backend(ranks, kind)
    want = two_steps(plain, pass_, budget)
    assert [metrics for metrics, _ in told] == [metrics for metrics, _ in want]
    state = backend.state()
    assert state.meta["budget_asked"] == 30 and identical(state, plain.state())
    backend.close(), plain.close()


def own_budget(worker: RankWorker) -> int:
    return worker.budget


def with_deepspeed() -> dict[str, Any]:
    pytest.importorskip("deepspeed")
    from reinforge.backends.deepspeed.backend import DeepSpeedBackend

    return {"backend": DeepSpeedBackend, "deepspeed": {"stage": 2}}


def with_megatron() -> dict[str, Any]:
    pytest.importorskip("megatron")
    from reinforge.backends.megatron.backend import MegatronBackend

    return {"backend": MegatronBackend}


@pytest.mark.parametrize("with_", [with_deepspeed, with_megatron], ids=["deepspeed", "megatron"])
def test_so_do_ranks_whose_forward_asks_nothing_of_the_others(ranks: Ranks, with_: Any) -> None:
    backend = make_backend(ranks, **with_())
    ranks.call(backend.id, forward_without_memory, [(1, 3)] * 3)
    told = two_steps(backend)
    budget = backend.budget
    assert told[0][1].out_of_memory == OutOfMemory(1, 30, budget) and budget < 30
    plain = make_backend(ranks, **with_())
    want = two_steps(plain, "train", budget)
    assert [metrics for metrics, _ in told] == [metrics for metrics, _ in want]
    assert identical(backend.state(), plain.state())
    backend.close(), plain.close()


def forward_without_memory(worker: RankWorker, rank: int, at: int) -> None:
    """Forward number `at` of this rank finds no memory when it is nearly done."""
    if worker.member.rank != rank:
        return
    model: Any = worker.model
    known = model.logprobs
    count = -1

    def logprobs(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise torch.OutOfMemoryError("no memory")
        return known(*args, **options)

    model.logprobs = logprobs


def test_two_ranks_run_out_at_once(ranks: Ranks) -> None:
    """In other layers: each of them does the rest of its own forward."""
    backend = make_backend(ranks)
    ranks.call(backend.id, run_out, [(1, 2, "model.layers.1")] * 3)
    ranks.call(backend.id, run_out, [(2, 2, "model.layers.0.mlp")] * 3)
    told = two_steps(backend)
    assert told[0][1].out_of_memory == OutOfMemory(1, 30, backend.budget)
    plain = make_backend(ranks)
    two_steps(plain, "train", backend.budget)
    assert identical(backend.state(), plain.state())
    backend.close(), plain.close()


def test_a_backward_without_memory_ends_the_run(ranks: Ranks) -> None:
    """The last test here: the ranks are out of step afterwards."""
    backend = make_backend(ranks)
    ranks.call(backend.id, run_out, [(0, 0, "model.layers.0.mlp", True)] * 3)
    with pytest.raises(InputError, match="does not fit into the memory of rank 0") as found:
        two_steps(backend)
    assert found.value.where == "train.tokens_per_microbatch"
