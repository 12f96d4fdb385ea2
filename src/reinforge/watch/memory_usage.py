"""How much memory a run has taken. Asks torch only where something else has loaded it already."""

from __future__ import annotations

import resource
import sys

GIB = 2**30


def device_peak() -> float | None:
    """GiB that torch had allocated on the fullest GPU at the worst moment since the last call; None
    where no GPU is in use.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    peaks = []
    for device in range(torch.cuda.device_count()):
        peaks.append(torch.cuda.max_memory_allocated(device) / GIB)
        torch.cuda.reset_peak_memory_stats(device)
    return max(peaks)


def process_peak() -> float:
    """GiB of host memory that this process has held at the worst moment of its life."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / GIB if sys.platform == "darwin" else used * 1024 / GIB
