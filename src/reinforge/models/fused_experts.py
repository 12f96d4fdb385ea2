"""A block of experts while decoding, router and all: the choice of the largest and the lists of who
goes where are a kernel each.

Blocks are known by their parts, and what their routers say is compared with what is computed here;
others keep the forward of their module.

Legend: B tokens, k experts chosen for a token, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.models.expert_adapters import unwrapped
from reinforge.models.experts import ExpertWeights, by_kernels, few, is_plain
from reinforge.models.routing import tell_choice


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """A block of a router and experts, where the router is a softmax of which the largest k are
    taken: `of` sees whether it is.
    """

    block: Any
    k: int
    normed: bool  # their weights add up to 1

    @classmethod
    def of(cls, block: Any) -> FusedExperts | None:
        """None: it is made of other parts, or has a router of another kind."""
        if {name for name, _ in block.named_children()} != {"gate", "experts"}:
            return None
        found = unwrapped(block.experts)
        if found is None:
            return None
        experts, _ = found
        if not hasattr(experts, "has_gate") or not is_plain(experts) or experts.is_transposed:
            return None
        router = block.gate
        weight = getattr(router, "weight", None)
        k = getattr(router, "top_k", None)
        if not isinstance(weight, nn.Parameter) or not isinstance(k, int):
            return None
        if len(list(router.parameters())) > 1 or list(router.buffers()):
            return None
        for normed in (True, False):
            if _is_softmax(router, weight, k, normed):
                return cls(block, k, normed)
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens x [B, H] what is to be added to them, [B, H], or [k, B, H] to be summed."""
        logits = F.linear(x, self.block.gate.weight)
        found = unwrapped(self.block.experts)
        if found is None or not few(found[0], x, logits[:, : self.k]):
            out = self.block(x[None])
            said: Tensor = out[0] if isinstance(out, tuple) else out
            return said[0]
        from reinforge.models.kernels import experts as kernels

        chosen, weights = kernels.choose(logits, self.k, self.normed)
        tell_choice(self.block, chosen)
        parts = ExpertWeights.of(*found)
        return by_kernels(found[0], parts, x, chosen, weights)


@torch.no_grad()
def _is_softmax(router: Any, weight: Tensor, k: int, normed: bool) -> bool:
    """Whether the router says what a softmax says, of some random tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, weight.shape[1], generator=generator).to(weight)
    said = router(x)
    if not isinstance(said, tuple) or len(said) != 3:
        return False
    scores = F.linear(x, weight).softmax(-1, dtype=torch.float32)
    values, chosen = scores.topk(k, -1)
    if normed:
        values = values / values.sum(-1, keepdim=True)
    _, weights, theirs = said
    if theirs.shape != chosen.shape or weights.shape != chosen.shape:
        return False
    return torch.equal(theirs, chosen) and torch.allclose(
        weights.float(), values, atol=1e-2, rtol=1e-2
    )
