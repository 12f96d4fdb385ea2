"""`train.freeze` and `train.only`: what is not trained stays bit for bit, whatever its neighbours
do, and what is meant by no name is an error.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.offline_runs import PAIRS, config, launch, small_model
from helpers.toys import make_module, make_samples, parameters, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.local import LocalBackend
from reinforge.build.saved_model import open_model
from reinforge.config.model import ModelConfig
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import InputError
from reinforge.models.causal import CausalModel
from reinforge.models.freezing import freeze, trained_names
from reinforge.models.load import load_model, load_scalar
from reinforge.models.meta_model import count_on_meta


def test_frozen_weights_stay_to_the_bit_and_the_others_move() -> None:
    """q of the first layer learns although k and v beside it, joined with it in generation, do
    not.
    """
    module = make_module()
    cfg = train_config(
        learning_rate=1e-2,
        only=["model.layers.*.self_attn", "lm_head"],
        freeze=["*.k_proj", "model.layers.0.self_attn.v_proj"],
        optimizer={"weight_decay": 0.1},
    )
    freeze(module, cfg)
    before = parameters(module)
    backend = LocalBackend(CausalModel(module), cfg, total_steps=3)
    batches = pack(make_samples(), 64)
    for _ in range(3):
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        backend.step()
    after = parameters(module)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {
        "lm_head.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
    }
    assert set(backend.optimizer.parameters) == moved
    assert {name.split("/")[1] for name in backend.state().tensors} == moved
    assert backend.facts().trained == sum(after[name].numel() for name in moved)
    assert count_on_meta(module.config, cfg).trained == backend.facts().trained


def test_a_pattern_of_no_weight_is_an_error() -> None:
    module = make_module()
    with pytest.raises(InputError, match=r"train.freeze.*'model.layers.7' is the name of no"):
        trained_names(module, train_config(freeze=["model.layers.7"]))
    with pytest.raises(InputError, match=r"train.only.*names such as model.embed_tokens.weight"):
        trained_names(module, train_config(only=["embed"]))
    with pytest.raises(InputError, match="no weight is left to train"):
        trained_names(module, train_config(freeze=["*"]))
    with pytest.raises(InputError, match="'lm_hea' is the name of no"):
        trained_names(module, train_config(freeze=["lm_hea"]))
    tied = make_module("llama", tie_word_embeddings=True)
    with pytest.raises(InputError, match="output head is its input embedding"):
        trained_names(tied, train_config(freeze=["lm_head"]))


def test_the_head_of_a_reward_model_is_always_trained(tmp_path: Path) -> None:
    model = load_scalar(ModelConfig(path=small_model(tmp_path), device="cpu"), fresh=True)
    names = trained_names(model.module, train_config(only=["model.norm"]))
    assert names == ["model.norm.weight", "score.weight"]


def test_a_run_trains_and_loads_the_rest(tmp_path: Path) -> None:
    """DPO's reference is the model as it was, the checkpoint has the trained weights alone, and the
    model of the run has the frozen ones of the model that it began with.
    """
    path = small_model(tmp_path)
    run = config(
        path, tmp_path / "run", "dpo", steps=3, train={"freeze": ["model.embed_tokens", "*norm*"]}
    )
    launch(run, PAIRS)
    base = parameters(load_model(ModelConfig(path=path, device="cpu")).module)
    trained = parameters(open_model(str(tmp_path / "run"))[0].module)
    same = {name for name in base if torch.equal(base[name], trained[name])}
    assert same == {n for n in base if n.startswith("model.embed_tokens") or "norm" in n}
