"""The backend `train.backend: megatron`, seen from rank 0."""

from __future__ import annotations

from reinforge.backends.distributed.driver import DistributedBackend
from reinforge.backends.megatron.worker import MegatronWorker


class MegatronBackend(DistributedBackend):
    """Megatron's layers: matrices cut over tensor groups, which all train a whole model.
    `train.backend: megatron` names it in `ON_RANKS`.
    """

    kind = MegatronWorker
