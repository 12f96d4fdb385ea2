"""The products of a block of experts, registered with transformers under a name.

transformers writes a block as a router of its own kind and `experts`, whose forward takes the
tokens, the experts that were chosen for them and their weights; what computes it is a function that
can be registered, for all architectures alike. Ours sorts the pairs of a token and an expert by
their experts, and multiplies what each expert got with its weights:

- in training and for prompts, grouped products of the library
- where few tokens are decoded on a GPU, kernels that read the weights of the chosen experts once
- in `model.exact`, products in tiles of one size: a token's numbers do not depend on the others

What a LoRA adapter adds to the experts is computed beside each product from its two thin matrices
(`models.expert_adapters`). `models.fused_experts` is a whole block, router and all, for decoding.

Legend: B tokens, E experts, k chosen for a token, P = B·k pairs, H hidden size, I inner size, r
rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.models.attention import HAS_TRITON
from reinforge.models.decoding import is_decoding
from reinforge.models.exact import RowWiseMode
from reinforge.models.expert_adapters import LowRank, LowRanks
from reinforge.models.gates import joint_gate
from reinforge.models.quick_norm import takes_kernel

NAME = "reinforge"
LIBRARY = "grouped_mm"  # what transformers computes with unless it is told
# up to so many pairs to an expert the kernels are faster than the library, as measured on an H200
FEW_PAIRS = 128


def replace_experts(module: Any) -> None:
    """Lets the experts of a module compute as described above, where they are of a kind that asks
    what to compute with.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config = module.config.get_text_config()
    if getattr(config, "_experts_implementation", None) != LIBRARY:
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    for part in module.modules():
        if hasattr(part, "has_gate") and hasattr(part, "is_transposed"):
            part.config._experts_implementation_internal = NAME


def experts_forward(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    adapters: LowRanks | None = None,
) -> Tensor:
    """[B, H] of the tokens [B, H], for the experts [B, k] and weights [B, k] of each."""
    x, chosen, weights = hidden_states, top_k_index, top_k_weights
    parts = ExpertWeights.of(self, adapters)
    if RowWiseMode.active():
        return _exactly(self, parts, x, chosen, weights)
    if few(self, x, chosen):
        return added(by_kernels(self, parts, x, chosen, weights))
    return _by_groups(self, parts, x, chosen, weights)


def computes(experts: Any) -> bool:
    """Whether `experts_forward` is what the experts compute with."""
    return bool(experts.config._experts_implementation == NAME)


def few(experts: Any, x: Tensor, chosen: Tensor) -> bool:
    """Whether the kernels are for this: an engine decodes few tokens on a GPU."""
    if not (is_decoding() and x.is_cuda and HAS_TRITON) or x.dtype == torch.float32:
        return False
    return chosen.numel() <= FEW_PAIRS * int(experts.num_experts)


def added(parts: Tensor) -> Tensor:
    """[B, H]: what the experts of a token say, [k, B, H], one after the other and in float32."""
    from reinforge.models.kernels import experts as kernels

    return kernels.added(parts)


