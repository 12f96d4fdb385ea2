"""The user's path with vLLM: train with held-out evaluation, resume, export, and the exported model
in vLLM, transformers and our engine.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.toys import SilentView
from helpers.vllm_python import START, vllm_python
from reinforge.build.run import train_config
from reinforge.config.engine import EngineConfig
from reinforge.config.load import config_from_dict
from reinforge.config.model import ModelConfig
from reinforge.core.engine import Sampling
from reinforge.engines.native import NativeEngine
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.make import make_served
from reinforge.models.load import load_model
from reinforge.models.tiny import make_tiny_model
from reinforge.offline.export import export

pytestmark = pytest.mark.timeout(3 * START)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def config(folder: Path, steps: int) -> Any:
    path = folder / "model"
    if not path.exists():
        make_tiny_model(path, width=64, layers=2, heads=2, kv_heads=1, context=256, spread=0.08)
    return config_from_dict(
        {
            "model": {"path": str(path), "device": "cpu"},
            "algorithm": {"name": "grpo", "group_size": 4},
            "rewards": [{"name": "reinforge.check.learning:share_of_even"}],
            "data": {
                "source": "arithmetic:chain",
                "options": {"terms": 3, "max_value": 9, "operators": "+", "size": 200, "seed": 0},
                "eval": {"size": 16},
            },
            "rollout": {"engine": "vllm", "max_new_tokens": 8, "max_batch": 32},
            "engine": {"python": vllm_python(), "start_seconds": START},
            "train": {"steps": steps, "prompts_per_step": 8, "learning_rate": 3e-3},
            "run": {"dir": str(folder / "run"), "seed": 0, "checkpoint": {"every": 2}},
        },
        where="test",
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_run_and_its_evaluation(folder: Path) -> None:
    result = train_config(config(folder, 4), view=SilentView())
    assert result.steps == 4
    steps = [line for line in lines(folder) if "weights/probe_error" in line]
    assert len(steps) == 4
    for line in steps:
        assert line["weights/probe_error"] < 1e-4 and line["weights/seconds"] < 60
        assert line["mismatch/mean"] < 1e-4 and line["tokens/trained"] > 0
    evaluated = [line["eval/reward"] for line in lines(folder) if "eval/reward" in line]
    assert len(evaluated) >= 2
    assert (folder / "run" / "engine-0.log").stat().st_size > 0


@pytest.mark.long
def test_it_goes_on(folder: Path) -> None:
    """A server that is new, with the weights of the checkpoint: proved by the probe before the
    first token.
    """
    result = train_config(config(folder, 6), view=SilentView())
    assert result.steps == 6
    steps = [line for line in lines(folder) if "weights/probe_error" in line]
    assert len(steps) == 6 and all(line["mismatch/mean"] < 1e-4 for line in steps)


def test_an_exported_model_says_the_same_everywhere(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = export(folder / "run", folder / "exported")
    ours = load_model(ModelConfig(path=str(out), device="cpu"))
    tokenizer = AutoTokenizer.from_pretrained(out)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    cfg = EngineConfig(python=vllm_python(), start_seconds=START)
    served = make_served(
        ServerSetup(
            "vllm",
            cfg,
            str(out),
            folder / "served",
            "float32",
            "cpu",
            256,
            259,
            stop_tokens=(2,),
            longest=64,
            max_batch=8,
        )
    )
    native = NativeEngine(ours, stop_tokens=[2], kv_gib=0.01)
    try:
        for text in ("1+2+3=", "what is this", "9"):
            prompt = tokenizer(text).input_ids
            greedy = Sampling(16, 0.0)
            found = asyncio.run(served.generate(prompt, greedy, key=1))[0].tokens
            assert found == asyncio.run(native.generate(prompt, greedy, key=1))[0].tokens
            with torch.no_grad():
                plain = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[
                    0, len(prompt) :
                ].tolist()
            assert found == plain and tokenizer.decode(found) == tokenizer.decode(plain)
    finally:
        served.close()
