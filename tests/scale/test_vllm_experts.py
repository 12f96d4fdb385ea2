"""Mixtures of experts on a real vLLM server on the CPU: after an update of all weights, and of an
adapter on the experts, it computes what the trainer computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.vllm_python import START, vllm_python
from reinforge.build.served import setup_of, trainer_score
from reinforge.config.adapter import AdapterConfig
from reinforge.config.load import config_from_dict
from reinforge.config.model import ModelConfig
from reinforge.core.batch import Batch
from reinforge.core.engine import Sampling
from reinforge.core.sample import Sample
from reinforge.core.weights import Weights
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.served.make import make_served
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_model
from reinforge.models.router_bias import biases_of
from reinforge.models.tiny import tiny_tokenizer

# a server for each, minutes; that experts are published right is tests/unit/models/test_adapters.py
pytestmark = [pytest.mark.timeout(3 * START), pytest.mark.long]
run = asyncio.run
PROMPT = [5, 60, 7, 100, 9]
FREE = Sampling(12, ignore_eos=True)
SIZES: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_experts_per_tok=2,
    max_position_embeddings=256,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 4,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def make_mixture(kind: str, path: Path) -> Path:
    tokenizer = tiny_tokenizer()
    name, more = KINDS[kind]
    config = getattr(transformers, name)(vocab_size=len(tokenizer), **SIZES, **more)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def served(path: Path, model: CausalModel, folder: Path) -> ServedEngine:
    cfg = config_from_dict(
        {
            "model": {"path": str(path), "device": "cpu"},
            "algorithm": {"name": "grpo"},
            "data": {"source": "arithmetic:chain"},
            "rewards": [{"name": "exact_number"}],
            "train": {"steps": 1},
            "rollout": {"engine": "vllm", "max_batch": 16},
            "engine": {"python": vllm_python(), "start_seconds": START, "health_seconds": 30},
            "run": {"dir": str(folder)},
        },
        where="test",
    )
    setup = setup_of(cfg, model, [2], context=256, longest=200, saved=str(path))
    return make_served(setup, trainer_score(model))


def logprobs(model: CausalModel, tokens: Sequence[int]) -> torch.Tensor:
    """The trainer's, of the tokens after the prompt."""
    whole = [*PROMPT, *tokens]
    trained = [i >= len(PROMPT) for i in range(len(whole))]
    with torch.no_grad():
        batch = Batch.pack([Sample.from_tokens("x", whole, trained)])
        return model.logprobs(batch, temperature=1.0)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_biases_and_adapters_of_experts(kind: str, tmp_path: Path) -> None:
    path = make_mixture(kind, tmp_path / "model")
    model = load_model(ModelConfig(path=str(path), device="cpu"))
    engine = served(path, model, tmp_path / "run")

    def asked(trained: CausalModel, version: int) -> torch.Tensor:
        """The trainer's log-probs of what the server answers, which are its own."""
        weights = Weights("shared", module=trained.module, probe=trainer_score(trained))
        run(engine.update(weights, version))
        done = run(engine.generate(PROMPT, FREE, key=8))[0]
        want = logprobs(trained, done.tokens)
        assert torch.tensor(done.logprobs).sub(want).abs().max() < 1e-4
        assert engine.measured["weights/probe_error"] < 1e-4 and set(done.versions) == {version}
        tokens.append(done.tokens)
        return want

    tokens: list[list[int]] = []
    try:
        asked(model, 0)
        with torch.no_grad():
            for p in model.module.parameters():
                p.add_(torch.randn_like(p) * 0.05)
            for _, bias in biases_of(model.module):
                bias.copy_(torch.tensor([2.0, 0.0, 0.0, 1.0]))
        asked(model, 1)
        base = load_model(ModelConfig(path=str(path), device="cpu")).module
        adapted = CausalModel(add_adapter(base, AdapterConfig(rank=4), seed=0), model.tokenizer)
        trained = [name for name, p in adapted.module.named_parameters() if p.requires_grad]
        assert any("experts" in name for name in trained)
        with torch.no_grad():
            for name, p in adapted.module.named_parameters():
                if "lora_B" in name and "experts" in name:
                    p.copy_(torch.randn_like(p) * 0.2)
        found = asked(adapted, 2)
        with torch.no_grad(), adapted.module.disable_adapter():
            assert (logprobs(adapted, tokens[-1]) - found).abs().max() > 0.1
    finally:
        engine.close()
