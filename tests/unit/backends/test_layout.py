"""How ranks stand and what each holds, without any: pieces and boxes, plans that are refused,
checkpoints written in pieces.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.toy_architectures import make_architecture
from helpers.toys import make_model, make_module, train_config
from reinforge.backends.distributed.parallel_layout import ParallelLayout
from reinforge.backends.fsdp.tensor_parallel import TensorParallelPlan
from reinforge.checkpoint import files, store
from reinforge.checkpoint.tensors import CheckpointTensors, within, write_pieces
from reinforge.config.adapter import AdapterConfig
from reinforge.config.load import config_from_dict
from reinforge.core.backend import State
from reinforge.core.errors import InputError
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.sequence import SequenceSlices, SliceReading, check_heads


def test_ranks_stand_in_hands() -> None:
    parallel = ParallelLayout.of(
        train_config(backend="fsdp", sequence_parallel=2, tensor_parallel=2), 8
    )
    assert (parallel.data_parallel, parallel.members, parallel.shards) == (2, 4, 4)
    assert parallel.spread(["a", "b"]) == ["a"] * 4 + ["b"] * 4 and parallel.first(
        list(range(8))
    ) == [0, 4]
    with pytest.raises(InputError, match="6 ranks do not divide into groups of 4"):
        ParallelLayout.of(train_config(backend="fsdp", sequence_parallel=4), 6)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((12, 6), None),
        ((12, 6), 0),
        ((12, 6), 1),
        ((7, 6), None),
        ((7, 6), 1),
        ((3, 2), None),
        ((3, 2), 1),
        ((5,), None),
        ((4,), 0),
    ],
)
def test_a_box_is_where_the_piece_lies(shape: tuple[int, ...], dim: int | None) -> None:
    """Pieces of all ranks, put back by their boxes, are the tensor: also where some ranks have
    nothing.
    """
    parallel = ParallelLayout(8, 1, 2)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    back = torch.full_like(whole, -1)
    for rank in range(8):
        box = parallel.box(shape, rank, dim)
        piece = parallel.piece(whole, rank, dim)
        assert piece.numel() == torch.Size([b - a for a, b in box]).numel()
        if piece.numel():
            back[tuple(slice(a, b) for a, b in box)] = piece
    assert torch.equal(back, whole)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"sequence_parallel": 2}, "train.sequence_parallel: the backend local"),
        ({"tensor_parallel": 2}, "train.tensor_parallel: the backend local"),
        ({"backend": "fsdp", "ranks": 3, "sequence_parallel": 2}, "must divide"),
        ({"offload_weights": True}, "train.offload_weights: the backend local"),
    ],
)
def test_configs_that_mean_nothing(settings: dict[str, Any], told: str) -> None:
    raw = {
        "model": {"path": "m"},
        "algorithm": {"name": "sft"},
        "data": {"source": "rows.jsonl"},
        "train": {"steps": 1, **settings},
        "run": {"dir": "runs/x"},
    }
    with pytest.raises(InputError, match=told):
        config_from_dict(raw, where="test")


def test_plans_that_cannot_be() -> None:
    with pytest.raises(InputError, match="no plan for cutting the matrices of GPT2LMHeadModel"):
        TensorParallelPlan(make_model("gpt2"), 2)
    with pytest.raises(InputError, match="4 query and 2 key heads cannot be cut into 4"):
        TensorParallelPlan(make_model("llama"), 4)
    with pytest.raises(InputError, match="sinks of GraniteSWAForCausalLM has a number for each"):
        TensorParallelPlan(CausalModel(make_architecture("granite_swa")), 2)
    with pytest.raises(InputError, match="adapter"):
        TensorParallelPlan(
            CausalModel(add_adapter(make_module("llama"), AdapterConfig(rank=2), seed=0)), 2
        )
    import transformers as t

    base = dict(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
    )
    with pytest.raises(InputError, match="which is not supported"):
        TensorParallelPlan(
            CausalModel(t.AutoModelForCausalLM.from_config(t.Qwen3MoeConfig(**base))), 2
        )
    plan = TensorParallelPlan(make_model("qwen3"), 2)
    assert (
        plan.dims["model.layers.1.self_attn.q_proj.weight"] == 0
        and plan.dims["model.layers.0.mlp.down_proj.weight"] == 1
    )
    assert "model.layers.0.self_attn.k_norm.weight" in plan.summed and not any(
        "embed" in name or "lm_head" in name for name in plan.dims
    )


def test_models_that_cannot_be_split() -> None:
    with pytest.raises(InputError, match="4 attention heads do not divide by 3.*1, 2, 4"):
        check_heads(4, 3)


def test_slices_and_what_is_read_in_them() -> None:
    def seen(rank: int, size: int) -> SequenceSlices:
        slices = object.__new__(SequenceSlices)
        slices.group, slices.rank, slices.size = None, rank, size  # type: ignore[assignment]
        return slices

    spans = [seen(rank, 3).span(8) for rank in range(3)]
    assert [(s.start, s.stop) for s in spans] == [(0, 3), (3, 6), (6, 8)]
    places = torch.tensor([5, 0, 7, 3, 5])
    readings = [SliceReading.of(places, 8, seen(rank, 3)) for rank in range(3)]
    assert [(r.places.tolist(), r.own(places).tolist()) for r in readings] == [
        ([0], [0]),
        ([2, 0, 2], [5, 3, 5]),
        ([1], [7]),
    ]
    whole = SliceReading.of(places, 8, None)
    assert torch.equal(whole.rows(torch.arange(8.0)), places.float()) and torch.equal(
        whole.join(places), places
    )


# ---- checkpoints in pieces ----

SHAPES = {"model/a": (7, 4), "model/b": (5,), "optimizer/a/step": (), "part/ema/a": (7, 4)}


class Written:
    """What ranks would do, one after the other."""

    def __init__(self, tensors: dict[str, torch.Tensor], parallel: ParallelLayout):
        self.tensors = tensors
        self.parallel = parallel

    def write(self, folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
        told: dict[str, dict[str, Any]] = {}
        for rank in range(self.parallel.size):
            cut = {
                n: self.parallel.piece(t, rank, None) if t.ndim else t
                for n, t in self.tensors.items()
                if t.ndim or rank == 0
            }
            own = {n: t for n, t in cut.items() if t.numel()}
            boxes = {
                n: self.parallel.box(self.tensors[n].shape, rank, None) if t.ndim else ()
                for n, t in own.items()
            }
            told |= write_pieces(
                folder, own, {n: self.tensors[n].shape for n in own}, boxes, f"-r{rank:05d}"
            )
        return told


@pytest.fixture
def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (
            torch.randn(shape, generator=generator).to(
                torch.bfloat16 if name == "model/b" else torch.float32
            )
        )
        for name, shape in SHAPES.items()
    }


def test_pieces_read_as_the_whole(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    """Any box of any tensor, whoever wrote it; the digest is that of the checkpoint in
    one piece.
    """
    extra = {"cursor": 3, "clock": {"saved": 1.0}}
    plain = store.save(tmp_path / "plain", 1, State(whole, {"steps": 1}), extra)
    pieces = store.save(
        tmp_path / "pieces",
        1,
        State({"more/c": torch.ones(2)}, {"steps": 1}, {"": Written(whole, ParallelLayout(3))}),
        extra,
    )
    with_more = store.save(
        tmp_path / "more", 1, State({**whole, "more/c": torch.ones(2)}, {"steps": 1}), extra
    )
    assert store.digest(pieces) == store.digest(with_more) != store.digest(plain)
    state, told = store.load(pieces)
    assert (
        isinstance(state.tensors, CheckpointTensors)
        and told == extra
        and list(state.tensors) == sorted([*whole, "more/c"])
    )
    for name, tensor in whole.items():
        assert (
            torch.equal(state.tensors[name], tensor) and state.tensors[name].dtype == tensor.dtype
        )
    for box in (
        ((1, 6), (1, 3)),
        ((0, 3), (0, 4)),
        ((6, 7), (0, 4)),
        ((4, 4), (0, 4)),
        ((7, 7), (0, 4)),
    ):
        found = state.tensors.part("model/a", box)
        assert torch.equal(found, whole["model/a"][tuple(slice(a, b) for a, b in box)])
    average = within(state.tensors, "part/ema/")
    assert list(average) == ["a"] and torch.equal(average["a"], whole["part/ema/a"])
    import pickle

    sent = pickle.loads(pickle.dumps(state.tensors))
    assert torch.equal(sent["model/a"], whole["model/a"])


@pytest.mark.parametrize("change", ["gap", "outside", "foreign", "nonsense"])
def test_an_index_that_lies_is_refused(
    tmp_path: Path, whole: dict[str, torch.Tensor], change: str
) -> None:
    path = store.save(tmp_path, 1, State({}, {}, {"": Written(whole, ParallelLayout(2))}), {})
    index = path / "pieces-r00001.json"
    told = json.loads(index.read_text())
    if change == "gap":
        del told["model/a"]
    elif change == "outside":
        told["model/a"]["box"][0] = [4, 9]
    elif change == "foreign":
        told["model/a"]["file"] = "../elsewhere.safetensors"
    else:
        told["model/a"] = [1, 2]
    index.write_text(json.dumps(told))
    (path / files.MANIFEST).unlink()
    files.write_manifest(path, 1)  # hashes agree: what is wrong is what it says
    with pytest.raises(InputError, match="piece"):
        store.load(path)
