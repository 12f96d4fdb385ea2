"""Keys of shared prompts: the tables of a pack, and the gather where there is no kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reinforge.models.attention import PackedLayout, starts_of
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.shared_keys import SharedKeys

CPU = torch.device("cpu")
PACKS = [
    ([3, 2, 2], [-1, 0, 0]),
    ([3, 5, 9, 2, 8, 1], [-1, -1, 1, 0, 1, 0]),
    ([2, 4, 3], [1, -1, 1]),  # an answer before its prompt
    ([4, 1], [-1, -1]),  # none is shared
]


def tables(lengths: list[int], prefix: list[int]) -> SharedKeys:
    return SharedKeys.of(lengths, prefix, CPU, has_kernel=False)


def summed(grads: Tensor, shared: SharedKeys) -> Tensor:
    """What the kernel computes, token by token."""
    places = shared.places.long().split(shared.starts.diff().tolist())
    return torch.stack([grads[mine].sum(0) for mine in places])


def test_the_tables_of_a_small_pack() -> None:
    """A prompt of tokens 0 and 1, an answer of 2, another sequence of 3, an answer of 4 and 5."""
    shared = tables([2, 1, 1, 2], [-1, 0, -1, 0])
    assert shared.index.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5]
    assert shared.starts.tolist() == [0, 3, 6, 7, 8, 9, 10]
    assert shared.places.tolist() == [0, 2, 6, 1, 3, 7, 4, 5, 8, 9]
    assert shared.starts.dtype == shared.places.dtype == torch.int32


@pytest.mark.parametrize(("lengths", "prefix"), PACKS, ids=str)
def test_sums_by_the_tables_are_the_gradient_of_the_gather(
    lengths: list[int], prefix: list[int]
) -> None:
    shared = tables(lengths, prefix)
    draw = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(lengths), 2, size, generator=draw, dtype=torch.float64).requires_grad_()
        for size in (3, 5)  # keys and values of different sizes
    ]
    found = shared.gather(*inputs)
    grads = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in found]
    wanted = torch.autograd.grad(found, inputs, grads)
    for x, want, grad in zip(inputs, wanted, grads, strict=True):
        assert want.shape == x.shape
        torch.testing.assert_close(summed(grad, shared), want, rtol=1e-12, atol=1e-12)


def test_every_token_has_its_own_place_and_one_for_each_answer() -> None:
    lengths, prefix = [256, *[100] * 8, 50], [-1, *[0] * 8, -1]
    counts = tables(lengths, prefix).starts.diff()
    assert counts[:256].eq(9).all() and counts[256:].eq(1).all()


def test_a_pack_without_shared_prompts_gathers_nothing() -> None:
    q = torch.randn(5, 1, 4)
    for prefix in (None, [-1, -1]):
        layout = PackedLayout([3, 2], starts_of([3, 2], CPU), prefix)
        assert layout.shared is None
        assert layout.attend(0, q, q, q, AttentionRule(0.5)).shape == q.shape


def test_an_answer_may_not_continue_an_answer() -> None:
    with pytest.raises(AssertionError, match="continues one that continues another"):
        tables([2, 1, 1], [-1, 0, 1])