# ---- one expert, by its parts ----


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """As [E, outputs, inputs], however they are stored."""

    first: Tensor  # gate and up, or up alone
    down: Tensor
    first_bias: Tensor | None = None
    down_bias: Tensor | None = None
    first_low: LowRank | None = None
    down_low: LowRank | None = None

    @classmethod
    def of(cls, experts: Any, adapters: LowRanks | None = None) -> ExpertWeights:
        name = "gate_up_proj" if experts.has_gate else "up_proj"
        # each is read once: an adapter may add itself whenever that is done
        first = getattr(experts, name)
        down = experts.down_proj
        if experts.is_transposed:
            first = first.transpose(1, 2)
            down = down.transpose(1, 2)
        biases = (None, None)
        if experts.has_bias:
            biases = getattr(experts, f"{name}_bias"), experts.down_proj_bias
        low = adapters or {}
        return cls(first, down, *biases, low.get(name), low.get("down_proj"))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, for `given`."""
        lows = [
            (None, None) if low is None else (low.down, low.up)
            for low in (self.first_low, self.down_low)
        ]
        return self.first, self.down, self.first_bias, self.down_bias, *lows[0], *lows[1]

    def given(self, tensors: Sequence[Any]) -> ExpertWeights:
        """The same with other tensors, in the order of `tensors`."""
        lows = (
            None if low is None else replace(low, down=tensors[at], up=tensors[at + 1])
            for low, at in ((self.first_low, 4), (self.down_low, 6))
        )
        return ExpertWeights(*tensors[:4], *lows)


def _inner(experts: Any, y: Tensor) -> Tensor:
    """Between the two products: the gate, or an activation alone."""
    if is_plain(experts) and takes_kernel(y, y):
        return joint_gate(y)
    out: Tensor = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
    return out


def is_plain(experts: Any) -> bool:
    """Whether it is silu(gate)·up with nothing beside it."""
    from transformers.integrations.moe import _default_apply_gate

    return bool(
        experts.has_gate
        and not experts.has_bias
        and experts.is_concatenated
        and type(experts)._apply_gate is _default_apply_gate
        and (
            isinstance(experts.act_fn, nn.SiLU) or type(experts.act_fn).__name__ == "SiLUActivation"
        )
    )


# ---- many tokens ----


def _by_groups(
    experts: Any, parts: ExpertWeights, x: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    ids, order = torch.sort(chosen.reshape(-1), stable=True)
    every = torch.arange(len(parts.down), device=x.device)
    ends = torch.searchsorted(ids, every, right=True).to(torch.int32)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=x.device)
    top = chosen.shape[1]
    y = _grouped(_Spread.apply(x, order, place, top), parts.first, ends, parts.first_low)
    y = _biased(y, parts.first_bias, ids)
    y = _grouped(_inner(experts, y), parts.down, ends, parts.down_low)
    y = _biased(y, parts.down_bias, ids) * _Spread.apply(weights.reshape(-1, 1), order, place, 1)
    out: Tensor = _Collect.apply(y, order, place, top)
    return out.to(x.dtype)


def _spread(x: Tensor, order: Tensor, top: int) -> Tensor:
    """[P, n]: rows x [P / top, n] in the order of the experts, each as often as it is needed."""
    return x.index_select(0, order // top)


def _collect(y: Tensor, place: Tensor, top: int) -> Tensor:
    """[P / top, n]: what the pairs y [P, n] of each row are together."""
    return y.index_select(0, place).view(len(place) // top, top, y.shape[1]).sum(1)


class _Spread(torch.autograd.Function):
    """`_spread`, whose gradient is `_collect`. What torch would do for any index, add row by row in
    an order that must be sorted first to be fixed, is known here.
    """

    @staticmethod
    def forward(ctx, x, order, place, top):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(place)
        ctx.top = top
        return _spread(x, order, top)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (place,) = ctx.saved_tensors
        return _collect(grad, place, ctx.top), None, None, None


class _Collect(torch.autograd.Function):
    """`_collect`, whose gradient is `_spread`."""

    @staticmethod
    def forward(ctx, y, order, place, top):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(order)
        ctx.top = top
        return _collect(y, place, top)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (order,) = ctx.saved_tensors
        return _spread(grad, order, ctx.top), None, None, None


def _grouped(x: Tensor, weight: Tensor, ends: Tensor, low: LowRank | None) -> Tensor:
    """[P, N]: rows x [P, K] in the order of their experts, times the weights [E, N, K] of each; the
    rows of expert e end at `ends[e]`.
    """
    from transformers.integrations.moe import _grouped_mm

    y: Tensor = _grouped_mm(x, weight.transpose(1, 2), ends)
    if low is None:
        return y
    low = low.like(y.dtype)
    narrow = _grouped_mm(x, low.down.transpose(1, 2), ends)
    return y + _grouped_mm(narrow, low.up.transpose(1, 2), ends) * low.scale


def _biased(y: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    return y if bias is None else y + bias[ids]


# ---- few tokens ----


def by_kernels(
    experts: Any,
    parts: ExpertWeights,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    size: int = 0,
) -> Tensor:
    """[k, B, H] of what each token's experts say, times their weights. `size`: of the tiles; 0: as
    it is fastest.
    """
    from reinforge.models.kernels import experts as kernels

    top = chosen.shape[1]
    order, begin = kernels.by_expert(chosen, len(parts.down))
    plain = is_plain(experts)
    inner = kernels.product(
        x,
        parts.first,
        order,
        begin,
        top,
        shared=True,
        gated=plain,
        bias=parts.first_bias,
        low=parts.first_low,
        size=size,
    )
    return kernels.product(
        inner if plain else _inner(experts, inner),
        parts.down,
        order,
        begin,
        top,
        weights=weights.to(x.dtype),
        bias=parts.down_bias,
        low=parts.down_low,
        size=size,
    )


# ---- exact ----


class _Exact(torch.autograd.Function):
    """The forward in tiles of one size; the backward is that of the library's products."""

    @staticmethod
    def forward(ctx, experts, parts, x, chosen, weights, *tensors):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import experts as kernels

        ctx.experts = experts
        ctx.parts = parts
        ctx.save_for_backward(x, chosen, weights, *tensors)
        with torch._C.DisableTorchFunction():
            mine = parts.given(tensors)
            return added(by_kernels(experts, mine, x, chosen, weights, kernels.FIXED))

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, chosen, weights, *tensors = ctx.saved_tensors
        wanted = (ctx.needs_input_grad[2], *ctx.needs_input_grad[4:])
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            near: list[Any] = [
                None if one is None else one.detach().requires_grad_(wants)
                for one, wants in zip((x, weights, *tensors), wanted, strict=True)
            ]
            mine = ctx.parts.given(near[2:])
            y = _by_groups(ctx.experts, mine, near[0], chosen, near[1])
            asked = [one for one, wants in zip(near, wanted, strict=True) if wants]
            found = iter(torch.autograd.grad(y, asked, g))
        grads = [next(found) if wants else None for wants in wanted]
        return None, None, grads[0], None, *grads[1:]


