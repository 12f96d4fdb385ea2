# mypy: disable-error-code="no-untyped-def"
"""What several kernels use."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

MULTIPROCESSORS = 132  # of an H200: what sizes of tiles were measured for
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HOPPER = (
    not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
)
# a kernel may begin before the one before it has ended, up to where it reads what that one wrote
EARLY = _HOPPER
HAS_TMA = _HOPPER or INTERPRETED  # one instruction fetches a tile


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own function takes thirty times as long, which counts
    where it is called for every launch.
    """
    return -(-a // b)


def next_power(n: int) -> int:
    """The smallest power of 2 that is not below n, for the same reason not Triton's."""
    return 1 << max(0, n - 1).bit_length()


def early() -> dict[str, bool]:
    """Arguments of a launch: whether the kernel may begin early."""
    return {"EARLY": True, "launch_pdl": True} if EARLY else {"EARLY": False}


@triton.jit
def capped(x, softcap, CAP: tl.constexpr):
    """softcap·tanh(x / softcap), where there is a cap."""
    if CAP:
        x = softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0)
    return x


@triton.jit
def rounded_silu(x, DTYPE: tl.constexpr):
    """silu of float32 numbers, rounded before and after."""
    x = x.to(DTYPE).to(tl.float32)
    return (x / (1.0 + tl.exp(-x))).to(DTYPE)


@triton.jit
def lines(X, at, d, there, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """Rows of keys or values, where they are there."""
    where = X + at[:, None] + d[None, :]
    if MASKED:
        return tl.load(where, mask=there[:, None] & (d < D)[None, :], other=0.0)
    elif D < DP:
        return tl.load(where, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def page_of(TABLE, t, s, end, BLOCK: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    """The cache blocks of positions t, of which s is the first: one for all of them, where blocks
    have room for whole tiles of BN.
    """
    if BLOCK % BN == 0:
        return tl.load(TABLE + s // BLOCK).to(tl.int64)
    elif MASKED:
        return tl.load(TABLE + t // BLOCK, mask=t < end, other=0).to(tl.int64)
    else:
        return tl.load(TABLE + t // BLOCK).to(tl.int64)
