"""Joint projections on a GPU in bfloat16, against each layer by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from reinforge.core.batch import Batch
from reinforge.core.sample import Sample
from reinforge.models.causal import CausalModel
from reinforge.models.fused_linear import fused_part, join

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 500}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def made(kind: type, dtype: torch.dtype, joint: bool = True) -> CausalModel:
    torch.manual_seed(0)
    model = CausalModel(AutoModelForCausalLM.from_config(kind(**SIZES, **HEADS)).to("cuda", dtype))
    parts = [part for part in model.module.modules() if fused_part(part) is not None]
    assert len(parts) == 4 * 5
    for part in [] if joint else parts:
        del part.forward
    return model


def batch() -> Batch:
    tokens = torch.randint(0, 500, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    return Batch.pack([Sample.from_tokens("a", tokens, [False] * 10 + [True] * 80)]).to("cuda")


def passed(model: CausalModel) -> tuple[Tensor, Tensor]:
    """Log-probs, and all gradients end to end."""
    model.module.zero_grad()
    logprobs = model.logprobs(batch(), temperature=1.0)[0]
    logprobs.float().sum().backward()
    grads = [p.grad.flatten().float() for p in model.module.parameters()]
    return logprobs.detach(), torch.cat(grads)


def count_of_products(model: CausalModel) -> int:
    """Kernels of matrix products in a forward and a backward."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        passed(model)
    products = ("aten::mm", "aten::addmm")
    return sum(event.count for event in found.key_averages() if event.key in products)


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
def test_gradients_are_as_near_to_those_of_float32(kind: type) -> None:
    true = passed(made(kind, torch.float32))
    own, ours = (passed(made(kind, torch.bfloat16, joint)) for joint in (False, True))
    for i, what in enumerate(("log-probs", "gradients")):
        errors = [float((x[i] - true[i]).norm() / true[i].norm()) for x in (own, ours)]
        assert errors[1] < 1.2 * errors[0] + 1e-3, (what, errors)


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined in memory"])
def test_passes_repeat_and_scoring_has_the_bits_of_training(
    joined: bool,
) -> None:
    model = made(Qwen2Config, torch.bfloat16)
    first = passed(model)
    if joined:  # by an engine, between two passes
        assert join(model.module) == 8
    with torch.no_grad():
        assert torch.equal(model.logprobs(batch(), temperature=1.0)[0], first[0])
    second = passed(model)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_checkpointed_layers_have_the_same_gradients() -> None:
    model = made(Qwen2Config, torch.bfloat16)
    want = passed(model)
    model.module.gradient_checkpointing_enable(  # type: ignore[operator]
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    model.recompute(True)
    assert all(torch.equal(a, b) for a, b in zip(passed(model), want, strict=True))


def test_a_layer_has_nine_products_less() -> None:
    """Three of q, k and v became one and two of gate and up, forward and twice backward."""
    own, ours = (count_of_products(made(Qwen2Config, torch.bfloat16, on)) for on in (False, True))
    assert own - ours == 4 * 9
