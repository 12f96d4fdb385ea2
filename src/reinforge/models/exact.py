"""`model.exact`: every number of a token's forward has the same bits whichever other tokens run
beside it.

Then decoding, prefill and training give bit-identical log-probs, and there is no mismatch to
correct. What breaks this in an ordinary forward is the order of additions (and which of two
implementations of `exp` an element meets), because both depend on how many rows there are.
`RowWiseMode` is a context in which the architecture's own code runs: calls that add numbers up or
that are not elementwise-safe are replaced by ones whose arithmetic for a row is fixed, and calls
that cannot be made so are refused.

- matrix products: on a CPU tiles of `TILE` rows, the last one filled up, so that BLAS always sees
  one shape; on a GPU `kernels.exact_product`: a Triton kernel in which every output is one chain
- sums over the last dimension: never one lone row on a CPU (torch would split it among threads); a
  program per row on a GPU
- exp, silu, gelu, ... on a CPU: `models.exact_functions`, which builds them from additions and
  products; on a GPU every element runs the same instructions already, and silu is the one of our
  kernels, because decoding has it inside of another kernel
- RMS norms of the Llama kind on a GPU: `models.exact_norm`
- attention: `models.exact_attention`

Backward passes are ordinary: nothing samples from a gradient. `models.exact_proof.prove` checks the
whole on the model at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from reinforge.core.errors import InputError
from reinforge.models import exact_functions

TILE = 32  # rows of a matrix product on a CPU; a tile begins on a cache line in either precision

KERNELS = ("silu",)  # functions that are our own on a GPU (`kernels.layer`)

# matrix shapes whose rows were seen to be independent of their place in a tile
_places: dict[tuple[Any, ...], bool] = {}


# ---- matrix products ----


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ + b with W [N, K] (any strides); the backward is torch's own products."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1])
        if x.is_cuda:
            from reinforge.models.kernels.exact_product import matmul

            y = matmul(flat, weight, bias)
        else:
            y = _in_tiles(flat, weight.t())
            if bias is not None:
                y += bias
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows = g.reshape(-1, g.shape[-1])
        grad_x = (rows @ weight).view(x.shape) if needs[0] else None
        grad_w = rows.t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None
        return grad_x, grad_w, rows.sum(0) if needs[2] else None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` whose rows do not know of each other."""
    out: Tensor = _Linear.apply(input, weight, bias)
    return out


def _in_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K] times weight [K, N], a tile of rows at a time: BLAS may choose its loops by the
    shape, and there is one shape.
    """
    x = x.contiguous()
    if x.data_ptr() % 64:
        x = x.clone()
    tile = TILE if _place_is_free(weight) else 1
    rows = x.shape[0]
    out = x.new_empty(x.shape[0], weight.shape[1])
    whole = rows - rows % tile
    for a in range(0, whole, tile):
        torch.mm(x[a : a + tile], weight, out=out[a : a + tile])
    if whole < rows:
        last = x.new_zeros(tile, x.shape[1])
        last[: rows - whole] = x[whole:]
        out[whole:] = torch.mm(last, weight)[: rows - whole]
    return out


def _place_is_free(weight: Tensor) -> bool:
    """Whether this BLAS gives a row of a tile the same bits in every place; asked once per shape.

    If not, rows go one by one.
    """
    key = (*weight.shape, weight.stride(), weight.dtype, torch.get_num_threads())
    if key not in _places:
        row = torch.randn(weight.shape[0], generator=torch.Generator().manual_seed(0)).to(
            weight.dtype
        )
        out = torch.mm(row.expand(TILE, -1).contiguous(), weight.detach())
        _places[key] = bool((out == out[:1]).all())
    return _places[key]


# ---- sums over the last dimension ----


class _RowSum(torch.autograd.Function):
    """[..., E] -> [..., 1] in float32."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.shape = x.shape
        ctx.dtype = x.dtype
        rows = x.reshape(-1, x.shape[-1])
        if x.is_cuda:
            from reinforge.models.kernels import exact as kernels

            total = kernels.row_sum(rows)
        else:
            total = _company(lambda r: r.sum(-1), rows.float())
        return total.view(*x.shape[:-1], 1)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g.expand(ctx.shape).to(ctx.dtype)


