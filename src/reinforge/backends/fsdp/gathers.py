"""The weights that a forward pass gathers, for a rank that cannot compute its pack to the end."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from reinforge.backends.distributed.worker import ForwardCollectives


class ForwardGathers(ForwardCollectives):
    """Which parts of a sharded model the forward pass under way has gathered so far. `FsdpWorker`
    makes one of every model that it cuts.

    Parts are gathered by all ranks together, one after the other, and a pack has no influence on
    which. So a rank without memory for its pack gathers what is left, and drops it.
    """

    can_reset: ClassVar[bool] = hasattr(FSDPModule, "reset_iter_state")  # torch 2.13

    def __init__(self, root: FSDPModule):
        self.root = root
        assert isinstance(root, nn.Module)
        self.parts = [part for part in root.modules() if isinstance(part, FSDPModule)]
        self.gathered: set[nn.Module] = set()
        for part in root.modules():
            if isinstance(part, FSDPModule):
                # after FSDP's own, which gathers
                part.register_forward_pre_hook(self._note)

    def _note(self, part: nn.Module, _: Any) -> None:
        self.gathered.add(part)

    def begin(self) -> None:
        self.gathered.clear()

    def finish(self) -> None:
        for part in self.parts:
            if part not in self.gathered:
                part.unshard()
                part.reshard()

    def reset(self) -> None:
        self.root.reset_iter_state()
