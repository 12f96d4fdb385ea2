"""One attention function for training, prefill and decoding, registered with transformers under a name.

transformers hands us q, k, v after projections and rotary embedding, whatever the architecture; a `layout` that travels
as a keyword argument says how the [N] tokens of this forward relate. `Packed` is sequences end to end (training,
scoring, prefill); `Paged` is one new token for each of B sequences whose past lies in cache blocks (decoding).

Legend: N tokens, B sequences, H query heads, K key/value heads, G = H / K, D head size, L padded length.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforge.core.errors import InputError

NAME = "reinforge"
HAS_TRITON = importlib.util.find_spec("triton") is not None
PADDING_WASTE = 1.25  # neighbours share a padded tile while it holds at most this many times their real tokens


class Layout(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """q [N, H, D], k and v [N, K, D] -> [N, H, D]."""
        ...


def _attention(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, *, scaling: float | None = None,
               layout: Layout | None = None, sliding_window: int | None = None, softcap: float | None = None,
               **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
    assert layout is not None, "this model runs through reinforge: call it with CausalModel.hidden, not directly"
    assert q.shape[0] == 1, f"packed forward has batch size 1, got {q.shape[0]}"
    if kwargs.get("s_aux") is not None:
        raise InputError(
            "this architecture uses attention sinks, which the native attention does not know.",
            where="model.path",
            fix="Use another model.",
        )
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = layout.attend(
        int(module.layer_idx), q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), scale, sliding_window, softcap
    )
    return out[None], None


def register(compiled: bool = False) -> None:
    """Makes the function known to transformers; `compiled`: layers are compiled around it, and it is not traced."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, torch.compiler.disable(_attention) if compiled else _attention)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, mask: Tensor | None, causal: bool, softcap: float | None) -> Tensor:
    """q [B, H, Lq, D], k and v [B, K, L, D]. softmax(softcap(q·k·scale) + mask)·v with grouped heads; mask True = attend."""
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    groups = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, k.repeat_interleave(groups, 1).transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if causal and mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(scores.float().softmax(-1).to(v.dtype), v.repeat_interleave(groups, 1))


def _tiles(lengths: list[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring sequences [a, b) that share one padded tile. `pack` sorts by length, so runs are long."""
    runs: list[tuple[int, int]] = []
    first = 0
    for i in range(1, len(lengths) + 1):
        run = lengths[first : i + 1]
        if i == len(lengths) or max(run) * len(run) > PADDING_WASTE * sum(run):
            runs.append((first, i))
            first = i
    return runs


@dataclass(slots=True)
class Packed:
    """Causal attention inside each of several sequences that lie end to end.

    Sequences of like length are viewed (equal lengths) or gathered (unequal) into right-padded tiles. A pad stands after
    every real token of its row, so the causal mask alone keeps it out of sight.
    """

    lengths: list[int]
    starts: Tensor  # [S+1] int32 on the device
    tiles: list[tuple[int, int, int, int, Tensor | None, Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.tiles, offset = [], 0
        device = self.starts.device
        for a, b in _tiles(self.lengths):
            lengths = self.lengths[a:b]
            longest, total = max(lengths), sum(lengths)
            gather = scatter = None
            if longest * len(lengths) != total:
                size = torch.tensor(lengths, device=device)
                within = torch.arange(longest, device=device)
                real = within[None] < size[:, None]  # [b-a, L]
                begin = torch.cumsum(size, 0) - size
                gather = (begin[:, None] + torch.minimum(within[None], size[:, None] - 1)).reshape(-1)
                scatter = real.reshape(-1).nonzero()[:, 0]
            self.tiles.append((offset, total, b - a, longest, gather, scatter))
            offset += total

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        outs = []
        for offset, total, rows, longest, gather, scatter in self.tiles:
            tile = [x[offset : offset + total] for x in (q, k, v)]
            if gather is not None:
                tile = [x.index_select(0, gather) for x in tile]
            tq, tk, tv = (x.reshape(rows, longest, x.shape[1], x.shape[2]).transpose(1, 2) for x in tile)
            mask = None
            if window is not None and longest > window:
                distance = torch.arange(longest, device=q.device)[:, None] - torch.arange(longest, device=q.device)[None]
                mask = (distance >= 0) & (distance < window)
            out = dense_attention(tq, tk, tv, scale, mask=mask, causal=True, softcap=softcap).transpose(1, 2)
            out = out.reshape(rows * longest, out.shape[2], out.shape[3])
            outs.append(out if scatter is None else out.index_select(0, scatter))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


@dataclass(slots=True)
class Cache:
    """Key/value blocks of every layer: [blocks, block_size, K, D]. Which block belongs to whom is the engine's business."""

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int

    @classmethod
    def allocate(cls, shapes: list[tuple[int, int]], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Cache:
        """`shapes` is (K, D) of each layer."""
        make = lambda: [torch.zeros(blocks, block_size, heads, size, dtype=dtype, device=device) for heads, size in shapes]  # noqa: E731
        return cls(make(), make(), block_size)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Puts k, v [N, K, D] at flat positions `slots` [N] (block * block_size + offset)."""
        self.keys[layer].view(-1, *k.shape[1:]).index_copy_(0, slots, k)
        self.values[layer].view(-1, *v.shape[1:]).index_copy_(0, slots, v)


@dataclass(slots=True)
class Prefill:
    """Packed prompts whose keys and values are also written to the cache."""

    packed: Packed
    cache: Cache
    slots: Tensor  # [N] int64

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        self.cache.write(layer, self.slots, k, v)
        return self.packed.attend(layer, q, k, v, scale, window, softcap)


@dataclass(slots=True)
class Paged:
    """Decoding: one new token for each of B sequences; its key and value are written first, then it attends to all."""

    cache: Cache
    tables: Tensor  # [B, W] int64 cache blocks of each sequence, in order; unused entries point at any block
    cached: Tensor  # [B] int64 tokens in the cache before the new one: where it goes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if q.is_cuda and HAS_TRITON:
            from reinforge.models.kernels import paged_decode

            return paged_decode(q, k, v, keys, values, self.tables, self.cached, scale, window or 0, softcap or 0.0)
        size = self.cache.block_size
        block = self.tables.gather(1, (self.cached // size)[:, None])[:, 0]
        self.cache.write(layer, block * size + self.cached % size, k, v)
        rows, width = self.tables.shape
        past_k, past_v = (
            x.index_select(0, self.tables.reshape(-1)).view(rows, width * size, k.shape[1], k.shape[2]).transpose(1, 2)
            for x in (keys, values)
        )
        at = torch.arange(width * size, device=q.device)[None]
        mask = at <= self.cached[:, None]
        if window is not None:
            mask &= at > self.cached[:, None] - window
        grouped = q.view(rows, k.shape[1], -1, k.shape[2])  # the G query heads of a key head are G queries of one position
        out = dense_attention(grouped, past_k, past_v, scale, mask=mask[:, None, None], causal=False, softcap=softcap)
        return out.reshape(rows, -1, k.shape[2])
