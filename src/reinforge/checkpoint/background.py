"""A checkpoint that is written by a thread while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforge.core.backend import State

Place = tuple[Any, ...]  # of a tensor: where its memory is, and how it lies there


class StagingCopies:
    """Copies of a run's tensors in host memory, which a thread can write while the originals
    change. The `Checkpointer` has one.

    What is on a GPU is copied into pinned memory, which stays for the next checkpoint: pinning it
    takes longer than copying.
    """

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}

    def of(self, state: State) -> State:
        """Two names of one tensor are two names of one copy."""
        copies: dict[Place, Tensor] = {}
        staged: dict[str, Tensor] = {}
        for name, tensor in state.tensors.items():
            place = (
                tensor.device,
                tensor.untyped_storage().data_ptr(),
                tensor.storage_offset(),
                tuple(tensor.shape),
                tensor.stride(),
                tensor.dtype,
            )
            if place not in copies or not tensor.numel():
                copies[place] = self._copy(name, tensor.detach())
            staged[name] = copies[place]
        if any(tensor.is_cuda for tensor in state.tensors.values()):
            torch.cuda.synchronize()
        return State(staged, dict(state.meta), dict(state.shards))

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.clone()
        kept = self._pinned.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._pinned[name] = kept
        return kept.copy_(tensor, non_blocking=True)


class CheckpointWrite:
    """One checkpoint on its way to the disk. The `Checkpointer` starts it and asks for its end.

    `write` makes the checkpoint and says where it is. In the `background` it runs in a thread, and
    what it raises is raised by `end`.
    """

    def __init__(self, write: Callable[[], Path], background: bool):
        self._write = write
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            # not a daemon: an interpreter that ends waits for it
            self._thread = threading.Thread(target=self._run, name="checkpoint")
            self._thread.start()
        else:
            self._path = write()

    def _run(self) -> None:
        try:
            self._path = self._write()
        except BaseException as error:
            self._error = error

    @property
    def under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def end(self) -> Path:
        """Waits for it: where the checkpoint is, or the reason why there is none."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


def plain_copy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values as they are now: a thread writes them later."""
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain_copy(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