def _exactly(
    experts: Any, parts: ExpertWeights, x: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    if x.is_cuda:
        out: Tensor = _Exact.apply(experts, parts, x, chosen, weights, *parts.tensors())
        return out
    top = chosen.shape[1]
    flat = chosen.reshape(-1)
    first, down = parts.first.unbind(0), parts.down.unbind(0)
    said = x.new_zeros(len(flat), x.shape[1])
    for expert in flat.unique().tolist():
        pairs = (flat == expert).nonzero()[:, 0]
        one = x[pairs // top]
        y = _of_one(one, expert, first[expert], parts.first_bias, parts.first_low)
        y = _of_one(_inner(experts, y), expert, down[expert], parts.down_bias, parts.down_low)
        said = said.index_copy(0, pairs, y * weights.reshape(-1)[pairs, None].to(y.dtype))
    total = torch.zeros_like(x, dtype=torch.float32)
    for part in said.view(len(x), top, -1).unbind(1):  # one by one: every row alike
        total = total + part
    return total.to(x.dtype)


def _of_one(
    x: Tensor, expert: int, weight: Tensor, bias: Tensor | None, low: LowRank | None
) -> Tensor:
    y = F.linear(x, weight)
    if low is not None:
        narrow = F.linear(x, low.down[expert].to(x.dtype))
        y = y + F.linear(narrow, low.up[expert].to(x.dtype)) * low.scale
    return y if bias is None else y + bias[expert]
