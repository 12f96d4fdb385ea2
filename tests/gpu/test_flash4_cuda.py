"""FlashAttention 4 on a Hopper, where it is installed: packs and gradients against float32, the
same bits twice, and which packs it is not for.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.determinism import deterministic
from reinforge.models import flash4
from reinforge.models.attention import PackedLayout, starts_of
from reinforge.models.attention_rule import AttentionRule

DEVICE = torch.device("cuda:0")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not flash4.on_hopper(DEVICE) or not flash4.installed(),
    reason="needs a Hopper and flash-attn-4",
)
# a prompt and its answers twice, and one by itself: 4,763 queries
LENGTHS = [257, 1024, 3, 700, 130, 900, 64, 1, 1000, 684]
PREFIX = [-1, 0, 0, 0, -1, 4, 4, 4, 4, -1]
SHAPES = [(64, 14, 2), (96, 4, 4), (128, 12, 2), (128, 28, 4)]  # head size, heads, key heads


def attended(
    lengths: list[int], prefix: list[int], shape: tuple[int, int, int], dtype: torch.dtype
) -> list[Tensor]:
    """Output and gradients of a pack of random numbers, which every precision gets alike."""
    size, heads, key_heads = shape
    draw = torch.Generator().manual_seed(size + heads)

    def normal(count: int) -> Tensor:
        made = torch.randn(sum(lengths), count, size, generator=draw).bfloat16()
        return made.to(DEVICE, dtype)

    inputs = [normal(n).requires_grad_() for n in (heads, key_heads, key_heads)]
    weights = normal(heads)
    layout = PackedLayout(lengths, starts_of(lengths, DEVICE), prefix)
    out = layout.attend(0, *inputs, AttentionRule(scale=1.25 * size**-0.5))
    return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call of the kernel had; trials have come before."""
    made: list[int] = []
    kernel = flash4.attention
    monkeypatch.setattr(
        flash4, "attention", lambda q, *rest: made.append(len(q)) or kernel(q, *rest)
    )
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_those_of_float32(
    shape: tuple[int, int, int], calls: list[int]
) -> None:
    with deterministic():
        found = attended(LENGTHS, PREFIX, shape, torch.bfloat16)
    assert calls[-1] == sum(LENGTHS)
    want = attended(LENGTHS, PREFIX, shape, torch.float32)
    for name, ours, true in zip(("out", "q", "k", "v"), found, want, strict=True):
        assert float((ours.float() - true).norm()) < 0.02 * float(true.norm()), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_bits_twice(shape: tuple[int, int, int], calls: list[int]) -> None:
    with deterministic():
        first, *others = (attended(LENGTHS, PREFIX, shape, torch.bfloat16) for _ in range(5))
    assert calls.count(sum(LENGTHS)) == 5
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_without_a_gradient_the_output_has_the_same_bits(calls: list[int]) -> None:
    """Scoring and training see one policy."""
    q, k, v = (torch.randn(6000, n, 64, device=DEVICE, dtype=torch.bfloat16) for n in (14, 2, 2))
    lengths = [2500, 2000, 1100, 400]
    layout = PackedLayout(lengths, starts_of(lengths, DEVICE), [-1, 0, 0, 0])
    rule = AttentionRule(scale=0.125)
    with torch.inference_mode():
        scored = layout.attend(0, q, k, v, rule)
    trained = layout.attend(0, q.requires_grad_(), k, v, rule)
    assert calls[-2:] == [6000, 6000]
    assert torch.equal(scored, trained.detach())


def test_small_packs_stay_with_torch(calls: list[int]) -> None:
    attended([200, 300, 256], [-1, 0, 0], (64, 14, 2), torch.bfloat16)
    attended([100] + [90] * 60, [-1] + [0] * 60, (64, 14, 2), torch.bfloat16)  # short segments
    assert not calls


def test_the_trial_is_far_from_its_limit() -> None:
    for size, heads, key_heads in SHAPES:
        error, _ = flash4.trial(size, heads // key_heads, torch.bfloat16, DEVICE)
        assert error < flash4.NEAR / 2


def test_random_numbers_go_on_as_if_there_was_no_trial() -> None:
    states = torch.get_rng_state(), torch.cuda.get_rng_state(DEVICE)
    flash4.trial(64, 7, torch.bfloat16, DEVICE)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), states[1])
