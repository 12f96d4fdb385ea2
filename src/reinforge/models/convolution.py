"""The short causal convolution of layers that keep state, over segments that lie end to end: by the
kernels of `models.kernels.convolution` on a GPU, by plain torch elsewhere and in exact mode.

`state.PackedStates` and `state.PieceStates` make a `TapRows`, which says what each output sees. Of
the kernels only the inputs are kept for the backward pass.

Legend: N outputs, M rows of the input, S segments, C channels, K taps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from reinforge.core.arrays import ints, to_device
from reinforge.models.attention import HAS_TRITON
from reinforge.models.exact import RowWiseMode
from reinforge.models.trial import on_its_own

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SILU = ("silu", "swish")  # what the kernels have
NEAR = 0.02  # how far values and gradients may be from the truth, relative to their size
LOG = logging.getLogger("reinforge")


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution of these takes a kernel. Exact mode adds up tap by tap in torch."""
    return (
        x.is_cuda
        and HAS_TRITON
        and {x.dtype, weight.dtype} <= set(DTYPES)
        and not isinstance(x, FakeTensor)
        and not RowWiseMode.active()
    )


def activated(x: Tensor, activation: str | None) -> Tensor:
    """By the name that transformers has for it."""
    if activation is None:
        return x
    from transformers.activations import ACT2FN

    out: Tensor = ACT2FN[activation](x)
    return out


