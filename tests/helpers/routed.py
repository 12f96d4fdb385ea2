"""Samples whose tokens were sent to experts when they were sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reinforge.core import routes
from reinforge.core.batch import Batch
from reinforge.core.sample import Sample
from reinforge.models.causal import CausalModel
from reinforge.models.routing import Routers


def with_routes(samples: Sequence[Sample], model: CausalModel, seed: int = 0) -> list[Sample]:
    """Routed at random, all but the last token."""
    found = Routers.of(model)
    assert found is not None
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad(), found.watched():
        model.states(Batch.pack(samples[:1]))
        blocks, k = found.taken().shape[1:]
    experts = found.choices[0].experts
    told = []
    for sample in samples:
        scores = torch.rand(len(sample.tokens) - 1, blocks, experts, generator=drawn)
        chosen = routes.narrow(scores.argsort(-1)[..., :k], experts)
        told.append(sample.with_(extras={routes.NAME: routes.padded(chosen, len(sample.tokens))}))
    return told
