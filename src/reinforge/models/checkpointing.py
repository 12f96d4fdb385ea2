"""Gradient checkpointing: layers keep their inputs only, and the backward computes them again.

With `host` these inputs wait in host memory. A row of 262,144 tokens leaves 52 GB of them in a 7B
model, and one layer's at a time is needed. They go there on a stream of their own while the next
layer computes; in the backward the one before is fetched while a layer is computed again. They come
back as they were, so nothing that is computed changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.config.base import Checkpointing

LEAST = 1 << 20  # bytes; what is smaller stays where it is


def checkpoint_layers(module: Any, how: Checkpointing, **options: Any) -> None:
    """Switches it on in a transformers model. `options` are those of torch's `checkpoint`."""
    module.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, **options}
    )
    if how == "host":
        found = {
            part._gradient_checkpointing_func
            for part in module.modules()
            if hasattr(part, "_gradient_checkpointing_func")
        }
        # one for all layers: each knows which input was kept before
        kept = {function: InputsOnHost(function) for function in found}
        for part in module.modules():
            if hasattr(part, "_gradient_checkpointing_func"):
                part._gradient_checkpointing_func = kept[part._gradient_checkpointing_func]


def set_function(part: nn.Module, function: Callable[..., Any]) -> None:
    """How this layer is computed again, wherever its input waits meanwhile."""
    now: Any = part._gradient_checkpointing_func
    if isinstance(now, InputsOnHost):
        now.function = function
    else:
        part._gradient_checkpointing_func = function  # type: ignore[assignment]


def is_on_host(module: nn.Module) -> bool:
    """Whether inputs of its layers wait in host memory."""
    return any(
        isinstance(getattr(part, "_gradient_checkpointing_func", None), InputsOnHost)
        for part in module.modules()
    )


class InputsOnHost:
    """A checkpoint function whose layers' inputs wait in host memory. The layers of one model share
    one and call it in place of torch's own.
    """

    devices = ("cuda",)  # what is elsewhere stays

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._newest: Callable[[], WaitingInput | None] = _nothing

    def __call__(self, layer: Callable[..., Any], *args: Any, **more: Any) -> Any:
        # inside, torch has hooks of its own: these see what is kept for computing again, no more
        with torch.autograd.graph.saved_tensors_hooks(self._keep, _give_back):
            return self.function(layer, *args, **more)

    def _keep(self, tensor: Tensor) -> Tensor | WaitingInput:
        large = tensor.numel() * tensor.element_size() >= LEAST
        if tensor.device.type not in self.devices or not large:
            return tensor
        before = self._newest()
        if before is not None:
            before.leave()
        waiting = WaitingInput(tensor.detach(), before)
        self._newest = weakref.ref(waiting)
        return waiting


class WaitingInput:
    """The input of one layer, in host memory from the moment that the next layer has kept its own.
    Autograd holds it in place of the tensor.
    """

    def __init__(self, tensor: Tensor, before: WaitingInput | None):
        self.device = tensor.device
        # it dies with the graph that it is in, and so do those before it
        self.before = _nothing if before is None else weakref.ref(before)
        self.here: Tensor | None = tensor
        self.comes = False  # a copy to the device is under way
        cuda = tensor.is_cuda
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=cuda)
        self._copy(self.host, tensor)

    def leave(self) -> None:
        """The copy of the device is not needed for now. (The stream that reads it holds it.)"""
        self.here = None

    def fetch(self) -> None:
        """Begins to bring it back, unless it is there."""
        if self.here is None:
            self.here = torch.empty_like(self.host, device=self.device, pin_memory=False)
            self.comes = True
            self._copy(self.here, self.host)

    def take(self) -> Tensor:
        """The tensor, on its device. The one before is on its way meanwhile."""
        self.fetch()
        stream = _stream(self.device)
        if stream is not None and self.comes:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        before = self.before()
        if before is not None:
            before.fetch()
        found = self.here
        assert found is not None
        self.here = None
        self.comes = False
        return found

    def _copy(self, to: Tensor, source: Tensor) -> None:
        """On the stream of its own, after all that was launched before."""
        stream = _stream(self.device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        if stream is not None:
            (source if source.is_cuda else to).record_stream(stream)


def _give_back(kept: Tensor | WaitingInput) -> Tensor:
    return kept.take() if isinstance(kept, WaitingInput) else kept


def _nothing() -> None:
    """A reference to nobody."""


@cache
def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """Where copies run beside the computation."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
