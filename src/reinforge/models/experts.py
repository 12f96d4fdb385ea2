"""The products of a block of experts, registered with transformers under a name.

transformers writes a block as a router of its own kind and `experts`, whose forward takes the
tokens, the experts that were chosen for them and their weights; what computes it is a function that
can be registered, for all architectures alike. Ours sorts the pairs of a token and an expert by
their experts, and multiplies what each expert got with its weights:

- in training and for prompts, grouped products of the library, as transformers has them
- where few tokens are decoded on a GPU, kernels that read the weights of the chosen experts once
- in `model.exact`, products in tiles of one size: a token's numbers do not depend on the others

`models.fused_experts` is a whole block, router and all, for decoding.

Legend: B tokens, E experts, k chosen for a token, P = B·k pairs, H hidden size, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.models.attention import HAS_TRITON
from reinforge.models.decoding import is_decoding
from reinforge.models.exact import RowWiseMode

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
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """[B, H] of the tokens [B, H], for the experts [B, k] and weights [B, k] of each."""
    x, chosen, weights = hidden_states, top_k_index, top_k_weights
    if RowWiseMode.active():
        return _exactly(self, x, chosen, weights)
    if few(self, x, chosen):
        return added(by_kernels(self, x, chosen, weights))
    return _by_library(self, x, chosen, weights)


def _by_library(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    out: Tensor = grouped_mm_experts_forward(experts, x, chosen, weights)
    return out


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
class _Weights:
    """As [E, outputs, inputs], however they are stored."""

    first: Tensor  # gate and up, or up alone
    down: Tensor
    first_bias: Tensor | None
    down_bias: Tensor | None

    @classmethod
    def of(cls, experts: Any) -> _Weights:
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
        return cls(first, down, *biases)

    def like(self, experts: Any) -> Any:
        """Experts that compute in the same way, with these weights."""
        name = "gate_up_proj" if experts.has_gate else "up_proj"
        return SimpleNamespace(
            **{name: self.first, f"{name}_bias": self.first_bias},
            down_proj=self.down,
            down_proj_bias=self.down_bias,
            num_experts=experts.num_experts,
            has_gate=experts.has_gate,
            has_bias=experts.has_bias,
            is_transposed=False,
            act_fn=experts.act_fn,
            _apply_gate=experts._apply_gate,
        )


def _inner(experts: Any, y: Tensor) -> Tensor:
    """Between the two products: the gate, or an activation alone."""
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


def by_kernels(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[k, B, H] of what each token's experts say, times their weights."""
    return _by_kernels(experts, _Weights.of(experts), x, chosen, weights)


def _by_kernels(
    experts: Any, parts: _Weights, x: Tensor, chosen: Tensor, weights: Tensor, size: int = 0
) -> Tensor:
    """`size`: of the tiles; 0: as it is fastest."""
    from reinforge.models.kernels import experts as kernels

    top = chosen.shape[1]
    order, begin = kernels.by_expert(chosen, len(parts.down))
    if is_plain(experts):
        inner = kernels.product(
            x, parts.first, order, begin, top, shared=True, gated=True, size=size
        )
    else:
        y = kernels.product(
            x, parts.first, order, begin, top, shared=True, bias=parts.first_bias, size=size
        )
        inner = _inner(experts, y)
    return kernels.product(
        inner,
        parts.down,
        order,
        begin,
        top,
        weights=weights.to(x.dtype),
        bias=parts.down_bias,
        size=size,
    )


# ---- exact ----


class _Exact(torch.autograd.Function):
    """The forward in tiles of one size; the backward is that of the library's products."""

    @staticmethod
    def forward(ctx, experts, x, chosen, weights, *parts):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import experts as kernels

        ctx.experts = experts
        ctx.save_for_backward(x, chosen, weights, *parts)
        with torch._C.DisableTorchFunction():
            return added(_by_kernels(experts, _Weights(*parts), x, chosen, weights, kernels.FIXED))

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, chosen, weights, *parts = ctx.saved_tensors
        wanted = (ctx.needs_input_grad[1], *ctx.needs_input_grad[3:])
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            near: list[Any] = [
                None if one is None else one.detach().requires_grad_(wants)
                for one, wants in zip((x, weights, *parts), wanted, strict=True)
            ]
            like = _Weights(*near[2:]).like(ctx.experts)
            y = _by_library(like, near[0], chosen, near[1])
            asked = [one for one, wants in zip(near, wanted, strict=True) if wants]
            found = iter(torch.autograd.grad(y, asked, g))
        grads = [next(found) if wants else None for wants in wanted]
        return None, grads[0], None, *grads[1:]


def _exactly(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    parts = _Weights.of(experts)
    if x.is_cuda:
        every = parts.first, parts.down, parts.first_bias, parts.down_bias
        out: Tensor = _Exact.apply(experts, x, chosen, weights, *every)
        return out
    top = chosen.shape[1]
    flat = chosen.reshape(-1)
    first, down = parts.first.unbind(0), parts.down.unbind(0)
    said = x.new_zeros(len(flat), x.shape[1])
    for expert in flat.unique().tolist():
        pairs = (flat == expert).nonzero()[:, 0]
        y = F.linear(x[pairs // top], first[expert], _of(parts.first_bias, expert))
        y = F.linear(_inner(experts, y), down[expert], _of(parts.down_bias, expert))
        said = said.index_copy(0, pairs, y * weights.reshape(-1)[pairs, None].to(y.dtype))
    total = torch.zeros_like(x, dtype=torch.float32)
    for part in said.view(len(x), top, -1).unbind(1):  # one by one: every row alike
        total = total + part
    return total.to(x.dtype)


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
