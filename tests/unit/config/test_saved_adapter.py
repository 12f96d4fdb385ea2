"""A saved adapter that is broken, or is another than the configuration says, is told by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.toy_architectures import make_architecture
from helpers.toys import make_module
from reinforge.config.adapter import AdapterConfig
from reinforge.config.saved_adapter import (
    CONFIG,
    as_known,
    as_saved,
    check_base,
    overruled,
    read_adapter,
)
from reinforge.config.train import TrainConfig
from reinforge.core.errors import InputError
from reinforge.models.adapters import add_adapter
from reinforge.models.meta_model import count_on_meta

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cfg = AdapterConfig(rank=4, kind="rslora", targets=["q_proj", "v_proj"])
    add_adapter(make_module("llama"), cfg, seed=0).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_what_it_says_of_itself(saved: Path) -> None:
    found = as_saved(AdapterConfig(path=str(saved), rank=32, targets=["k_proj"]))
    assert (found.kind, found.rank, found.alpha) == ("rslora", 4, 8)
    assert found.targets == ["q_proj", "v_proj"]
    assert as_saved(AdapterConfig(rank=7)).rank == 7  # a new one


def test_what_is_written_beside_it_and_is_not_so(saved: Path) -> None:
    told = overruled(AdapterConfig(path=str(saved), rank=32, alpha=8, targets=["v_proj", "q_proj"]))
    assert told == ["rank: 32, where it has 4"]
    assert overruled(AdapterConfig(path=str(saved), targets=["k_proj"])) == [
        "targets: ['k_proj'], where it has ['q_proj', 'v_proj']"
    ]
    assert overruled(AdapterConfig(path=str(saved))) == []
    assert overruled(AdapterConfig(path=str(saved), rank=16, targets="all-linear")) == [
        "rank: 16, where it has 4",
        "targets: all-linear, where it has ['q_proj', 'v_proj']",
    ]
    whole = AdapterConfig(path=str(saved)).model_dump()  # as a run leaves it
    assert overruled(AdapterConfig(**whole)) == []


def broken(saved: Path, how: str) -> str:
    """Breaks it; what the error is to name."""
    config = saved / CONFIG
    weights = saved / WEIGHTS
    if how == "json":
        config.write_text('{"r": 4,')
        return f"{config} is not JSON"
    if how == "rank":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 8}))
        return f"{WEIGHTS} of {saved} has a rank of 4"
    if how == "half":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        return f"{weights} is not whole"
    if how == "header":
        weights.write_bytes(weights.read_bytes()[:40])
        return f"{weights} cannot be read"
    if how == "empty":
        weights.write_bytes(b"")
        return f"{weights} cannot be read"
    if how == "weights":
        weights.unlink()
        return f"{saved} has no {WEIGHTS}"
    if how == "kind":
        config.write_text(json.dumps({"peft_type": "LOHA"}))
        return "kind LOHA"
    if how == "r":
        config.write_text(json.dumps({"peft_type": "LORA"}))
        return f"{config} has no r"
    config.unlink()
    (saved / "metrics.jsonl").touch()
    return "`reinforge export RUN OUT`"


@pytest.mark.parametrize(
    "how", ["json", "rank", "half", "header", "empty", "weights", "kind", "r", "run"]
)
def test_a_broken_one_is_refused_by_name(saved: Path, how: str) -> None:
    """By who reads it alone, and by who loads it."""
    wanted = broken(saved, how)
    cfg = AdapterConfig(path=str(saved))
    with pytest.raises(InputError) as told:
        read_adapter(str(saved))
    assert told.value.where == "adapter.path" and wanted in str(told.value)
    with pytest.raises(InputError) as told:
        add_adapter(make_module("llama"), cfg, seed=0)
    assert told.value.where == "adapter.path" and wanted in str(told.value)
    assert as_known(cfg) is cfg


def without(path: Path, part: str) -> None:
    kept = {name: x for name, x in load_file(path).items() if part not in name}
    save_file(kept, path)


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_one_with_weights_missing_is_refused(tmp_path: Path, arch: str) -> None:
    """peft would train on with random ones."""
    make: Any = make_module if arch == "llama" else make_architecture
    folder = tmp_path / "saved"
    add_adapter(make(arch), AdapterConfig(rank=2), seed=0).save_pretrained(folder)
    cfg = AdapterConfig(path=str(folder))
    before = {n: p.clone() for n, p in add_adapter(make(arch), cfg, seed=1).named_parameters()}
    assert any("lora_A" in name for name in before)
    without(folder / WEIGHTS, "layers.1.mlp")
    with pytest.raises(InputError, match="lacks .* weights") as told:
        add_adapter(make(arch), cfg, seed=0)
    assert told.value.where == "adapter.path" and "layers.1.mlp" in str(told.value)


def test_one_of_another_model_is_refused(tmp_path: Path, saved: Path) -> None:
    """Of other sizes, and of experts on a model that has none."""
    wide = make_module("llama")
    for layer in wide.model.layers:
        layer.self_attn.q_proj = torch.nn.Linear(
            layer.self_attn.q_proj.in_features, 2 * layer.self_attn.q_proj.out_features, bias=False
        )
    with pytest.raises(InputError, match="not one of this model"):
        add_adapter(wide, AdapterConfig(path=str(saved)), seed=0)
    experts = tmp_path / "experts"
    cfg = AdapterConfig(rank=2, targets=["q_proj", "gate_up_proj"])
    add_adapter(make_architecture("qwen3_moe"), cfg, seed=0).save_pretrained(experts)
    with pytest.raises(InputError, match=r"weights of experts .*gate_up_proj\) that .* not have"):
        add_adapter(make_module("llama"), AdapterConfig(path=str(experts)), seed=0)


def made_for(folder: Path, base: str) -> Path:
    config = folder / CONFIG
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": base})
    )
    return folder


@pytest.mark.parametrize("target", ["gate_up_proj", "gate"])
def test_one_of_experts_is_refused_before_a_dense_model_is_loaded(
    tmp_path: Path, target: str
) -> None:
    mixture = make_architecture("qwen3_moe")
    cfg = AdapterConfig(rank=2, targets=["q_proj", target])
    add_adapter(mixture, cfg, seed=0).save_pretrained(tmp_path)
    path = str(made_for(tmp_path, "org/mixture"))
    check_base(path, mixture.config)
    with pytest.raises(
        InputError, match=r"experts or their router .* \(llama\) has no exp"
    ) as told:
        check_base(path, make_module("llama").config)
    assert told.value.where == "adapter.path"
    assert f"{tmp_path / WEIGHTS} has" in str(told.value) and "for org/mixture" in str(told.value)
    saved = AdapterConfig(path=path)
    with pytest.raises(InputError, match="has no experts"):
        count_on_meta(make_module("llama").config, TrainConfig(steps=1), saved)


def test_one_of_other_sizes_is_refused_before_the_model_is_loaded(saved: Path) -> None:
    shape = make_module("llama").config
    cfg = AdapterConfig(path=str(made_for(saved, "org/large")))
    train = TrainConfig(steps=1)
    assert count_on_meta(shape, train, cfg).trained
    fewer = copy.deepcopy(shape)
    fewer.num_hidden_layers = 1
    with pytest.raises(InputError, match=r"layer 1 .* layers 0 to 0; it was made for org/large"):
        count_on_meta(fewer, train, cfg)
    wider = copy.deepcopy(shape)
    wider.hidden_size = 2 * shape.hidden_size
    told = rf"reads {shape.hidden_size} numbers, and in this model it reads {wider.hidden_size}"
    with pytest.raises(InputError, match=told):
        count_on_meta(wider, train, cfg)


def test_one_of_experts_alone_goes_on(tmp_path: Path) -> None:
    """Some write no list of layers then."""
    cfg = AdapterConfig(rank=2, targets=["gate_up_proj"])
    add_adapter(make_architecture("qwen3_moe"), cfg, seed=0).save_pretrained(tmp_path)
    path = tmp_path / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": None}))
    assert as_saved(AdapterConfig(path=str(tmp_path))).rank == 2
    read_adapter(str(tmp_path))


def test_what_peft_cannot_train_whole_is_refused_by_name() -> None:
    cfg = AdapterConfig(rank=2, modules_to_save=["gate"])
    with pytest.raises(InputError, match="gate cannot be trained whole") as told:
        add_adapter(make_architecture("qwen3_moe"), cfg, seed=0)
    assert told.value.where == "adapter.modules_to_save"
