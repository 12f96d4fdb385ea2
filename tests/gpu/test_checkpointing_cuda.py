"""Inputs of layers in pinned host memory: the same gradients, and less of the GPU."""

from __future__ import annotations

import pytest
import torch

from helpers.toys import make_model
from reinforge.config.base import Checkpointing
from reinforge.core.batch import Batch
from reinforge.core.sample import Sample
from reinforge.models import checkpointing
from reinforge.models.causal import CausalModel
from reinforge.models.checkpointing import checkpoint_layers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS = 12
WIDTH = 256
TOKENS = 16384  # an input of 8 MiB in bfloat16


def passed(how: Checkpointing) -> tuple[list[torch.Tensor], int]:
    """The gradients of three micro-batches, and the bytes that they took at most beside the model.

    Several, so that what the first one left behind would show in the others.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
    module = make_model("llama", num_hidden_layers=LAYERS, **sizes).module
    model = CausalModel(module.to("cuda", torch.bfloat16))
    checkpoint_layers(model.module, how)
    model.recompute(True)
    ids = torch.randint(5, 60, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    batch = Batch.pack([Sample.from_tokens("a", ids, [True] * TOKENS)]).to(model.device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        logprobs, _ = model.logprobs(batch, temperature=1.0)
        logprobs.sum().backward()
        del logprobs
    torch.cuda.synchronize()
    grads = [p.grad for p in model.module.parameters() if p.grad is not None]
    return grads, torch.cuda.max_memory_allocated() - before


def test_the_same_gradients_in_less_memory() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        expected, whole = passed(True)
        found, less = passed("host")
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(found) == len(expected) > LAYERS
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    one = TOKENS * WIDTH * 2
    assert one >= checkpointing.LEAST
    # all but the three of `memory_model.HERE`, and one for what the allocator holds for a stream
    assert whole - less >= (LAYERS - 4) * one, (whole, less, one)
