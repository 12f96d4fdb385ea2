"""Tensors from Python lists.

`torch.tensor` looks at every element by itself; numpy is about eight times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def ints(values: Sequence[Any], dtype: type = np.int64) -> Tensor:
    """A tensor of a list of integers, or of a list of such lists of equal length."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy from the host that does not wait for what the device still has to do."""
    if torch.device(device).type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def floats(values: Sequence[float]) -> Tensor:
    """[n] float32."""
    return torch.from_numpy(np.array(values, dtype=np.float32))