def _company(f: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """f of contiguous rows, never of a single one."""
    rows = rows.contiguous()
    return f(rows) if rows.shape[0] != 1 else f(rows.expand(2, -1).contiguous())[:1]


def _is_last(x: Tensor, dim: Any) -> bool:
    dims = dim if isinstance(dim, (list, tuple, torch.Size)) else [dim]
    return len(dims) == 1 and dims[0] in (-1, x.ndim - 1)


def row_sum(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not _is_last(input, dim):
        _refuse("a sum over other dimensions than the last")
    total: Tensor = _RowSum.apply(input)
    return (total if keepdim else total[..., 0]).to(dtype or input.dtype)


def row_mean(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not _is_last(input, dim):
        _refuse("a mean over other dimensions than the last")
    mean: Tensor = _RowSum.apply(input) / input.shape[-1]
    return (mean if keepdim else mean[..., 0]).to(dtype or input.dtype)


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(normalized_shape) != 1:
        _refuse("a layer norm over several dimensions")
    x = input.float()
    x = x - row_mean(x, -1, True)
    x = x * torch.rsqrt(row_mean(x * x, -1, True) + eps)
    x = x if weight is None else x * weight.float()
    return (x if bias is None else x + bias.float()).to(input.dtype)


def rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if len(normalized_shape) != 1:
        _refuse("an RMS norm over several dimensions")
    x = input.float()
    x = x * torch.rsqrt(
        row_mean(x * x, -1, True) + (torch.finfo(input.dtype).eps if eps is None else eps)
    )
    return (x if weight is None else x * weight.float()).to(input.dtype)


# ---- elementwise functions ----


class _Elementwise(torch.autograd.Function):
    """The forward is `exact_functions`, or `KERNELS` on a GPU; the backward differentiates torch's
    own function f.
    """

    @staticmethod
    def forward(ctx, x, name, f, args, kwargs):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.f = f
        if x.is_cuda:
            from reinforge.models.kernels import layer as kernels

            return getattr(kernels, name)(x)
        return exact_functions.evaluate(name, x, *args, **kwargs)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.f(x)
        return torch.autograd.grad(y, x, g)[0], None, None, None, None


def elementwise(
    name: str, func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """func(x, ...), where func is torch's function of this name."""
    if x.is_cuda and name not in KERNELS:
        return func(x, *args, **kwargs)
    kwargs.pop("inplace", None)
    out: Tensor = _Elementwise.apply(
        x, name, lambda part: func(part, *args, **kwargs), args, kwargs
    )
    return out


def power(func: Callable[..., Tensor], x: Any, exponent: Any) -> Tensor:
    """Squares and cubes are products: every implementation rounds them alike."""
    if isinstance(x, Tensor) and isinstance(exponent, Tensor):
        return _refuse("a power whose exponent is a tensor")
    if isinstance(exponent, Tensor):
        if exponent.is_cuda:
            return func(x, exponent)
        out: Tensor = _Elementwise.apply(
            exponent, "rpow", lambda part: func(x, part), (float(x),), {}
        )
        return out
    if exponent in (1, 2, 3):
        return func(x, exponent)
    return elementwise("pow", func, x, float(exponent))


def _product(func: Callable[..., Tensor], a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    """a @ b: an outer product adds nothing up; a product with one matrix is a linear layer; others
    mix rows.
    """
    if a.ndim >= 2 and b.ndim >= 2 and a.shape[-1] == 1:
        return a * b
    if b.ndim == 2:
        return linear(a, b.t())
    return _refuse("a product of two batches of matrices")


# ---- the context ----


def _refuse(what: str) -> Any:
    raise InputError(
        f"the forward of this architecture contains {what}, whose bits depend on the rest of the"
        " batch.",
        where="model.exact",
        fix=(
            "Set model.exact=false, or use an architecture of linear layers, norms and softmax"
            " attention."
        ),
    )


_REPLACED: dict[str, Callable[..., Tensor]] = {
    "linear": lambda func, *a, **k: linear(*a, **k),
    "addmm": lambda func, bias, x, weight: linear(x, weight.t(), bias),
    "mean": lambda func, *a, **k: row_mean(*a, **k),
    "sum": lambda func, *a, **k: row_sum(*a, **k),
    "layer_norm": lambda func, *a, **k: layer_norm(*a, **k),
    "rms_norm": lambda func, *a, **k: rms_norm(*a, **k),
    "pow": power,
    "__pow__": power,
    "__rpow__": lambda func, exponent, x: power(torch.pow, x, exponent),
    **dict.fromkeys(("matmul", "__matmul__", "mm"), _product),
    **{
        name: partial(elementwise, name)
        for name in exact_functions.FUNCTIONS
        if name not in ("pow", "rpow")
    },
    "log_sigmoid": partial(elementwise, "logsigmoid"),
}
_REFUSED = {
    "bmm",
    "baddbmm",
    "einsum",
    "tensordot",
    "mv",
    "dot",
    "addmv",
    "chain_matmul",
    "conv1d",
    "conv2d",
    "cumsum",
    "cumprod",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "norm",
    "vector_norm",
    "logcumsumexp",
    "group_norm",
    "scaled_dot_product_attention",
    "_grouped_mm",
    "grouped_mm",
    "_scaled_mm",
}
# Elementwise, and so harmless on a GPU; on a CPU nobody has written them as exact functions yet.
_REFUSED_ON_CPU = {
    *("addcmul", "addcdiv", "lerp", "glu", "logaddexp", "float_power", "erfinv", "xlogy"),
    *("tan", "sinh", "cosh", "asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh"),
    *("exp_", "log_", "sigmoid_", "tanh_", "cos_", "sin_", "pow_", "rsqrt_", "erf_"),
}


class RowWiseMode(TorchFunctionMode):
    """Inside, torch functions called by a model's own code compute each row alone."""

    @classmethod
    def active(cls) -> bool:
        """Whether this is inside of one."""
        return any(isinstance(mode, cls) for mode in _get_current_function_mode_stack())

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _REPLACED or name in _REFUSED or name in _REFUSED_ON_CPU:
            first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            if first is not None and first.is_floating_point():
                if name in _REPLACED:
                    return _REPLACED[name](func, *args, **kwargs)
                if name in _REFUSED or not first.is_cuda:
                    return _refuse(f"`{name}`")
        return func(*args, **kwargs)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For gradient checkpointing, which runs layers again from the backward pass, outside of
    `RowWiseMode`.
    """
    return nullcontext(), RowWiseMode()
