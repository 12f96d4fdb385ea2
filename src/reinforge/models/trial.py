"""A trial of a kernel in the middle of a forward pass, that leaves no trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_its_own(device: torch.device) -> Iterator[None]:
    """Inside, gradients can be asked for whatever pass is under way. `flash4`, `delta_rule` and
    `convolution` try their kernels in it.

    The first pack of a run may come inside a checkpointed layer, which keeps count of what is saved
    for its backward pass: that of a trial is none of its business.
    """
    with (
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ):
        yield
