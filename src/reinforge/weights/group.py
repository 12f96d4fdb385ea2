"""Weights through a process group of the trainer and the workers of a server: NCCL between GPUs,
gloo between CPUs.

Nothing lies in files and nothing passes through host memory of GPUs. A server joins when it is sent
weights for the first time, and again when it was started anew. The receiver is
`engines/served/vllm_plugin.py`, behind vLLM's own API for weight transfers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 512 << 20  # bytes that travel at once
WAIT = timedelta(minutes=5)  # for workers to join, and for a bucket to arrive


class GroupLink:
    """The connection to the workers of one server. `WeightTransfer` makes it, and a new one for a
    server that was started again; this process is rank 0 of it.
    """

    def __init__(self, workers: int, device: str, *, remote: bool = False):
        self.size = workers + 1
        self.device = device
        self.host = socket.gethostbyname(socket.gethostname()) if remote else "127.0.0.1"
        self.store = dist.TCPStore(
            self.host, 0, self.size, is_master=True, wait_for_workers=False, timeout=WAIT
        )
        self.group: Any = None
        self.sent = 0  # bytes

    def message(self) -> dict[str, Any]:
        """What a worker needs to join, beside its own rank."""
        return {
            "address": self.host,
            "port": self.store.port,
            "size": self.size,
            "device": self.device,
        }

    def join(self) -> None:
        """Returns when all workers are there."""
        self.group = make_group(self.store, 0, self.size, self.device)

    def send(self, pairs: Iterable[tuple[str, Tensor]], buckets: list[list[Any]]) -> None:
        tensors = dict(pairs)
        for places, total in buckets:
            flat = torch.empty(total, dtype=torch.uint8, device=self.device)
            for name, _, _, start, size in places:
                raw = tensors[name].contiguous().view(-1).view(torch.uint8)
                flat[start : start + size].copy_(raw)
            broadcast(self.group, flat)
            self.sent += total * (self.size - 1)


class GroupChannel:
    """One set of weights that servers are sent through `GroupLink`s. `WeightTransfer` makes one for
    every update.
    """

    kind = "group"

    def __init__(self) -> None:
        self.pairs: list[tuple[str, Tensor]] = []
        self.buckets: list[list[Any]] = []
        self._version = 0

    def publish(self, pairs: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.pairs = [(name, tensor.detach()) for name, tensor in pairs]
        self.buckets = plan_buckets(self.pairs)
        self._version = version

    def message(self) -> dict[str, Any]:
        return {"kind": "group", "buckets": self.buckets, "version": self._version}

    def close(self) -> None:
        self.pairs = []


def plan_buckets(pairs: list[tuple[str, Tensor]], most: int = BUCKET) -> list[list[Any]]:
    """[[[name, dtype, shape, start, bytes], ...], total bytes] for each bucket."""
    found: list[list[Any]] = []
    places: list[list[Any]] = []
    end = 0
    for name, tensor in pairs:
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append([name, dtype, list(tensor.shape), end, size])
        end += -(-size // 16) * 16
        if end >= most:
            found.append([places, end])
            places = []
            end = 0
    return [*found, [places, end]] if places else found


def make_group(store: dist.Store, rank: int, size: int, device: str) -> Any:
    """A process group beside all others of this process."""
    prefix = dist.PrefixStore("reinforge", store)
    if device == "cuda":
        return dist.ProcessGroupNCCL(prefix, rank, size, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(prefix, rank, size, WAIT)


def broadcast(group: Any, flat: Tensor) -> None:
    """From rank 0 to all."""
    how = dist.BroadcastOptions()
    how.rootRank = 0
    how.rootTensor = 0
    group.broadcast([flat], how).wait()
