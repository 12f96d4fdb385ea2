"""Two ranks that train and two servers on the same GPUs: who has their memory when.

The ranks are real (FSDP2 over gloo), the servers are processes with a bigram model, the GPUs are
files (tests/helpers/ledger_gpus.py): what each process was told to see, and the order of everything
that happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor, nn

from helpers.ledger_gpus import FOLDER, events, note, take
from helpers.ledger_trainer import ledger_gpu_of_rank
from helpers.split_backends import LENGTHS, update
from helpers.stub_servers import StubServers, bigram, stub_of
from helpers.toys import make_model, make_samples, train_config
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.build import shared_gpus
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.weights import Weights
from reinforge.models.causal import CausalModel

pytestmark = pytest.mark.timeout(300)
RANKS = 2


def config(**engine: object) -> Config:
    return config_from_dict(
        {
            "model": {"path": "x", "device": "cpu"},
            "algorithm": {"name": "grpo"},
            "data": {"source": "x.jsonl"},
            "rewards": [{"name": "exact_number"}],
            "train": {"steps": 1, "backend": "fsdp", "ranks": RANKS},
            "run": {"dir": "r"},
            "rollout": {"engine": "sglang"},
            "engine": {"replicas": 2, **engine},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        made = tmp_path_factory.mktemp("ledger")
        patch.setenv(FOLDER, str(made))
        patch.setattr(shared_gpus, "gpu_of_rank", ledger_gpu_of_rank)
        yield made


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    with Ranks.open(RANKS, "cpu") as opened:
        yield opened


@pytest.fixture
def servers(folder: Path, tmp_path: Path) -> Iterator[StubServers]:
    made = StubServers(stub_of("sglang"), tmp_path)
    yield made
    made.close()


def both(*what: str) -> list[str]:
    return [f"{who} {event}" for event in what for who in ("server on 0", "server on 1")]


RELEASED = ["rank 0 releases", "rank 1 releases"]


def test_trainers_and_servers_take_turns(ranks: Ranks, servers: StubServers) -> None:
    backend = FsdpBackend(
        ranks,
        partial(make_model, spread=8.0),
        train_config(learning_rate=1e-2),
        full=CausalModel(servers.module),
        total_steps=10,
    )
    gpus = shared_gpus.SharedGpus(config(), ranks)
    placed = gpus.placement(config())
    assert placed.devices == ("0", "1") and placed.colocated
    engine = servers.engine(gpus.release, device="cuda", replicas=2, placed=placed)

    def weights() -> Weights:
        """As they are; the proof is that of the servers' model, and is noted."""
        found = backend.weights()

        def proof(tokens: Sequence[int]) -> Tensor:
            note("proof")
            return bigram(servers.table(), tokens)

        return replace(found, probe=proof)

    async def work() -> None:
        await engine.update(weights(), 0)
        begun = sorted(event for event in events() if event.endswith("starts"))
        assert begun == both("starts")  # each with its own GPU in its environment
        [first] = await engine.generate([5, 9, 33], Sampling(12, ignore_eos=True), key=3)
        start = len(events())
        await engine.sleep()
        asleep = events()[start:]
        assert [sorted(asleep[i : i + 2]) for i in (0, 2, 4)] == [
            RELEASED,
            both("sleeps"),
            RELEASED,
        ]
        assert engine.memory.given == [32 << 30] * 2
        before = servers.table()
        update(backend, make_samples(LENGTHS))
        start = len(events())
        await engine.update(weights(), 1)
        assert (servers.table() - before).abs().max() > 1e-3
        found = events()[start:]
        # the proof, while servers sleep; all ranks give back; all servers wake; load; are asked
        assert found[:2] == ["proof", "proof"]
        assert sorted(found[2:4]) == RELEASED and sorted(found[4:6]) == both("wakes")
        assert sorted(found[6:]) == sorted(both("loads 1", "scores"))
        assert engine.measured["weights/probe_error"] < 1e-5
        [second] = await engine.generate([5, 9, 33], Sampling(12, ignore_eos=True), key=3)
        assert (first.versions, second.versions) == ([0] * 12, [1] * 12)
        # what one rank keeps too much of is told by its number
        await engine.sleep()
        take("trainer", "1", 60 << 30)
        with pytest.raises(InputError, match=r"GPU 1 gave back 32.0 GiB.*rank 1 leaves 20.0 GiB"):
            await engine.generate([5, 9], Sampling(2), key=4)
        assert sorted(events()[-2:]) == RELEASED

    asyncio.run(work())
    gpus.close()
    backend.close()


def test_ranks_leave_room_for_the_copies_that_generate(ranks: Ranks) -> None:
    """The copies come when the packs are sized; those of servers have GPUs of their own."""
    model = nn.Linear(100, 10, bias=False)
    native = config().model_copy(
        update={"rollout": config().rollout.model_copy(update={"engine": "native"})}
    )
    start = len(events())
    with shared_gpus.room_for_copies(config(), ranks, model):
        assert events()[start:] == []
    with shared_gpus.room_for_copies(native, ranks, model):
        want = [f"rank {rank} holds 0 and 4000 bytes" for rank in (0, 1)]
        assert sorted(events()[start:]) == want
    assert sorted(events()[start + 2 :]) == ["rank 0 holds 0", "rank 1 holds 0"]


def test_ranks_leave_the_share_of_servers_that_stay_awake(ranks: Ranks) -> None:
    """While the ranks size their packs, and no longer."""
    start = len(events())
    with shared_gpus.room_for_servers(config()):
        assert events()[start:] == []  # they sleep
    awake = config(sleep="never")
    split = awake.cluster.model_copy(update={"layout": "split"})
    with shared_gpus.room_for_servers(awake.model_copy(update={"cluster": split})):
        assert events()[start:] == []  # they have GPUs of their own
    with shared_gpus.room_for_servers(config(sleep="never", memory=0.3)):
        assert sorted(events()[start:]) == ["rank 0 holds 0.3", "rank 1 holds 0.3"]
    assert sorted(events()[start + 2 :]) == ["rank 0 holds 0", "rank 1 holds 0"]
    one = config(sleep="never", replicas=1, memory=0.5, args={"tp-size": 2})
    start = len(events())
    with shared_gpus.room_for_servers(one):
        assert sorted(events()[start:]) == ["rank 0 holds 0.5", "rank 1 holds 0.5"]
    apart = config(sleep="never", devices=["4", "1"])
    start = len(events())
    with shared_gpus.room_for_servers(apart):
        assert sorted(events()[start:]) == ["rank 0 holds 0", "rank 1 holds 0.4"]
