"""One pass over a small pack: what two ways to compute a model are compared by."""

from __future__ import annotations

from torch import Tensor

from helpers.toys import make_samples
from reinforge.config.base import Checkpointing
from reinforge.core.batch import Batch
from reinforge.models.causal import CausalModel
from reinforge.models.checkpointing import checkpoint_layers


def passed(
    model: CausalModel, recomputed: Checkpointing = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradients of what is trained. `recomputed`: with checkpointing."""
    model.module.zero_grad()
    if recomputed:
        checkpoint_layers(model.module, recomputed)
        model.recompute(True)
    batch = Batch.pack(make_samples([9, 5])).to(model.device)
    logprobs, _ = model.logprobs(batch, temperature=1.0)
    logprobs.square().sum().backward()
    grads = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
    return logprobs.detach(), grads
