"""Weights on the same GPU: handles of the trainer's own tensors travel, the tensors stay.

One copy, device to device, by the engine.

The trainer must not change them before the engine has committed, which is how `update` is called:
it returns afterwards.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class IpcChannel:
    """Weights as handles of the trainer's GPU memory: nothing travels. `WeightTransfer` makes it
    where engine and trainer share a GPU.
    """

    kind = "ipc"

    def __init__(self) -> None:
        self.pairs: list[tuple[str, Tensor]] = []  # merged adapters live only here
        self._version = 0

    def publish(self, pairs: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.pairs = [(name, tensor.detach()) for name, tensor in pairs]
        self._version = version
        torch.cuda.synchronize()

    def message(self) -> dict[str, Any]:
        """Fresh handles at every call: each has one reader."""
        assert self.pairs, "nothing was published"
        return {
            "kind": "ipc",
            "tensors": [[name, *_handle(tensor)] for name, tensor in self.pairs],
            "version": self._version,
        }

    def close(self) -> None:
        self.pairs = []


def _handle(tensor: Tensor) -> list[Any]:
    """What `torch.multiprocessing.reductions.rebuild_cuda_tensor` needs, as JSON."""
    from torch.multiprocessing.reductions import reduce_tensor

    def text(raw: bytes) -> str:
        return base64.b64encode(raw).decode()

    (
        _,
        shape,
        stride,
        offset,
        _,
        dtype,
        _,
        handle,
        size,
        at,
        _,
        counter,
        counter_at,
        event,
        sync,
    ) = reduce_tensor(tensor)[1]
    return [
        str(dtype).removeprefix("torch."),
        list(shape),
        list(stride),
        offset,
        text(handle),
        size,
        at,
        text(counter),
        counter_at,
        text(event),
        sync,
    ]


def usable() -> bool:
    """Whether this process can hand out memory of its GPU: expandable segments cannot be shared."""
    if not torch.cuda.is_available():
        return False
    try:
        _handle(torch.zeros(8, device="cuda"))
    except RuntimeError:
        return False
    return True
