"""Two backward passes over the same packs have the same bits: shared prompts, own ones, attention
of unequal lengths, compiled layers. Skips without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.local import LocalBackend
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Totals, pack
from reinforge.core.sample import Sample
from reinforge.models.causal import CausalModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def samples() -> list[Sample]:
    random = torch.Generator().manual_seed(0)
    found = []
    for group in range(4):
        prompt = torch.randint(5, 900, (150,), generator=random).tolist()
        for i in range(6):
            length = int(torch.randint(40, 400, (1,), generator=random))
            tokens = prompt + torch.randint(5, 900, (length,), generator=random).tolist()
            trained = [at >= len(prompt) for at in range(len(tokens))]
            found.append(Sample.from_tokens(f"{group}/{i}", tokens, trained, group=str(group)))
    return found


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_same_bits_twice(shared: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = CausalModel(Qwen2ForCausalLM(shape).to("cuda", torch.bfloat16).eval())
    if compiled:
        model.compile_layers()
    cfg = TrainConfig(steps=1, tokens_per_microbatch=4096, deterministic=True)
    backend = LocalBackend(model, cfg, total_steps=1)
    batches = pack(samples(), backend.budget, share=shared)
    totals = Totals.of(batches, 400)
    passes = []
    for _ in range(4):
        backend.forward_backward(batches, NLLLoss(), totals)
        passes.append([g.clone() for g in backend.optimizer.gradients()])
        backend.optimizer.zero()
    for other in passes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(passes[0], other, strict=True))