def tap_by_tap(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of inputs [N, K, C], one tap after the other in float32: a library may add up in another
    order for another number of tokens.
    """
    total = torch.zeros_like(inputs[:, 0], dtype=torch.float32)
    for x, w in zip(inputs.unbind(1), weight.unbind(1), strict=True):
        total = total + x.float() * w.float()
    return (total if bias is None else total + bias.float()).to(inputs.dtype)


@dataclass(slots=True)
class TapRows:
    """Which rows of the input the outputs of a convolution see. Tables are copied to the device
    when they are first asked for.
    """

    taps: int
    rows: int  # of the input; a row of this number stands for nothing
    line: Tensor  # [N + S (K - 1)] on the host: segments, each behind the inputs before it
    outputs: Tensor  # [N] on the host: where in the line what an output sees begins
    device: torch.device
    _plain: tuple[Tensor, Tensor, bool] | None = None
    _seen: Tensor | None = None
    _seen_by: _SeenBy | None = None

    @classmethod
    def of(
        cls, lengths: list[int], before: list[list[int]], rows: int, device: torch.device
    ) -> TapRows:
        """`before`: rows of the K - 1 inputs before each segment."""
        between = len(before[0])
        line: list[Tensor] = []
        outputs: list[Tensor] = []
        row = 0
        at = 0
        for n, inputs in zip(lengths, before, strict=True):
            line += [ints(inputs), torch.arange(row, row + n)]
            outputs.append(torch.arange(at, at + n))
            row += n
            at += n + between
        return cls(between + 1, rows, torch.cat(line), torch.cat(outputs), device)

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """x [M, C], weight [C, K] -> [N, C]."""
        if not (has_kernel(x, weight) and proven(self.taps, x.dtype, x.device)):
            return activated(self.by_torch(x, weight, bias), activation)
        silu = activation in SILU
        out: Tensor = _Convolution.apply(self, silu, x, weight, bias)
        return out if silu else activated(out, activation)

    def by_torch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._plain is None:
            line, outputs = (to_device(i, self.device) for i in (self.line, self.outputs))
            self._plain = line, outputs, bool((self.line == self.rows).any())
        line, outputs, padded = self._plain
        if padded:
            x = torch.cat([x, x.new_zeros(1, x.shape[1])])
        if RowWiseMode.active():
            taps = torch.arange(self.taps, device=x.device)
            index = line.index_select(0, (outputs[:, None] + taps).flatten())
            inputs = x.index_select(0, index).view(len(outputs), -1, x.shape[1])
            return tap_by_tap(inputs, weight, bias)
        wide = x.index_select(0, line).t()[None].to(weight.dtype)
        out = F.conv1d(wide, weight[:, None], bias, groups=weight.shape[0])[0].t()
        return out.index_select(0, outputs).to(x.dtype)

    def _host_seen(self) -> Tensor:
        found = self.line[self.outputs[:, None] + torch.arange(self.taps)]
        return torch.where(found < self.rows, found, -1)

    def seen(self) -> Tensor:
        """[N, K] int32: the row that each tap of each output sees, -1: nothing."""
        if self._seen is None:
            self._seen = to_device(self._host_seen().int(), self.device)
        return self._seen

    def seen_by(self) -> _SeenBy:
        if self._seen_by is None:
            self._seen_by = _SeenBy.of(self._host_seen(), self.rows, self.device)
        return self._seen_by


@dataclass(frozen=True, slots=True)
class _SeenBy:
    """Which outputs see each row: what the gradient of an input is added up of. The last rows of a
    prompt are seen by the first tokens of every answer that shares it. `TapRows` makes it.
    """

    outputs: Tensor  # [M, K] int32: of each row and tap, -1: none, or the row is shared
    shared: Tensor  # [n] int32: rows that several outputs see by the same tap
    begins: Tensor  # [n + 1] int32: where their pairs begin
    pairs: Tensor  # int32: output * K + tap

    @classmethod
    def of(cls, seen: Tensor, rows: int, device: torch.device) -> _SeenBy:
        taps = seen.shape[1]
        pairs = (seen.flatten() >= 0).nonzero()[:, 0]
        row = seen.flatten()[pairs]
        place = row * taps + pairs % taps
        counts = torch.bincount(place, minlength=rows * taps).view(rows, taps)
        several = (counts > 1).any(1)
        outputs = torch.full((rows * taps,), -1)
        outputs[place] = pairs // taps
        outputs = outputs.view(rows, taps).masked_fill(several[:, None], -1)
        chosen = several[row]
        by_row = torch.argsort(row[chosen], stable=True)
        sizes = counts[several].sum(1)
        parts = (
            outputs,
            several.nonzero()[:, 0],
            F.pad(sizes.cumsum(0), (1, 0)),
            pairs[chosen][by_row],
        )
        return cls(*(to_device(part.int(), device) for part in parts))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, silu, x, weight, bias):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import convolution as kernels

        x, weight = _channels_side_by_side(x), weight.contiguous()
        ctx.table = table
        ctx.silu = silu
        ctx.save_for_backward(x, weight, bias)
        return kernels.forward(x, weight, bias, table.seen(), silu)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import convolution as kernels

        x, weight, bias = ctx.saved_tensors
        table = ctx.table
        _, _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        before, sums = kernels.output_grads(
            x,
            weight,
            bias,
            table.seen(),
            _channels_side_by_side(grad),
            ctx.silu,
            wants_weight or wants_bias,
        )
        x_grad = None
        if wants_x:
            by = table.seen_by()
            x_grad = kernels.input_grads(
                before, weight, by.outputs, (by.shared, by.begins, by.pairs)
            )
        weight_grad = bias_grad = None
        if sums is not None:
            weight_grad = sums[: table.taps].t().to(weight.dtype) if wants_weight else None
            bias_grad = sums[table.taps].to(bias.dtype) if wants_bias else None
        return None, None, x_grad, weight_grad, bias_grad


@cache
def proven(taps: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels have the values and gradients of torch on this device: a compiler may be
    wrong about them.
    """
    try:
        error = distance(taps, dtype, device)
    except Exception as problem:
        LOG.warning(f"short convolutions: no kernel ({problem!r}), plain torch instead")
        return False
    if not error < NEAR:  # NaN too
        LOG.warning(
            f"short convolutions: our kernels are {error:.2g} away from the truth on {device},"
            " plain torch instead"
        )
        return False
    return True


@torch.inference_mode(False)
def distance(taps: int, dtype: torch.dtype, device: torch.device) -> float:
    """The largest difference, relative to its size, of values and gradients of a small pack with a
    prompt that two answers continue.
    """
    lengths = [70, 9, 20]
    rows, channels = sum(lengths), 144
    prompt_end = list(range(lengths[0] - taps + 1, lengths[0]))
    before = [[rows] * (taps - 1), prompt_end, prompt_end]
    table = TapRows.of(lengths, before, rows, device)
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(*size, generator=draw) for size in ((rows, channels), (channels, taps))]
    toward = torch.randn(rows, channels, generator=draw).to(device)
    with on_its_own(device):
        parts = [part.to(device, dtype).requires_grad_() for part in made]
        out = _Convolution.apply(table, True, *parts, None)
        found = [out, *torch.autograd.grad((out * toward).sum(), parts)]
        wide = [part.detach().double().requires_grad_() for part in parts]
        true = F.silu(table.by_torch(wide[0], wide[1], None))
        want = [true, *torch.autograd.grad((true * toward).sum(), wide)]
        errors = [(a.double() - b).norm() / b.norm() for a, b in zip(found, want, strict=True)]
        worst = torch.stack(errors).max()  # NaN if one is
    return float(worst.detach())


def _channels_side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
