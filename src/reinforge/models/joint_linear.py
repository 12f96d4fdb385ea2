"""Linear layers that read the same input as one product, with a gradient: one product for that of
the input and one for those of the weights, where the layers by themselves have one each, and
additions of the input's.

Legend: K inputs, N outputs of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforge.models import fp8


@dataclass(slots=True)
class JointWeights:
    """What layers multiply with; `fused_linear.FusedLinear` makes it for a product.

    `whole` is the joint weight and bias, where they lie so in memory. Elsewhere both are put
    together for a product and not kept: they are put together again for its gradient. `in_fp8`: the
    product and the gradient of its input are of numbers in FP8 (`train.precision`).
    """

    weights: list[Tensor]
    biases: list[Tensor]  # of all layers or of none
    sizes: list[int]  # outputs of each
    whole: tuple[Tensor, Tensor | None] | None = None
    in_fp8: bool = False


class _JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, joint, x, *parameters):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*what_is_kept(ctx, joint, x))
        return multiply(joint, x)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return gradients(ctx, dy, *ctx.saved_tensors)


def joint_linear(joint: JointWeights, x: Tensor) -> Tensor:
    """[..., N] of x [..., K]: the outputs side by side."""
    out: Tensor = _JointLinear.apply(joint, x, *joint.weights, *joint.biases)
    return out


# ---- the parts of a function whose inputs are `JointWeights`, x, the weights and the biases ----


def multiply(joint: JointWeights, x: Tensor) -> Tensor:
    if joint.in_fp8:
        weights = joint.weights if joint.whole is None else [joint.whole[0]]
        y = fp8.joint_product(x.flatten(0, -2), weights, joint.biases)
        return y.view(*x.shape[:-1], y.shape[1])
    if joint.whole is not None:
        return F.linear(x, *joint.whole)
    return F.linear(x, torch.cat(joint.weights), torch.cat(joint.biases) if joint.biases else None)


def what_is_kept(ctx: Any, joint: JointWeights, x: Tensor) -> tuple[Tensor | None, ...]:
    """What `gradients` takes: x, where weights are learned, and the weights."""
    ctx.sizes = joint.sizes
    ctx.whole = joint.whole
    ctx.in_fp8 = joint.in_fp8
    learned = ctx.needs_input_grad[2 : 2 + len(joint.sizes)]
    return x if any(learned) else None, *joint.weights


def gradients(ctx: Any, dy: Tensor, x: Tensor | None, *weights: Tensor) -> tuple[Any, ...]:
    """Of all inputs. Those of the weights are rows of one tensor, which become theirs without a
    copy.
    """
    sizes = ctx.sizes
    needs = ctx.needs_input_grad
    rows = dy.flatten(0, -2)
    dx = None
    if needs[1] and ctx.in_fp8:
        matrices = weights if ctx.whole is None else [ctx.whole[0]]
        dx = fp8.input_gradient(rows, matrices).view(*dy.shape[:-1], -1)
    elif needs[1]:
        weight = torch.cat(weights) if ctx.whole is None else ctx.whole[0]
        dx = torch.mm(rows, weight).view(*dy.shape[:-1], weight.shape[1])
    of_weights: Sequence[Tensor | None] = [None] * len(sizes)
    of_biases: Sequence[Tensor | None] = [None] * len(sizes)
    if x is not None:
        of_weights = torch.split_with_sizes(torch.mm(rows.t(), x.flatten(0, -2)), sizes)
    biased = needs[2 + len(sizes) :]
    if any(biased):
        of_biases = torch.split_with_sizes(rows.sum(0), sizes)
    return None, dx, *of_weights, *of_biases[: len(biased)]
