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
        if _by_kernel(x):
            return cls.empty(x.shape[0], x.shape[1], x.device).set(x)
        scale = x.abs().amax(-1).float().clamp(min=TINY) / LARGEST
        return cls(_rounded(x, scale), scale)

    def set(self, x: Tensor) -> Fp8Rows:
        """Becomes x, in its own memory: a captured graph that reads it goes on with the new
        numbers.
        """
        if _by_kernel(x):
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


def _by_kernel(x: Tensor) -> bool:
    """A compiler makes a kernel of the plain operations."""
    return x.is_cuda and not torch.compiler.is_compiling()


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3)


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


class _TrainedProduct(torch.autograd.Function):
    """Forward: `product` of what is quantised on the way. Backward: that of the plain product of
    the quantised numbers, as if they had not been rounded (straight through), in the precision of
    the module. Scales are multiplied with the gradient, for e4m3 goes into bfloat16 as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = Fp8Rows.of(x)
        of_x = (rows.values, rows.scale) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(weight, *of_x)
        return product(rows, Fp8Rows.of(weight), bias, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, values, scale = ctx.saved_tensors
        needs = ctx.needs_input_grad
        back = of_weight = of_bias = None
        if needs[0]:
            rows = Fp8Rows.of(weight)
            back = (grad * rows.scale).to(grad.dtype) @ rows.values.to(grad.dtype)
        if needs[1]:
            scaled = (grad * scale[:, None]).to(grad.dtype)
            of_weight = (scaled.t() @ values.to(grad.dtype)).to(weight.dtype)
        if needs[2]:
            of_bias = grad.sum(0)
        return back, of_weight, of_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `F.linear`, with the quantised product, for training: x [.., K], weight [O, K]."""
    y: Tensor = _TrainedProduct.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], len(weight))
