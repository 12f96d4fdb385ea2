"""Matrix products in FP8: numbers of four significant bits (e4m3) with a float32 scale per row.

y = (x·wᵀ)·sx·sw (+ bias), where rows of x are tokens and rows of w are outputs, each quantised with
its own largest number as the largest of e4m3; products are summed in float32. Decoding, prefill and
training compute the same function, so that what is sampled and what is trained differ by rounding
only.

Legend: N rows, K numbers of a row, M tokens, O outputs.
"""

from __future__ import annotations

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

    def set(self, x: Tensor) -> Fp8Rows:
        """Becomes x, in its own memory: a captured graph that reads it goes on with the new
        numbers.
        """
        if x.is_cuda:
            from reinforge.models.kernels import fp8 as kernels

            kernels.quantise_rows(x, self.values, self.scale)
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
        )
    y = F.linear(x.values.float(), weight.values.float()) * x.scale[:, None] * weight.scale
    return (y if bias is None else y + bias).to(dtype)


# ---- what layers call: operators of their own, which a compiler takes as they are ----


@torch.library.custom_op(
    "reinforge::fp8_rows", mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)"
)
def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = Fp8Rows.of(x)
    return rows.values, rows.scale


@_quantised.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(x.shape[0], dtype=torch.float32)


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


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    """x is what several layers read, so it is kept as it is rather than in FP8 for each of them."""
    x, weight, _ = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """That of the plain product of the quantised numbers, as if they had not been rounded (straight
    through), in the precision of the module. Scales are multiplied with the gradient, for e4m3 goes
    into bfloat16 as it is.
    """
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    back = of_weight = of_bias = None
    if needs[0]:
        values, scale = _quantised(weight)
        back = (grad * scale).to(grad.dtype) @ values.to(grad.dtype)
    if needs[1]:
        values, scale = _quantised(x)
        scaled = (grad * scale[:, None]).to(grad.dtype)
        of_weight = (scaled.t() @ values.to(grad.dtype)).to(weight.dtype)
    if needs[2]:
        of_bias = grad.sum(0)
    return back, of_weight, of_bias


_trained_product.register_autograd(_gradient, setup_context=_save)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `F.linear`, with the quantised product, for training: x [.., K], weight [O, K]."""
    y = _trained_product(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_by_copy(x: Tensor, weight: Fp8Rows, bias: Tensor | None) -> Tensor:
    """The same with a weight [O, K] that is quantised already, where nothing is trained."""
    y = _quantised_product(x.reshape(-1, x.shape[-1]), weight.values, weight.scale, bias)
    return y.view(*x.shape[:-1], weight.values.shape[0])
