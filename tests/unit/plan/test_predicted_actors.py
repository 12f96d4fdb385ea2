"""What `plan` says of the actors of a run under Ray: how many, what they ask for, and the memory
that a reference of its own takes from nobody.
"""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file

from reinforge.backends import roofline
from reinforge.backends.memory_model import GIB
from reinforge.build.predict import predict, shown
from reinforge.config.load import config_from_dict
from reinforge.core.model_facts import ModelFacts
from reinforge.plan.prediction import expected

BIG = ModelFacts(28, 1536, 8960, 12, 2, 128, 151936, tied=True)  # of Qwen2.5-1.5B
H200 = roofline.gpu("NVIDIA H200", int(139.8 * GIB))


def predicted(**cluster: Any) -> dict[str, Any]:
    config = {
        "model": {"path": "org/model"},
        "algorithm": {"name": "ppo", "kl": {"coefficient": 0.1}},
        "critic": {},
        "data": {"source": "python"},
        "rewards": [{"name": "exact_number"}],
        "train": {"steps": 1, "backend": "fsdp", "ranks": 2, "tokens_per_microbatch": 8192},
        "run": {"dir": "run"},
        "cluster": {"kind": "ray", **cluster},
    }
    return predict(config_from_dict(config), BIG, H200, (100.0, 200))


def test_a_reference_and_a_critic_of_their_own_leave_the_policys_memory() -> None:
    beside = predicted()
    apart = predicted(reference={"gpus": 1, "ranks": 2}, critic={"gpus": 1})
    weights = 2 * BIG.parameters() / GIB
    train = beside["memory_gib"]["train"]
    assert train["reference"] == pytest.approx(weights, rel=1e-3) and train["critic"] > 4 * weights
    left = apart["memory_gib"]["train"]
    assert not {"reference", "critic"} & left.keys()
    gone = train["reference"] + train["critic"]
    assert left["peak"] == pytest.approx(train["peak"] - gone, rel=1e-3)
    assert apart["actors"]["memory_gib"]["reference"]["weights"] == pytest.approx(
        weights / 2, rel=1e-3
    )
    assert apart["seconds"]["train"] < beside["seconds"]["train"]


def test_ranks_that_generate_shares_take_the_time_of_a_share() -> None:
    """Which is more than an eighth: a decode step of few rows reads all weights too."""
    keys = {"algorithm": {"name": "grpo"}, "data": {"source": "python"}, "run": {"dir": "run"}}
    train = {"steps": 1, "backend": "fsdp", "prompts_per_step": 32}
    rewards = [{"name": "exact_number"}]
    raw = {**keys, "model": {"path": "org/model"}, "rewards": rewards, "train": train}

    def found(prompts: int, devices: int) -> dict[str, Any]:
        cfg = config_from_dict(raw, overrides=(f"train.prompts_per_step={prompts}",))
        return predict(cfg, BIG, H200, (100.0, 200), devices=devices)

    shares = found(32, 8)
    assert shares["seconds"]["generate"] == found(4, 1)["seconds"]["generate"]
    assert shares["seconds"]["generate"] > found(32, 1)["seconds"]["generate"] / 4
    assert dict(shown(shares))["time of a step"].endswith(", without the network between ranks")
    assert "network" not in dict(shown(found(32, 1)))["time of a step"]


def test_actors_and_what_they_ask_for_are_counted() -> None:
    assert predicted()["actors"] == {
        "roles": {"policy": 2},
        "needed": {"CPU": 2.0, "GPU": 2.0},
        "memory_gib": {},
    }
    apart = predicted(layout="split", engines=3, reference={"gpus": 0.5})
    assert apart["actors"]["roles"] == {"policy": 2, "engine": 3, "critic": 2, "reference": 1}
    assert apart["actors"]["needed"] == {"CPU": 8.0, "GPU": 7.5}
    lines = dict(shown(apart))
    assert lines["actors"] == "2 policy, 3 engine, 2 critic, 1 reference; 8 CPU, 7.5 GPU"
    told = "4.2 GiB an actor: weights 2.9, activations 0.79, head 0.5"
    assert lines["memory of reference"] == told


def test_the_shape_of_a_teacher_is_read_from_its_configuration(tiny_dir: str) -> None:
    """Weights of four bytes each, on a machine without GPUs."""
    config = {
        "model": {"path": tiny_dir},
        "algorithm": {"name": "opd"},
        "teacher": {"path": tiny_dir},
        "data": {"source": "python"},
        "train": {"steps": 1},
        "run": {"dir": "run"},
        "cluster": {"kind": "ray", "teacher": {"gpus": 0}},
    }
    cpu = roofline.Machine("a CPU", 1e11, 1e10, 16 * GIB, kind="cpu")
    found = expected(config_from_dict(config), cpu, (10.0, 20)).prediction()["actors"]
    assert found["roles"] == {"policy": 1, "teacher-0": 1}
    weights = sum(t.numel() for t in load_file(f"{tiny_dir}/model.safetensors").values())
    assert found["memory_gib"]["teacher-0"]["weights"] == pytest.approx(4 * weights / GIB, rel=1e-3)
