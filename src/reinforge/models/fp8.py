"""Matrix products in FP8: numbers of four significant bits (e4m3) with a float32 scale per row.

y = (x·wᵀ)·sx·sw (+ bias), where rows of x are tokens and rows of w are outputs, each quantised with
its own largest number as the largest of e4m3; products are summed in float32. Decoding, prefill and
training compute the same function, so that what is sampled and what is trained differ by rounding
only.

The gradient of x is such a product too: rows are gradients of tokens and columns of w. That of w is
a product of the numbers as they were, in the precision of the module: a weight sums it up over many
steps.

Legend: N rows, K numbers of a row, M tokens, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforge.core.errors import InputError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
TINY = 1e-12  # the largest number of a row of zeros, so to say
ALIGNED = 16  # sizes that the library's product asks for
# numbers of a row up to which the library adds products up as a tensor core does, with fewer bits:
# there that is quicker (H200: 284 and 364 us for 19,456 x 896 x 9,728) and loses little (an error
# of 0.0017 to 0.0021, where rounding to bfloat16 is 0.0017 and to e4m3 0.037)
QUICK = 4096
CAPABILITY = (8, 9)  # of the first GPUs that multiply in FP8


def check_device(device: torch.device, where: str) -> None:
    """Refuses a GPU that has no FP8."""
    if device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        raise InputError(
            f"{torch.cuda.get_device_name(device)} does not know FP8.",
            where=where,
            fix="Leave it out: Ada, Hopper and later GPUs have it.",
        )
    if find_spec("triton") is None:
        raise InputError(
            "FP8 on a GPU needs triton, which is not installed.",
            where=where,
            fix="pip install triton",
        )


@dataclass(slots=True)
class Fp8Rows:
    """Rows in e4m3 with their scales: values·scale is about what was quantised. Tokens and weights
    are both kept so.
    """

    values: Tensor  # [N, K] e4m3
    scale: Tensor  # [N] float32

    @classmethod
    def empty(cls, rows: int, size: int, device: torch.device) -> Fp8Rows:
        return cls(
            torch.empty(rows, size, dtype=E4M3, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    @classmethod
    def of(cls, x: Tensor) -> Fp8Rows:
        """x [N, K] quantised."""
        if x.is_cuda:
            return cls.empty(x.shape[0], x.shape[1], x.device).set(x)
        scale = x.abs().amax(-1).float().clamp(min=TINY) / LARGEST
        within = (x.float() / scale[:, None]).clamp(-LARGEST, LARGEST)
        return cls(within.to(E4M3), scale)

    @classmethod
    def of_rows(cls, weights: Sequence[Tensor]) -> Fp8Rows:
        """Weights [O, K] that read the same input, quantised, one below the other."""
        if len(weights) == 1:
            return cls.of(weights[0])
        rows = cls.empty(sum(map(len, weights)), weights[0].shape[1], weights[0].device)
        first = 0
        for weight in weights:
            rows.part(first, first + len(weight)).set(weight)
            first += len(weight)
        return rows

    @classmethod
    def of_columns(cls, weights: Sequence[Tensor]) -> Fp8Rows:
        """The columns of such weights as rows [K, all O]."""
        first = weights[0]
        if not first.is_cuda:
            return cls.of(torch.cat(list(weights)).t())
        from reinforge.models.kernels import fp8 as kernels

        rows = cls.empty(first.shape[1], sum(map(len, weights)), first.device)
        kernels.quantise_columns(weights, rows.values, rows.scale)
        return rows

    def set(self, x: Tensor) -> Fp8Rows:
        """Becomes x, in its own memory: a captured graph that reads it goes on with the new
        numbers.
        """
        if x.is_cuda:
            from reinforge.models.kernels import fp8 as kernels

            rows = x if x.stride(1) == 1 else x.contiguous()
            kernels.quantise_rows(rows, self.values, self.scale)
            return self
        found = Fp8Rows.of(x)
        self.values.copy_(found.values)
        self.scale.copy_(found.scale)
        return self

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K]: the numbers that are computed with."""
        return (self.values.float() * self.scale[:, None]).to(dtype)

    def part(self, first: int, last: int) -> Fp8Rows:
        """Some of the rows, in the same memory."""
        return Fp8Rows(self.values[first:last], self.scale[first:last])


def product(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[M, O] in `dtype`: tokens x [M, K] times weight [O, K] transposed, plus bias [O]."""
    aligned = all(size % ALIGNED == 0 for size in weight.values.shape)
    if x.values.is_cuda and aligned and dtype == torch.bfloat16:
        return torch._scaled_mm(
            x.values,
            weight.values.t(),
            scale_a=x.scale[:, None],
            scale_b=weight.scale[None, :],
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=weight.values.shape[1] <= QUICK,
        )
    y = F.linear(x.values.float(), weight.values.float()) * x.scale[:, None] * weight.scale
    return (y if bias is None else y + bias).to(dtype)


# ---- what layers call: operators of their own, which a compiler takes as they are ----


@torch.library.custom_op(
    "reinforge::fp8_product",
    mutates_args=(),
    schema="(Tensor x, Tensor values, Tensor scale, Tensor? bias) -> Tensor",
)
def _quantised_product(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return product(Fp8Rows.of(x), Fp8Rows(values, scale), bias, x.dtype)


@_quantised_product.register_fake
def _(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], values.shape[0])


@torch.library.custom_op(
    "reinforge::fp8_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)
def _trained_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product(Fp8Rows.of(x), Fp8Rows.of(weight), bias, x.dtype)


@_trained_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op(
    "reinforge::fp8_input_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor[] weights) -> Tensor",
)
def _input_gradient(grad: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return input_gradient(grad, weights)


@_input_gradient.register_fake
def _(grad: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return grad.new_empty(grad.shape[0], weights[0].shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """As if the numbers of the forward had not been rounded (straight through)."""
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    back = _input_gradient(grad, [weight]) if needs[0] else None
    of_weight = grad.t() @ x if needs[1] else None
    of_bias = grad.sum(0) if needs[2] else None
    return back, of_weight, of_bias


_trained_product.register_autograd(_gradient, setup_context=_save)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `F.linear`, with the quantised product, for training: x [.., K], weight [O, K]."""
    y = _trained_product(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def joint_product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """[M, all O] of x [M, K]: the outputs of layers that read the same input side by side, without
    a gradient. `biases`: of all of them or of none.
    """
    bias = None
    if biases:
        bias = biases[0] if len(biases) == 1 else torch.cat(list(biases))
    return product(Fp8Rows.of(x), Fp8Rows.of_rows(weights), bias, x.dtype)


def input_gradient(grad: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """[M, K] of the input of `joint_product`, of that of its outputs [M, all O]."""
    return product(Fp8Rows.of(grad), Fp8Rows.of_columns(weights), None, grad.dtype)


def linear_by_copy(x: Tensor, weight: Fp8Rows, bias: Tensor | None) -> Tensor:
    """The same with a weight [O, K] that is quantised already, where nothing is trained."""
    y = _quantised_product(x.reshape(-1, x.shape[-1]), weight.values, weight.scale, bias)
    return y.view(*x.shape[:-1], weight.values.shape[0])
