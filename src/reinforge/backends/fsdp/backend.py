"""The backend `train.backend: fsdp`, seen from rank 0."""

from __future__ import annotations

from reinforge.backends.distributed.driver import DistributedBackend
from reinforge.backends.fsdp.worker import FsdpWorker


class FsdpBackend(DistributedBackend):
    """torch's FSDP2: weights cut into as many shards as there are ranks. `train.backend: fsdp`
    names it in `ON_RANKS`.
    """

    kind = FsdpWorker
