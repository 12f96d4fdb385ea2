"""Checkpoints that every rank writes its own part of: the same digest, resumed on one rank and on
two, exported, and damaged.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.split_backends import load, update
from helpers.tiny_runs import LORA, digest, launch, lines, make_config, tensors
from helpers.toys import make_samples, relative, train_config
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.backends.fsdp.worker import FsdpWorker
from reinforge.build.saved_model import open_model
from reinforge.checkpoint import store
from reinforge.checkpoint.tensors import CheckpointTensors
from reinforge.core.backend import State
from reinforge.core.errors import InputError, StoppedByPolicy
from reinforge.offline.export import export

RANKS = ("train.backend=fsdp", "train.ranks=2")
SHARDED = (*RANKS, "run.checkpoint.sharded=true")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


def newest(cfg: Any) -> Path:
    found = store.latest(Path(cfg.run.dir))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("algorithm", "more", "sections"),
    [
        ("sft", ("train.ema=0.9", "train.optimizer.weight_decay=0.1"), {}),
        ("sft", ("model.dtype=bfloat16",), {}),
        (
            "sft",
            (
                "train.optimizer.name=lion",
                "train.optimizer.groups=[{match: ['*embed*'], rate: 0.5}]",
            ),
            {},
        ),
        ("sft", ("train.tensor_parallel=2",), {}),
        ("sft", ("train.sequence_parallel=2",), {}),
        ("grpo", (), LORA),
        ("ppo", (), {"critic": {}}),
    ],
    ids=["ema", "bfloat16", "lion", "tensor", "sequence", "adapter", "critic"],
)
def test_pieces_are_the_same_checkpoint(
    ranks: Ranks,
    make: Any,
    monkeypatch: Any,
    algorithm: str,
    more: tuple[str, ...],
    sections: dict[str, Any],
) -> None:
    """Gathered or in pieces: one digest.

    Cut after the first step and resumed from the pieces: the same bits again.
    """
    whole = make("whole", algorithm, *more, *RANKS, "run.checkpoint.sharded=false", **sections)
    pieces = make("pieces", algorithm, *more, *SHARDED, **sections)
    launch(whole)
    gathers: list[Any] = []
    # rank 0 never asks for it
    monkeypatch.setattr(FsdpWorker, "gathered", lambda *a: gathers.append(a))
    launch(pieces)
    assert not gathers and digest(pieces) == digest(whole)
    files = sorted(p.name for p in newest(pieces).iterdir())
    assert {
        "model-r00000.safetensors",
        "model-r00001.safetensors",
        "pieces-r00000.json",
        "pieces-r00001.json",
    } <= set(files)
    held = {k.removeprefix("part/critic/") for k in tensors(pieces)}
    assert ("optimizer-r00001.safetensors" in files) and any(
        k.startswith("optimizer/") for k in held
    )
    launch(make("cut", algorithm, *more, *SHARDED, "train.steps=1", **sections))
    cut = make("cut", algorithm, *more, *SHARDED, **sections)
    launch(cut)
    assert digest(cut) == digest(whole)


def test_pieces_in_the_background(ranks: Ranks, make: Any, tmp_path: Path) -> None:
    """Each rank's thread writes a copy while the ranks train on; the bits are those of the moment
    of the copy.
    """
    often = ("run.checkpoint.every=1", "train.ema=0.9")
    plain, behind = (
        make("plain", "sft", *SHARDED, *often),
        make("behind", "sft", *SHARDED, *often, "run.checkpoint.background=true"),
    )
    launch(plain), launch(behind)
    for here, there in zip(
        store.steps(Path(plain.run.dir)), store.steps(Path(behind.run.dir)), strict=True
    ):
        assert store.digest(here) == store.digest(there)
    assert {p.name for p in newest(behind).iterdir()} == {p.name for p in newest(plain).iterdir()}

    backend = FsdpBackend(
        ranks, partial(load, "full"), train_config(backend="fsdp"), sharded=True, total_steps=10
    )
    update(backend, make_samples((20, 19, 21)))
    store.save(tmp_path, 1, backend.state(), {})
    (staged,) = (shards.stage() for shards in backend.state().shards.values())
    update(backend, make_samples((20, 19, 21), 1))
    store.save(tmp_path, 2, State(meta=backend.state().meta, shards={"": staged}), {})
    second, first = store.steps(tmp_path)
    assert store.tensors_digest(second) == store.tensors_digest(first)
    (again,) = (shards.stage() for shards in backend.state().shards.values())
    with pytest.raises(OSError, match="rank 0: .*does not see the directory of the run"):
        again.write(tmp_path / "nowhere", "")
    backend.close()


def biases_of_ranks(worker: FsdpWorker) -> list[torch.Tensor]:
    assert worker.experts.bias is not None
    return [bias.clone() for bias in worker.experts.bias.tensors().values()]


def test_pieces_have_the_biases_of_routers(ranks: Ranks, tmp_path: Path) -> None:
    """Which every rank has whole, and one of them writes."""
    cfg = train_config(backend="fsdp", router_bias_rate=0.004)
    first, second = (
        FsdpBackend(ranks, partial(load, "deepseek_v3"), cfg, sharded=True, total_steps=10)
        for _ in range(2)
    )
    for seed in range(3):
        update(first, make_samples((20, 19, 21), seed), budget=1)
    store.save(tmp_path, 1, first.state(), {})
    second.load(store.load(store.steps(tmp_path)[0])[0])
    (want,), (also,) = ranks.call(first.id, biases_of_ranks)
    assert torch.equal(want, also) and want.abs().max() > 0.003
    for (found,) in ranks.call(second.id, biases_of_ranks):
        assert torch.equal(found, want)


def test_resumed_on_other_numbers_of_ranks(ranks: Ranks, make: Any) -> None:
    """Two ranks in pieces, then one process, then two: each hands over the very bits, and the end
    is that of one process but for rounding.
    """
    one = make("one", "sft")
    launch(one)
    launch(make("mixed", "sft", *SHARDED, "train.steps=1"))
    first = make("mixed", "sft", "train.steps=2")
    before = {k: t.clone() for k, t in tensors(first).items()}
    seen: dict[str, torch.Tensor] = {}
    from reinforge.backends.local import LocalBackend

    load = LocalBackend.load

    def watched(self: Any, state: Any) -> None:
        load(self, state)
        seen.update({k: t.clone() for k, t in self.state().tensors.items()})

    LocalBackend.load = watched  # type: ignore[method-assign]
    try:
        launch(first)  # 2 -> 1
    finally:
        LocalBackend.load = load  # type: ignore[method-assign]
    assert seen.keys() == before.keys() and all(torch.equal(seen[k], before[k]) for k in seen)
    assert not isinstance(store.load(newest(first))[0].tensors, CheckpointTensors)
    last = make("mixed", "sft", *SHARDED)
    launch(last)  # 1 -> 2
    assert isinstance(store.load(newest(last))[0].tensors, CheckpointTensors)
    theirs = tensors(one)
    mine = tensors(last)
    trained = [k for k in theirs if k.startswith("model/")]
    assert (
        mine.keys() == theirs.keys()
        and relative({k: mine[k] for k in trained}, {k: theirs[k] for k in trained}) < 1e-5
    )


def test_from_and_to_hugging_face(ranks: Ranks, make: Any, tmp_path: Path) -> None:
    """A run that starts from a directory in Hugging Face format ends in pieces; exported, it is one
    again, and the next run starts there.
    """
    cfg = make("run", "sft", *SHARDED)
    launch(cfg)
    out = export(Path(cfg.run.dir), tmp_path / "exported")
    model, _ = open_model(str(out))
    saved = tensors(cfg)
    own = dict(model.module.named_parameters())
    names = [k.removeprefix("model/") for k in saved if k.startswith("model/")]
    assert sorted(names) == sorted(own) and all(
        torch.equal(own[k], saved[f"model/{k}"]) for k in names
    )
    again = make_config(
        str(out), tmp_path, "again", "sft", *SHARDED, "train.learning_rate=0.0", "train.steps=1"
    )
    launch(again)
    assert all(torch.equal(tensors(again)[f"model/{k}"], own[k]) for k in names)


def test_what_is_damaged_is_named(ranks: Ranks, make: Any) -> None:
    cfg = make("run", "sft", *SHARDED)
    launch(cfg)
    path = newest(cfg)
    victim = path / "model-r00001.safetensors"
    good = victim.read_bytes()
    victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(InputError, match="model-r00001"):
        store.load(path)
    victim.unlink()
    with pytest.raises(InputError, match="model-r00001.*missing"):
        store.digest(path)
    victim.write_bytes(good)
    store.load(path)
    index = path / "pieces-r00001.json"
    told = json.loads(index.read_text())
    name = next(n for n in told if n.startswith("model/"))
    (path / "MANIFEST.json").write_text((path / "MANIFEST.json").read_text())
    del told[name]
    size = index.stat().st_size
    index.write_text(
        json.dumps(told).ljust(size)[:size] if len(json.dumps(told)) <= size else json.dumps(told)
    )
    with pytest.raises(InputError, match="pieces"):
        store.load(path)


def test_automatic_above_a_size(ranks: Ranks, make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("reinforge.backends.distributed.driver.GATHERED", 10_000)
    cfg = make("large", "sft", *RANKS, "train.steps=1")
    launch(cfg)
    assert (newest(cfg) / "pieces-r00001.json").is_file()
    monkeypatch.undo()
    small = make("small", "sft", *RANKS, "train.steps=1")
    launch(small)
    assert (
        not (newest(small) / "pieces-r00001.json").exists()
        and lines(small)[0]["train/loss"] == lines(cfg)[0]["train/loss"]
    )
    assert digest(small) == digest(cfg) and FsdpWorker.writes_pieces


class Dying(FsdpWorker):
    """Rank 1 is killed in the middle of a save, half of its files written."""

    def write_pieces(self, part: str, folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
        written = super().write_pieces(part, folder, prefix)
        if self.member.rank == 1 and "step-00000002" in str(folder):
            os.kill(os.getpid(), signal.SIGKILL)
        return written


class Doomed(FsdpBackend):
    kind = Dying


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(ranks: Ranks, tmp_path: Path) -> None:
    """The last test: the ranks do not survive it."""
    backend = Doomed(
        ranks, partial(load, "full"), train_config(backend="fsdp"), sharded=True, total_steps=3
    )
    first = store.save(tmp_path, 1, backend.state(), {})
    with pytest.raises(StoppedByPolicy, match="rank 1"):
        store.save(tmp_path, 2, backend.state(), {})
    assert store.steps(tmp_path) == [first] and store.intact(first)
    store.clean(tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000001"]
