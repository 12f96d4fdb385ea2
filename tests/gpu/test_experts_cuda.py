"""Kernels of a block of experts against plain torch; the interpreter runs them on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from reinforge.models.expert_adapters import LowRank
from reinforge.models.kernels import experts as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter has no bfloat16 products
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)


def some_choice(rows: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """Uneven: the first experts are liked."""
    scores = random(rows, experts, seed=7).float() - torch.arange(experts, device=DEVICE) * 0.3
    values, chosen = scores.softmax(-1).topk(k, -1)
    return chosen, values.to(DTYPE)


@pytest.mark.parametrize(("experts", "k", "normed"), [(8, 2, True), (60, 4, False), (64, 8, True)])
def test_the_choice_of_a_router(experts: int, k: int, normed: bool) -> None:
    logits = random(11, experts)
    logits[3] = 0.5  # all alike: the first ones
    chosen, weights = kernels.choose(logits, k, normed)
    scores = logits.softmax(-1, dtype=torch.float32)
    want, order = scores.sort(dim=-1, descending=True, stable=True)
    want = want[:, :k]
    if normed:
        want = want / want.sum(-1, keepdim=True)
    assert torch.equal(chosen, order[:, :k])
    torch.testing.assert_close(weights.float(), want, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("pairs", [2, 96, kernels.MOST_PAIRS + 8])
def test_pairs_by_expert(pairs: int) -> None:
    """Those of each expert in their order; an expert may get none."""
    experts = 7
    generator = torch.Generator().manual_seed(pairs)
    chosen = torch.randint(0, experts - 1, (pairs // 2, 2), generator=generator).to(DEVICE)
    chosen[chosen == 3] = 2
    order, begin = kernels.by_expert(chosen, experts)
    ids, want = chosen.reshape(-1).sort(stable=True)
    assert torch.equal(order.long(), want)
    counts = torch.bincount(ids, minlength=experts)
    assert torch.equal(begin.long()[1:], counts.cumsum(0))
    assert int(begin[0]) == 0


def by_hand(x: Tensor, weight: Tensor, chosen: Tensor, bias: Tensor | None, shared: bool) -> Tensor:
    """[P, N] in float32."""
    top = chosen.shape[1]
    rows = []
    for p, expert in enumerate(chosen.reshape(-1).tolist()):
        row = x[p // top if shared else p].float()
        y = weight[expert].float() @ row
        rows.append(y if bias is None else y + bias[expert].float())
    return torch.stack(rows)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("size", [16, 64])
def test_products(rows: int, size: int) -> None:
    experts, k, inner, outer = 6, 3, 72, 40
    chosen, weights = some_choice(rows, experts, k)
    order, begin = kernels.by_expert(chosen, experts)
    close = {"atol": 0.05, "rtol": 0.02} if DEVICE == "cuda" else {"atol": 1e-4, "rtol": 1e-4}
    x = random(rows, inner, seed=1)
    both = random(experts, 2 * outer, inner, seed=2) / inner**0.5
    y = kernels.product(x, both, order, begin, k, shared=True, gated=True, size=size)
    plain = by_hand(x, both, chosen, None, True)
    want = F.silu(plain[:, :outer]) * plain[:, outer:]
    torch.testing.assert_close(y.float(), want, **close)
    # stored the other way round, with a bias, and weighted
    down = (random(experts, outer, inner, seed=3) / outer**0.5).transpose(1, 2)
    bias = random(experts, inner, seed=4)
    said = kernels.product(y, down, order, begin, k, weights=weights, bias=bias, size=size)
    want = by_hand(y, down, chosen, bias, False) * weights.reshape(-1, 1).float()
    got = said.transpose(0, 1).reshape(rows * k, inner)
    torch.testing.assert_close(got.float(), want, **close)
    total = kernels.added(said)
    torch.testing.assert_close(total.float(), want.view(rows, k, -1).sum(1), atol=0.1, rtol=0.03)


def test_tokens_do_not_know_of_each_other() -> None:
    """In tiles of one size, to the bit."""
    experts, k, inner, outer = 4, 2, 128, 32
    chosen, weights = some_choice(70, experts, k)
    x = random(70, inner, seed=1)
    weight = random(experts, 2 * outer, inner, seed=2)
    down = random(experts, inner, outer, seed=3)

    def of(rows: slice) -> Tensor:
        order, begin = kernels.by_expert(chosen[rows], experts)
        size = kernels.FIXED
        y = kernels.product(x[rows], weight, order, begin, k, shared=True, gated=True, size=size)
        said = kernels.product(y, down, order, begin, k, weights=weights[rows], size=size)
        return kernels.added(said)

    whole = of(slice(0, 70))
    for part in (slice(0, 1), slice(33, 40), slice(2, 70)):
        assert torch.equal(of(part), whole[part])


@pytest.mark.parametrize("rank", [3, 16, 40])
def test_what_an_adapter_adds_to_experts(rank: int) -> None:
    """With the gate and without, its second matrix stored as peft stores it."""
    experts, k, rows, inner, outer = 5, 2, 9, 72, 40
    chosen, weights = some_choice(rows, experts, k)
    order, begin = kernels.by_expert(chosen, experts)
    close = {"atol": 0.06, "rtol": 0.03} if DEVICE == "cuda" else {"atol": 1e-4, "rtol": 1e-4}

    def low_rank(size: int, width: int, seed: int) -> LowRank:
        """In float32, whatever the tokens are in."""
        down = random(experts, rank, width, seed=seed).float() / width**0.5
        up = random(size, rank, experts, seed=seed + 1).float() / rank**0.5
        return LowRank(down, up.permute(2, 0, 1), 0.5)

    def whole(weight: Tensor, low: LowRank) -> Tensor:
        return weight.float() + low.scale * low.up @ low.down

    x = random(rows, inner, seed=1)
    both = random(experts, 2 * outer, inner, seed=2) / inner**0.5
    low = low_rank(2 * outer, inner, 20)
    y = kernels.product(x, both, order, begin, k, shared=True, gated=True, low=low)
    plain = by_hand(x, whole(both, low), chosen, None, True)
    torch.testing.assert_close(y.float(), F.silu(plain[:, :outer]) * plain[:, outer:], **close)
    down = random(experts, inner, outer, seed=3) / outer**0.5
    bias = random(experts, inner, seed=4)
    low = low_rank(inner, outer, 30)
    said = kernels.product(y, down, order, begin, k, weights=weights, bias=bias, low=low)
    want = by_hand(y, whole(down, low), chosen, bias, False) * weights.reshape(-1, 1).float()
    got = said.transpose(0, 1).reshape(rows * k, inner)
    torch.testing.assert_close(got.float(), want, **close)
