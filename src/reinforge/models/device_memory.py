"""The memory of a GPU: micro-batches and the engine's cache are sized by what is free of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU at one moment. `device_memory` reads them."""

    free: int  # nobody's, or held by torch's allocator and unused
    untaken: int  # nobody's: torch's allocator never needed them
    whole: int


def whole_memory(device: torch.device) -> int:
    """Bytes of the GPU, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_memory(device: torch.device) -> DeviceMemory | None:
    """None: not a GPU, and its memory is not what anything here is sized by."""
    if device.type != "cuda":
        return None
    untaken, whole = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(untaken + unused, untaken, whole)
