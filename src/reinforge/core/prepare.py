"""From samples to packs that a loss can be computed on: annotated, and with the constants of the
whole optimizer batch in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.core.backend import Backend, Loss, PreparingLoss
from reinforge.core.batch import Batch, pack
from reinforge.core.sample import Sample


def prepared(backend: Backend, loss: Loss, samples: Sequence[Sample]) -> list[Batch]:
    """Packs with every stream that the loss reads.

    What the samples bring along (a reference computed beforehand) is not computed again.
    """
    batches = pack(samples, backend.budget, unit=loss.unit, share=backend.share)
    backend.annotate(batches, loss.needs - batches[0].streams.keys() if batches else loss.needs)
    if isinstance(loss, PreparingLoss) and batches:
        others = pack(loss.companions(samples), backend.budget, share=backend.share)
        backend.annotate(
            others,
            frozenset({"old", "reference"}) - (others[0].streams.keys() if others else set()),
        )
        loss.prepare(batches, others)
    return batches
