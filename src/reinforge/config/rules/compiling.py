"""What `model.compile: auto` leaves alone: layers that were never timed compiled, or cannot be.

Imports no torch: `plan` tells it before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reinforge.config.architectures import keeps_state
from reinforge.config.sections import Sections


def obstacle(config: Sections, shape: Mapping[str, Any], experts: int) -> str | None:
    """Why `auto` does not compile the layers of a model on a GPU, however long the run; None:
    nothing is in the way. `shape`: the model's config.json; `experts`: of a layer, at least 1.
    """
    train = config.train
    if config.model.exact:
        return "exact log-probs have one order of sums, and a compiler chooses another"
    if config.cluster.kind == "ray":
        return "which GPUs the actors have is not known where the choice is made"
    if train.backend != "local":
        return f"layers of train.backend {train.backend} were never timed compiled"
    if config.adapter is not None:
        return "adapters were never timed compiled"
    if train.precision == "fp8":
        return "products in FP8 were never timed compiled"
    if config.model.gradient_checkpointing:
        return "layers that are computed again were never timed compiled"
    if keeps_state(shape):
        return "layers that keep state are not compiled"
    if experts > 1:
        return "experts were never timed compiled"
    return None
