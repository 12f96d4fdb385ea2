"""Rotary embedding on a GPU: one kernel for queries and keys, in place of five for each and as many
for the gradient.

transformers gives it the same name in every modelling file; where the formula is the usual one, it
is replaced there, as `models.mixers` does with its functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.models.attention import HAS_TRITON
from reinforge.models.quick_norm import takes_kernel

NAME = "apply_rotary_pos_emb"
_MARK = "reinforge_rope"  # on a function of a modelling file that asks where it runs
Rotary = Callable[..., tuple[Tensor, Tensor]]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The usual formula: x [1, H, N, D], cos and sin [1, N, R], R at most D."""
    size = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, rest = x[..., :size], x[..., size:]
    low, high = first.chunk(2, -1)
    turned = first * cos + torch.cat([-high, low], -1) * sin
    return torch.cat([turned, rest], -1) if size < x.shape[-1] else turned


class _KernelRope(torch.autograd.Function):
    """`rotated` of queries and keys; the angles are all that is kept."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import rotary as kernels

        ctx.save_for_backward(cos, sin)
        return kernels.turn(q, k, cos, sin)

    @staticmethod
    def backward(ctx, dq, dk):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import rotary as kernels

        cos, sin = ctx.saved_tensors
        return *kernels.turn(dq, dk, cos, sin, back=True), None, None


def kernel_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotated` of both, with gradients."""
    found: tuple[Tensor, Tensor] = _KernelRope.apply(q, k, cos[0].contiguous(), sin[0].contiguous())
    return found


def replace_rope(module: nn.Module) -> int:
    """Lets the attention of a module on a GPU use the kernel; returns how many modelling files have
    it now. Those with another formula keep it.
    """
    if not HAS_TRITON:
        return 0
    files = {id(found): found for part in module.modules() if (found := _functions_of(part))}
    for functions in files.values():
        plain = functions[NAME]
        if not hasattr(plain, _MARK):
            functions[NAME] = _asking(plain) if is_usual(plain) else plain
    return sum(hasattr(functions[NAME], _MARK) for functions in files.values())


def _functions_of(part: nn.Module) -> dict[str, Any]:
    """Those of the modelling file, if the module's forward turns its queries; else none."""
    forward = inspect.unwrap(type(part).forward)
    code = getattr(forward, "__code__", None)
    found: dict[str, Any] = getattr(forward, "__globals__", {})
    return found if code is not None and NAME in code.co_names and NAME in found else {}


def _asking(plain: Rotary) -> Rotary:
    @functools.wraps(plain)
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (
            args
            or kwargs
            or q.ndim != 4
            or q.shape[0] != 1
            or cos.shape[:-1] != (1, q.shape[2])
            or cos.shape != sin.shape
            or (k.shape[0], *k.shape[2:]) != (1, *q.shape[2:])
            or not all(takes_kernel(x, y) for x, y in ((q, cos), (k, sin)))
        ):
            return plain(q, k, cos, sin, *args, **kwargs)
        return kernel_rope(q, k, cos, sin)

    setattr(rotary, _MARK, True)
    return rotary


@torch.no_grad()
def is_usual(plain: Rotary) -> bool:
    """Whether it computes `rotated`: tried in bfloat16, where roundings show, on all of a head and
    on a part of it.
    """
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 5, 16, generator=draw).to(torch.bfloat16) for n in (4, 2))
    for size in (16, 8):
        cos, sin = torch.randn(2, 1, 5, size, generator=draw).to(torch.bfloat16)
        try:
            said = plain(q, k, cos, sin)
        except RuntimeError:  # it wants all of a head, and is never given less
            if size == 16:
                return False
            continue
        except (TypeError, ValueError, AttributeError, IndexError):  # it wants something else
            return False
        want = (rotated(q, cos, sin), rotated(k, cos, sin))
        if not all(torch.equal(a, b) for a, b in zip(said, want, strict=True)):
            return False
    return True
