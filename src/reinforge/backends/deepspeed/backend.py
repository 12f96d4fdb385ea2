"""The backend `train.backend: deepspeed`, seen from rank 0."""

from __future__ import annotations

from reinforge.backends.deepspeed.worker import DeepSpeedWorker
from reinforge.backends.distributed.driver import DistributedBackend


class DeepSpeedBackend(DistributedBackend):
    """DeepSpeed's ZeRO: optimizer, gradients and (stage 3) weights cut over the ranks.
    `train.backend: deepspeed` names it in `ON_RANKS`.
    """

    kind = DeepSpeedWorker
