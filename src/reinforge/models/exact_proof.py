"""Proves on the model and machine at hand that `model.exact` is kept: libraries differ, and an
architecture may do what nobody foresaw.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from reinforge.core.errors import InputError
from reinforge.core.kv_pool import block_tokens
from reinforge.models import exact_attention
from reinforge.models.attention import KVCache, KVShape, PackedLayout, PagedLayout, starts_of
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.causal import CausalModel
from reinforge.models.state import PackedStates, PieceStates, RowStates, StateStore

# tokens; a long one crosses a tile of keys, and its last ones are decoded
LONG = 70
SHORT = 5
DECODED = 6


@dataclass(slots=True)
class _KeyRecorder:
    """A pack whose keys and values are kept."""

    packed: PackedLayout
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        self.kept[layer] = k.contiguous(), v.contiguous()
        return exact_attention.layout(self.packed).attend(layer, q, k, v, rule)


@torch.no_grad()
def prove(model: CausalModel) -> None:
    """Raw logits of two sequences: packed together, each alone, packed in another order with
    copies, and the end of the long one decoded in a batch from cache blocks. Raises unless all bits
    are equal.
    """
    device = model.device
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(0, model.head.weight.shape[0], (n,), generator=generator).to(device)
        for n in (LONG, SHORT)
    )

    def packed(*parts: Tensor) -> list[Tensor]:
        lengths = [len(p) for p in parts]
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        states = PackedStates(lengths, device) if model.mixers else None
        layout = PackedLayout(lengths, starts_of(lengths, device))
        hidden = model.hidden(torch.cat(parts), positions, layout, states)
        return list(model.project(hidden).split(lengths))

    want_a, want_b = packed(a, b)
    found = {"alone": (packed(a)[0], packed(b)[0]), "in another pack": packed(b, b, a, b)[2:]}
    odd = [
        name
        for name, (x, y) in found.items()
        if not (torch.equal(x, want_a) and torch.equal(y, want_b))
    ]
    odd += [] if torch.equal(_decoded(model, a), want_a[-DECODED:]) else ["decoded"]
    if odd:
        raise InputError(
            f"log-probs of {type(model.causal).__name__} on this machine depend on the rest of the"
            f" batch ({', '.join(odd)}).",
            where="model.exact",
            fix="Set model.exact=false; engine and trainer then differ by rounding.",
        )


def _decoded(model: CausalModel, tokens: Tensor) -> Tensor:
    """Logits of the last tokens, one decode step each, beside another row."""
    device = model.device
    done = len(tokens) - DECODED
    listening = _KeyRecorder(PackedLayout([done], starts_of([done], device)))
    seen = PackedStates([done], device) if model.mixers else None
    model.hidden(tokens[:done], torch.arange(done, device=device), listening, seen)
    store = None
    if seen is not None:
        store = StateStore(seen.shapes, 2, device)
        first = torch.tensor([1], device=device)
        pieces = PieceStates([done], store, first, torch.zeros_like(first, dtype=torch.bool))
        model.hidden(tokens[:done], torch.arange(done, device=device), listening, pieces)
    block = block_tokens(device.type)
    width = -(-len(tokens) // block)
    cache = KVCache.allocate(
        [
            KVShape.of(*listening.kept[i]) if i in listening.kept else KVShape(0, 0, 0)
            for i in range(max(listening.kept, default=0) + 1)
        ],
        2 * width,
        block,
        model.dtype,
        device,
    )
    tables = torch.arange(2 * width - 1, -1, -1, device=device).view(2, width)
    at = torch.arange(done, device=device)
    for layer, (k, v) in listening.kept.items():
        cache.write(layer, tables[0][at // block] * block + at % block, k, v)
    rows = []
    for i in range(done, len(tokens)):
        cached = torch.tensor([i, i - done], device=device)
        slots = torch.tensor([1, 2], device=device)
        states = None if store is None else RowStates(store, slots)
        hidden = model.hidden(tokens[cached], cached, PagedLayout(cache, tables, cached), states)
        rows.append(model.project(hidden)[0])
    return torch.stack(rows)
