"""What FSDP2 has of its own: how packs are dealt, what stays whole, masters in host memory, and
functions from files. The contract of backends is in tests/contract, whole runs are in tests/e2e.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import nn

from helpers.split_backends import LENGTHS, identical, load, update
from helpers.tiny_runs import launch, lines
from helpers.toys import make_samples, train_config
from reinforge.backends.distributed.dispatch import dispatch_packs, split_evenly
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.backends.fsdp.model import shard
from reinforge.backends.fsdp.worker import FsdpWorker
from reinforge.backends.local import LocalBackend
from reinforge.core.batch import Batch, pack


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


def both(
    ranks: Ranks, kind: str = "full", reference: Any = True, **changes: Any
) -> tuple[LocalBackend, FsdpBackend]:
    cfg = train_config(**changes)
    settings = {"total_steps": 10, "temperature": 0.8, "reference": reference}
    return LocalBackend(load(kind), cfg, **settings), FsdpBackend(
        ranks, partial(load, kind), cfg, full=load(kind), **settings
    )


# ---- the reference ----


def private_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("RssAnon")]
    return int(kib) << 10


class MeasuredWorker(FsdpWorker):
    """Notes the private memory when the model was loaded, when the first model is about to be cut,
    and how large the model is.
    """

    def __init__(self, member: Any, make: Any, cfg: Any, settings: Any, compiled: bool):
        self.noted: list[int] = []

        def made() -> Any:
            model = make()
            self.size = sum(p.numel() * p.element_size() for p in model.module.parameters())
            gc.collect()
            self.noted.append(private_bytes())
            return model

        def cut(*args: Any, **named: Any) -> Any:
            self.noted.append(private_bytes())
            return shard(*args, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("reinforge.backends.fsdp.worker.shard", cut)
            super().__init__(member, made, cfg, settings, compiled)

    def extra(self) -> tuple[int, int]:
        return self.noted[1] - self.noted[0], self.size


class MeasuredBackend(FsdpBackend):
    kind = MeasuredWorker


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_reference_is_no_second_model_in_host_memory(ranks: Ranks) -> None:
    """Each rank had a deep copy of its own until it was cut."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
    backend = MeasuredBackend(
        ranks, partial(load, "full", **shape), train_config(), total_steps=1, reference=True
    )
    for extra, size in backend._call("extra"):
        assert size > 40e6
        assert extra < 0.05 * size
    backend.close()


# ---- dealing ----


def test_packs_are_dealt_fairly() -> None:
    shares = dispatch_packs([7, 100, 50, 60, 90, 8], 3)
    assert [[i for i, counts in share] for share in shares] == [[1, 0], [4, 5], [3, 2]]
    assert all(counts for share in shares for _, counts in share)
    shares = dispatch_packs([5, 9], 4)  # two ranks have nothing of their own
    assert sorted(shares) == [[(0, False)], [(0, False)], [(0, True)], [(1, True)]]


def test_a_pack_is_cut_where_ranks_would_be_idle() -> None:
    samples = make_samples(LENGTHS)
    (batch,) = pack(samples, 10_000)
    (parts,) = split_evenly([[batch]], 2)
    assert len(parts) == 2 and [s.uid for p in parts for s in p.samples] == [
        s.uid for s in batch.samples
    ]
    assert max(p.n_tokens for p in parts) <= 0.65 * batch.n_tokens
    assert [len(p) for p in split_evenly([[Batch.pack(samples[:1])]], 2)] == [
        1
    ]  # one row cannot be cut
    (pairs,) = split_evenly([[Batch.pack(samples[:4])]], 2, unit=2)
    assert [len(p.samples) for p in pairs] == [2, 2]


# ---- weights ----


def test_the_head_of_a_critic_stays_whole(ranks: Ranks) -> None:
    """It is too small to be cut."""
    _, sharded = both(ranks, "critic", reference=False)
    assert sharded.worker.optimizer.whole == {"score.weight"}
    sharded.close()


def test_offloaded_masters(ranks: Ranks) -> None:
    _, plain = both(ranks, "bfloat16", learning_rate=1e-2)
    _, moved = both(ranks, "bfloat16", learning_rate=1e-2, optimizer={"offload": True})
    for seed in range(2):
        assert update(plain, make_samples(LENGTHS, seed)) == update(
            moved, make_samples(LENGTHS, seed)
        )
    assert identical(plain.state(), moved.state())
    plain.close(), moved.close()


# ---- compiled layers ----


class CompiledWorker(FsdpWorker):
    """Counts the graphs that its layers become, whose operations run one by one."""

    def __init__(self, *args: Any):
        self.graphs: list[Any] = []

        def noted(graph: Any, inputs: Any) -> Any:
            self.graphs.append(graph)
            return graph

        compiled = nn.Module.compile
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                nn.Module, "compile", lambda m, **named: compiled(m, backend=noted, **named)
            )
            super().__init__(*args)

    def found(self) -> tuple[int, list[str]]:
        """How many graphs, and what stands between them."""
        counted = torch._dynamo.utils.counters["graph_break"]
        reasons = [str(key).splitlines()[1] for key, n in counted.items() for _ in range(n)]
        return len(self.graphs), reasons


class CompiledBackend(FsdpBackend):
    kind = CompiledWorker


def test_compiled_layers_are_not_broken_by_the_cut(ranks: Ranks) -> None:
    """Four layers share the graphs of one, and what stands between them is attention: gathering
    breaks none. Losses and gradient norms are those of layers that are not compiled.
    """
    shape = {"num_hidden_layers": 4}
    settings = {"total_steps": 10, "temperature": 0.8}
    cfg = train_config()
    plain = FsdpBackend(ranks, partial(load, "full", **shape), cfg, **settings)
    fused = CompiledBackend(ranks, partial(load, "full", **shape), cfg, compiled=True, **settings)
    for seed in range(2):
        want = update(plain, make_samples(LENGTHS, seed))
        found = update(fused, make_samples(LENGTHS, seed))
        assert found == pytest.approx(want, rel=1e-5, abs=1e-7)
    for graphs, breaks in fused._call("found"):
        # of a layer before attention, after it; with and without gradients
        assert 2 <= graphs <= 8
        assert breaks and all("_attention" in reason for reason in breaks), breaks
    plain.close(), fused.close()


SURROGATE = """
import torch

def surrogate(logprobs, old, advantages, sequence):
    return -(logprobs - old).exp() * advantages, {"mine": torch.full_like(logprobs, 3.0)}
"""


def test_a_function_from_a_file_reaches_the_ranks(ranks: Ranks, make: Any, tmp_path: Any) -> None:
    (tmp_path / "parts.py").write_text(SURROGATE)
    cfg = make(
        "own",
        "grpo",
        f"algorithm.surrogate={tmp_path / 'parts.py'}:surrogate",
        "train.backend=fsdp",
        "train.steps=1",
    )
    launch(cfg)
    assert lines(cfg)[0]["policy/mine"] == pytest.approx(3.0)
