# mypy: disable-error-code="no-untyped-def"
"""What several kernels use."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

MULTIPROCESSORS = 132  # of an H200: what sizes of tiles were measured for
# a kernel may begin before the one before it has ended, up to where it reads what that one wrote
EARLY = (
    os.environ.get("TRITON_INTERPRET") != "1"
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= (9, 0)  # since Hopper
)


def early() -> dict[str, bool]:
    """Arguments of a launch: whether the kernel may begin early."""
    return {"EARLY": True, "launch_pdl": True} if EARLY else {"EARLY": False}


@triton.jit
def capped(x, softcap, CAP: tl.constexpr):
    """softcap·tanh(x / softcap), where there is a cap."""
    if CAP:
        x = softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0)
    return x
