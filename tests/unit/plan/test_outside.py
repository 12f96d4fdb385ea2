"""What `plan` asks of environments, engines and ranks, before any weights are loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from reinforge.build import ranks, shared_gpus
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.sample import Row
from reinforge.data.sources import train_and_eval_rows
from reinforge.plan.outside import (
    check_engine,
    check_env,
    check_heads,
    check_ranks,
    check_servers,
)
from reinforge.plan.plan import describe
from reinforge.plan.preflight import PlanReport

ENVS = """
from reinforge.core.env import Observation

class Says:
    def __init__(self, text="Go."):
        self.text = text
    async def reset(self, row, seed):
        if self.text == "raise":
            raise ValueError("no board")
        return Observation([{"role": "user", "content": self.text}])
    async def step(self, action): ...
    async def close(self): ...
"""

EVERY_RANK = "each of the 2 ranks generates a share"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token per character, a context of 64, heads of size 8; no weights."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    (path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 2,
                "max_position_embeddings": 64,
            }
        )
    )
    return path


def config(model: Path, tmp_path: Path, **more: Any) -> Config:
    return config_from_dict(
        {
            "model": {"path": str(model), "device": "cpu"},
            "algorithm": {"name": "grpo"},
            "data": {"source": "episodes:8"},
            "rollout": {"max_new_tokens": 8},
            "train": {"steps": 1},
            "run": {"dir": str(tmp_path / "run")},
            **more,
        }
    )


def begun(model: Path, tmp_path: Path, **options: Any) -> list[str]:
    (tmp_path / "envs.py").write_text(ENVS)
    report = PlanReport()
    cfg = config(model, tmp_path, env={"name": f"{tmp_path}/envs.py:Says", "options": options})
    check_env(cfg, [Row("0", "episode 0"), Row("1", "episode 1")], report)
    return report.errors


def test_an_environment_that_begins_is_fine(model: Path, tmp_path: Path) -> None:
    assert begun(model, tmp_path) == []
    assert begun(model, tmp_path, text="x" * 62) == []


def test_an_environment_that_raises_is_told_before_training(model: Path, tmp_path: Path) -> None:
    [error] = begun(model, tmp_path, text="raise")
    assert "Says does not begin row 0" in error and "ValueError: no board" in error


def test_a_first_prompt_that_fills_the_context(model: Path, tmp_path: Path) -> None:
    [error] = begun(model, tmp_path, text="x" * 70)
    assert "leaves no room for an answer below 64" in error and "70 tokens" in error


def test_a_python_without_the_engine(model: Path, tmp_path: Path) -> None:
    (tmp_path / "sglang.py").write_text("")
    # the second finds a module of that name
    for env, errors in (({}, 1), ({"PYTHONPATH": str(tmp_path)}, 0)):
        report = PlanReport()
        check_engine(
            config(
                model,
                tmp_path,
                rewards=[{"name": "exact_number"}],
                rollout={"engine": "sglang", "max_new_tokens": 8},
                engine={"python": sys.executable, "env": env},
            ),
            report,
        )
        assert len(report.errors) == errors, report.errors


def test_small_heads_are_refused_for_vllm_on_a_cpu(model: Path, tmp_path: Path) -> None:
    for engine, errors in (("vllm", 1), ("native", 0)):
        report = PlanReport()
        check_heads(
            config(
                model,
                tmp_path,
                rewards=[{"name": "exact_number"}],
                rollout={"engine": engine, "max_new_tokens": 8},
            ),
            report,
        )
        assert len(report.errors) == errors and all("size 8" in e for e in report.errors)


def test_ranks_that_this_machine_cannot_start_are_a_warning(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for train, warnings in (
        ({"backend": "fsdp"}, 1),
        ({"backend": "fsdp", "ranks": 2}, 0),
        ({}, 0),
    ):
        report = PlanReport()
        check_ranks(
            config(
                model, tmp_path, rewards=[{"name": "exact_number"}], train={"steps": 1, **train}
            ),
            report,
        )
        assert len(report.warnings) == warnings and report.ok
    assert (
        ranks.ranks_here(
            config(
                model,
                tmp_path,
                rewards=[{"name": "exact_number"}],
                train={"steps": 1, "backend": "fsdp", "ranks": 2},
            )
        )
        == 2
    )


@pytest.mark.parametrize(
    ("overrides", "gpu", "said"),
    [
        ((), None, "rank 0 generates, because ranks on CPUs share the cores that it has"),
        (("cluster.kind=ray",), None, "rank 0 generates, because ranks on CPUs"),
        (("cluster.kind=ray", "model.device=cuda"), None, EVERY_RANK),
        ((), "H200", EVERY_RANK),
        (("train.backend=local", "train.ranks=null"), None, None),
    ],
    ids=["here", "ray", "gpus", "gpus that are named", "one process"],
)
def test_it_is_told_who_generates(
    model: Path, tmp_path: Path, overrides: tuple[str, ...], gpu: str | None, said: str | None
) -> None:
    raw = config(
        model,
        tmp_path,
        rewards=[{"name": "exact_number"}],
        train={"steps": 1, "backend": "fsdp", "ranks": 2},
    ).model_dump(mode="json")
    report = PlanReport()
    check_ranks(config_from_dict(raw, overrides=overrides), report, gpu=gpu)
    (found,) = [text for label, text in describe(report) if label == "rollouts"] or [None]
    assert found == said if found is None or said is None else found.startswith(said)


def test_an_adapter_is_not_cut_by_tensor_parallel(model: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="adapter are not cut"):
        config(
            model,
            tmp_path,
            rewards=[{"name": "exact_number"}],
            adapter={"kind": "lora"},
            train={"steps": 1, "backend": "fsdp", "ranks": 2, "tensor_parallel": 2},
        )


def test_episodes_hold_out_the_rows_after_those_of_training(model: Path, tmp_path: Path) -> None:
    cfg = config(
        model,
        tmp_path,
        rewards=[{"name": "exact_number"}],
        data={"source": "episodes:8", "eval": {"size": 4}},
    )
    train, held_out = train_and_eval_rows(cfg.data)
    assert [row.id for row in train] == [str(i) for i in range(8)]
    assert [row.prompt for row in held_out] == [f"episode {i}" for i in range(8, 12)]


def test_gpus_of_servers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four GPUs, of which ranks have all."""
    gpus = ["4", "5", "6", "7"]
    monkeypatch.setattr(shared_gpus, "visible", lambda: gpus)
    monkeypatch.setattr(shared_gpus, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(shared_gpus, "ranks_here", lambda cfg: 4)

    def told(backend: str = "fsdp", **engine: Any) -> list[str]:
        report = PlanReport()
        check_servers(
            config(
                model,
                tmp_path,
                rewards=[{"name": "exact_number"}],
                train={"steps": 1, "backend": backend},
                rollout={"engine": "vllm", "max_new_tokens": 8},
                engine=engine,
            ),
            report,
        )
        assert report.ok
        return report.warnings

    assert told(replicas=4) == [] == told(replicas=2, args={"tensor-parallel-size": 2})
    assert told(devices=["3"]) == [] == told("local") == told("local", replicas=4)
    [idle] = told()
    assert "engine.replicas: 3 of the trainer's 4 GPUs generate nothing. Set it to 4." in idle
    [large] = told(args={"tensor-parallel-size": 8})
    assert "on this machine engine.args: a server of 8 workers" in large
    [shares] = told(replicas=8, memory=0.6)
    assert "2 servers are on GPU 4, each with 0.6" in shares
    [channel] = told(replicas=4, channel="api")
    assert "engine.channel: weights that GPU 4 has cannot be opened by a server on GPU 5" in channel
