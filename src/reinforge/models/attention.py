"""One attention function for training, prefill and decoding, registered with transformers under a
name.

transformers hands us q, k, v after projections and rotary embedding, whatever the architecture; a
`layout` that travels as a keyword argument says how the [N] tokens of this forward relate.
`PackedLayout` is sequences end to end (training, scoring, prefill); `PagedLayout` is one new token
for each of B sequences whose past lies in cache blocks (decoding).

Legend: N tokens, B sequences, H query heads, K key/value heads, G = H / K, D head size (of values
it may be another one), L padded length.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforge.core.arrays import to_device
from reinforge.core.errors import InputError
from reinforge.models import flash4, fp8
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.route_store import RouteStore
from reinforge.models.shared_keys import SharedKeys

NAME = "reinforge"
HAS_TRITON = importlib.util.find_spec("triton") is not None
EVEN_RUNS = 4  # a pack of so many runs of equal lengths goes through the dense kernel, run by run
# neighbours share a padded tile while it holds at most this many times their real tokens
PADDING_WASTE = 1.25


class AttentionLayout(Protocol):
    """How the tokens of one forward relate, and how they attend: packs, prefills, one token for
    each of several sequences. `PackedModel.hidden` passes it through the model; our attention calls
    it in every layer.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [N, H, D], k and v [N, K, D] -> [N, H, D]."""
        ...


def _attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    layout: AttentionLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    places: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    assert layout is not None, (
        "a layer does not hand its arguments on to attention, or the model was called directly"
        " instead of with CausalModel.hidden"
    )
    assert q.shape[0] == 1, f"packed forward has batch size 1, got {q.shape[0]}"
    if attention_mask is not None:
        _hear(module, attention_mask, sliding_window)
    if sliding_window is None:
        sliding_window = getattr(module, WINDOW, None)
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        q = retuned(module, q, places)
    rule = AttentionRule(
        scale=q.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        chunk=getattr(module, CHUNK, None),
        softcap=softcap,
        sinks=s_aux,
    )
    # the gradient of a squeeze is a view; that of an index is written into zeros, head by head
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    out = layout.attend(int(module.layer_idx), q, k, v, rule)
    return out[None], None


# ---- what transformers' masks say ----
#
# Our attention gets no mask: the layout says who sees whom. Some architectures tell a window to the
# mask alone, so once, before a model is used, a mask is asked for and what it says is written down
# on each attention layer.

# on an attention layer: the window or the chunk of its mask; both None: it sees everything before
WINDOW = "mask_window"
CHUNK = "mask_chunk"


class _Mask(Tensor):
    """The mask that transformers would have made, and its window or its chunk."""

    window: int | None
    chunk_size: int | None


def _make_mask(*, mask_function: Any, local_size: int | None = None, **kwargs: Any) -> Tensor:
    from transformers.masking_utils import sdpa_mask

    made = sdpa_mask(
        mask_function=mask_function,
        **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    assert made is not None, "a mask was asked for"
    mask = made.as_subclass(_Mask)
    mask.window, mask.chunk_size = extent_of(mask_function, local_size, mask.device)
    return mask


def extent_of(
    mask_function: Any, size: int | None, device: torch.device | None = None
) -> tuple[int | None, int | None]:
    """The window of a mask of transformers or its chunk, looked at around its edge: both None where
    each token sees all before it. Refuses others.
    """
    reach = size if size is not None else 1 << 20
    at = torch.tensor([0, 1, 2, reach - 1, reach, reach + 1, 2 * reach + 1], device=device)
    q, k = (x.reshape(-1) for x in torch.meshgrid(at, at, indexing="ij"))
    zero = torch.zeros_like(q)
    seen = mask_function(zero, zero, q, k)
    causal = k <= q
    if torch.equal(seen, causal):
        return None, None
    if size is not None and torch.equal(seen, causal & (q - k < size)):
        return size, None
    if size is not None and torch.equal(seen, causal & (q // size == k // size)):
        return None, size
    raise InputError(
        "this architecture's attention is neither causal nor causal within a window or a chunk: it"
        " attends in both directions, or by another rule.",
        where="model.path",
        fix="Use another model.",
    )


def _hear(module: Any, mask: Any, sliding_window: int | None) -> None:
    """Writes the window or the chunk of a layer's mask down. What the layer says itself must be the
    same.
    """
    if not isinstance(mask, _Mask) or not hasattr(mask, "window"):
        raise InputError(
            f"layer {module.layer_idx} attends under a mask of its own making, which the native"
            " attention does not know.",
            where="model.path",
            fix="Use another model.",
        )
    setattr(module, WINDOW, mask.window)
    setattr(module, CHUNK, mask.chunk_size)
    if sliding_window is not None and sliding_window != mask.window:
        raise InputError(
            f"layer {module.layer_idx} says that its window is {sliding_window}, and its mask says"
            f" {mask.window}.",
            where="model.path",
            fix="Correct the window in the model's config.json.",
        )


@contextmanager
def hear_masks() -> Iterator[None]:
    """Inside, forwards of one sequence make masks, and each attention layer takes its window from
    its own.
    """
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(NAME, _make_mask)
    try:
        yield
    finally:
        AttentionMaskInterface._global_mapping.pop(NAME, None)


MaskExtents = dict[int, tuple[int | None, int | None]]  # by layer: its window, its chunk


def mask_extents(trunk: Any) -> MaskExtents:
    """What the masks of a model's layers said, for another copy of the same model."""
    parts = [part for part in trunk.modules() if hasattr(part, WINDOW)]
    return {int(p.layer_idx): (getattr(p, WINDOW), getattr(p, CHUNK)) for p in parts}


def set_mask_extents(trunk: Any, extents: MaskExtents) -> None:
    """Writes down on the layers what the masks of another copy said."""
    for part in trunk.modules():
        extent = extents.get(getattr(part, "layer_idx", -1))
        if extent is not None:
            for key, value in zip((WINDOW, CHUNK), extent, strict=True):
                setattr(part, key, value)


def windows(trunk: Any) -> list[int]:
    """The windows and chunks that layers of a model have, as their masks said."""
    found = {getattr(part, key, None) for part in trunk.modules() for key in (WINDOW, CHUNK)}
    return sorted(w for w in found if w is not None)


def retuned(module: Any, q: Tensor, places: Tensor | None) -> Tensor:
    """Queries [1, H, N, D] of a layer of Llama 4 without rotary embedding, whose scale grows with
    the logarithm of the position (2501.19399). The layer takes the place in the forward for the
    position; `places` [N] are the positions.
    """
    assert places is not None, "the positions of the tokens are not handed on"

    def scale(at: Tensor) -> Tensor:
        steps = torch.floor((at.float() + 1.0) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1.0

    taken = scale(torch.arange(q.shape[2], device=q.device))
    return (q * (scale(places) / taken)[:, None]).to(q.dtype)


_compiled = False


def register(compiled: bool = False) -> None:
    """Makes the function known to transformers; `compiled`: layers are compiled around it, and it
    is not traced. That stays so: a second model (a reference, a critic) may be made after the first
    was compiled.
    """
    from transformers import AttentionInterface

    global _compiled
    _compiled = _compiled or compiled
    AttentionInterface.register(
        NAME, torch.compiler.disable(_attention) if _compiled else _attention
    )


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    *,
    mask: Tensor | None,
    causal: bool,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B, H, Lq, D], k and v [B, K, L, D]. softmax(softcap(q·k·scale) + mask)·v with grouped
    heads; mask True = attend. The rule's window and its sinks are the caller's: in the mask, and as
    a tensor that fits [B, H, Lq, 1].
    """
    if rule.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=rule.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    groups = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, k.repeat_interleave(groups, 1).transpose(-1, -2)) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if causal and mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    scores = scores.float()
    if sinks is not None:  # one more column, whose value is 0
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return torch.matmul(weights, v.repeat_interleave(groups, 1))


def tile_runs(queries: list[int], keys: list[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring segments [a, b) that share one padded tile.

    Packs are sorted by length, so runs are long.
    """
    runs: list[tuple[int, int]] = []
    first = 0
    for i in range(1, len(queries) + 1):
        q = queries[first : i + 1]
        k = keys[first : i + 1]
        if (
            i == len(queries)
            or max(q) * len(q) > PADDING_WASTE * sum(q)
            or max(k) * len(k) > PADDING_WASTE * sum(k)
        ):
            runs.append((first, i))
            first = i
    return runs


@dataclass(slots=True)
class _Tile:
    """Segments padded on the right to Lq queries and Lk keys.

    A pad stands after every real token of its row: the causal mask hides it.
    """

    rows: int
    queries: tuple[int, int]  # [a, b) of the pack
    keys: tuple[int, int]  # [a, b) of the keys
    query_index: Tensor | None  # [rows * Lq] where the queries come from; None: [a, b) as it lies
    key_index: Tensor | None  # [rows * Lk]
    real: Tensor | None  # [b - a] which rows of the padded result are real
    before: Tensor | None  # [rows] keys before the first query; None: none anywhere
    lengths: tuple[int, int]  # Lq, Lk


@dataclass(slots=True)
class Segments:
    """Several sequences end to end, each of n queries and at least as many keys: the last query of
    a segment sees its last key.

    On a GPU all of them go through one variable-length kernel; elsewhere through tiles of segments
    of like length.
    """

    lengths: list[int]  # queries of each segment
    starts: Tensor  # [S+1] int32 on the device
    key_lengths: list[int]
    key_starts: Tensor
    _cut: list[_Tile] | None = field(init=False, default=None)
    # by the size of chunks: their segments, and which keys those see
    _chunked: dict[int, tuple[Segments, Tensor]] = field(init=False, default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [N, H, D], k and v [sum of key lengths, K, D] -> [N, H, D]."""
        if rule.chunk is not None and max(self.key_lengths) > rule.chunk:
            if rule.chunk not in self._chunked:
                self._chunked[rule.chunk] = self._by_chunk(rule.chunk)
            parts, seen = self._chunked[rule.chunk]
            k, v = (x.index_select(0, seen) for x in (k, v))
            return parts.attend(q, k, v, replace(rule, chunk=None))
        if rule.softcap is None and v.shape[-1] <= q.shape[-1] and self._varlen(q, k, v, rule):
            narrow = q.shape[-1] - v.shape[-1]
            out = varlen_attention(
                q,
                k,
                F.pad(v, (0, narrow)) if narrow else v,
                self.starts,
                self.key_starts,
                max(self.lengths),
                max(self.key_lengths),
                rule,
            )
            return out[..., : v.shape[-1]]
        if self._cut is None:
            self._cut = self._tiles()
        outs = [_attend_tile(tile, q, k, v, rule) for tile in self._cut]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _by_chunk(self, size: int) -> tuple[Segments, Tensor]:
        """The same queries as segments that end where a chunk does, each of which sees the keys of
        its chunk; and which of all keys those are.
        """
        lengths = []
        key_lengths = []
        seen = []
        key_at = 0
        for n, keys in zip(self.lengths, self.key_lengths, strict=True):
            at = keys - n  # the position of the next query
            while at < keys:
                begin = at // size * size
                end = min(keys, begin + size)
                lengths.append(end - at)
                key_lengths.append(end - begin)
                seen.append(torch.arange(key_at + begin, key_at + end))
                at = end
            key_at += keys
        device = self.starts.device
        starts = (starts_of(lengths, device), starts_of(key_lengths, device))
        found = Segments(lengths, starts[0], key_lengths, starts[1])
        return found, to_device(torch.cat(seen), device)

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> bool:
        """Sequences of one length are served best by the dense kernel, which knows no sinks, and no
        groups of heads whose values have another size.
        """
        runs = 1 + sum(a != b for a, b in itertools.pairwise(self.lengths))
        even = self.key_lengths is self.lengths and runs <= EVEN_RUNS
        if v.shape[-1] != q.shape[-1] and k.shape[1] != q.shape[1]:
            even = False
        if rule.sinks is not None:
            even = max(self.lengths) == 1  # the kernel gives its sums in another order then
        return (
            q.is_cuda
            and q.dtype in (torch.bfloat16, torch.float16)
            and q.shape[-1] % 8 == 0
            and q.shape[-1] <= 256
            and not even
        )

    def _tiles(self) -> list[_Tile]:
        assert min(self.lengths) > 0, "a segment without tokens"
        device = self.starts.device
        tiles = []
        at = 0
        key_at = 0
        for a, b in tile_runs(self.lengths, self.key_lengths):
            queries = self.lengths[a:b]
            keys = self.key_lengths[a:b]
            index = real = key_index = before = None
            if max(queries) * (b - a) != sum(queries):
                index, mask = _padded(queries, at, device)
                real = mask.nonzero()[:, 0]
            if max(keys) * (b - a) != sum(keys):
                key_index = _padded(keys, key_at, device)[0]
            if queries != keys:
                before = torch.tensor(
                    [k - q for k, q in zip(keys, queries, strict=True)], device=device
                )
            spans = (at, at + sum(queries)), (key_at, key_at + sum(keys))
            tiles.append(
                _Tile(b - a, *spans, index, key_index, real, before, (max(queries), max(keys)))
            )
            at = at + sum(queries)
            key_at = key_at + sum(keys)
        return tiles


def _attend_tile(tile: _Tile, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    n_queries, n_keys = tile.lengths

    def rows(x: Tensor, span: tuple[int, int], index: Tensor | None, size: int) -> Tensor:
        x = x[span[0] : span[1]] if index is None else x.index_select(0, index)
        return x.reshape(tile.rows, size, x.shape[1], x.shape[2]).transpose(1, 2)

    mask = None
    if tile.before is not None or (rule.window is not None and n_keys > rule.window):
        at = torch.arange(n_queries, device=q.device)[None, :] + (
            0 if tile.before is None else tile.before[:, None]
        )
        distance = at[:, :, None] - torch.arange(n_keys, device=q.device)
        mask = ((distance >= 0) & (distance < (rule.window or n_keys + 1)))[:, None]
    tq = rows(q, tile.queries, tile.query_index, n_queries)
    tk, tv = (rows(x, tile.keys, tile.key_index, n_keys) for x in (k, v))
    sinks = None if rule.sinks is None else rule.sinks[:, None, None]
    out = dense_attention(tq, tk, tv, rule, mask=mask, causal=True, sinks=sinks).transpose(1, 2)
    out = out.reshape(tile.rows * n_queries, out.shape[2], out.shape[3])
    return out if tile.real is None else out.index_select(0, tile.real)


@dataclass(slots=True)
class PackedLayout:
    """Causal attention inside each of several segments that lie end to end.

    A segment may continue an earlier one (`prefix`): then it sees that one's keys first. So the
    prompt of a group is computed once, and each answer continues it.
    """

    lengths: list[int]
    starts: Tensor  # [S+1] int32 on the device
    # which segment each one continues, -1 = none; a prefix continues nothing
    prefix: list[int] | None = None
    # copies keys of prefixes to what continues them; None: nothing does
    shared: SharedKeys | None = field(init=False, default=None)
    segments: Segments = field(init=False)

    def __post_init__(self) -> None:
        self.segments = Segments(self.lengths, self.starts, self.lengths, self.starts)
        if self.prefix is None or max(self.prefix, default=-1) < 0:
            return
        device = self.starts.device
        has_kernel = HAS_TRITON and device.type == "cuda"
        self.shared = SharedKeys.of(self.lengths, self.prefix, device, has_kernel=has_kernel)
        key_lengths = [
            n + (self.lengths[before] if before >= 0 else 0)
            for n, before in zip(self.lengths, self.prefix, strict=True)
        ]
        self.segments = Segments(
            self.lengths, self.starts, key_lengths, starts_of(key_lengths, device)
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        if self.shared is not None:
            k, v = self.shared.gather(k, v)
        return self.segments.attend(q, k, v, rule)


def starts_of(lengths: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), device)


def _padded(lengths: list[int], offset: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(where each place of a right-padded tile comes from, which places are real), both [rows *
    longest]; pads repeat the last token.
    """
    size = torch.tensor(lengths, device=device)
    within = torch.arange(max(lengths), device=device)
    begin = offset + torch.cumsum(size, 0) - size
    return (begin[:, None] + torch.minimum(within[None], size[:, None] - 1)).reshape(-1), (
        within[None] < size[:, None]
    ).reshape(-1)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    rule: AttentionRule,
) -> Tensor:
    """Causal attention of segments of any lengths in one kernel: FlashAttention 4 where it is the
    better one (`models.flash4`), else torch's flash attention.

    The last query of a segment sees its last key. q [N, H, D], k and v [Nk, K, D].
    """
    q, k, v = (x.contiguous() for x in (q, k, v))
    lengths = (starts, key_starts, longest, longest_key)
    if flash4.usable(q, k, v, starts, longest, rule):
        return flash4.attention(q, k, v, *lengths, rule)
    if rule.sinks is None:
        return _flash_forward(q, k, v, lengths, rule)[0]
    out: Tensor = _FlashWithSinks.apply(q, k, v, rule.sinks, lengths, rule)
    return out


_Lengths = tuple[Tensor, Tensor, int, int]  # starts of queries and of keys, the longest of both


def _flash_options(rule: AttentionRule) -> dict[str, Any]:
    """A window is told as the keys before a query's own that it sees."""
    window = {} if rule.window is None else {"window_size_left": rule.window - 1}
    return {"scale": rule.scale, **window, **({"window_size_right": 0} if window else {})}


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: _Lengths, rule: AttentionRule
) -> tuple[Tensor, ...]:
    """Output [N, H, D], log-sum-exp [H, N] of the scores, and what the backward wants back."""
    found: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, True, False, **_flash_options(rule)
    )
    return found


def _flash_backward(
    g: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    found: tuple[Tensor, Tensor, Tensor, Tensor],
    lengths: _Lengths,
    rule: AttentionRule,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v; `found` is what the forward gave."""
    out, lse, seed, unused = found
    grads: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
        g, *inputs, out, lse, *lengths, 0.0, True, seed, unused, **_flash_options(rule)
    )
    return grads


class _FlashWithSinks(torch.autograd.Function):
    """Flash attention with one more column of the softmax, whose score is a parameter and whose
    value is 0.

    With l the log-sum-exp of the scores and s the sink, the output is that of the kernel times
    sigmoid(l - s). The backward of flash attention is P (dP - sum(dO·O)) with P = exp(S - l): given
    the log-sum-exp and the output of the wider softmax it is that of the wider softmax, and that of
    the sink's column is -exp(s - l)·sum(dO·O).
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, lengths, rule):  # type: ignore[no-untyped-def]
        out, lse, seed, unused, _ = _flash_forward(q, k, v, lengths, rule)
        assert lse.shape == (q.shape[1], q.shape[0]), f"log-sum-exp of shape {tuple(lse.shape)}"
        share = torch.sigmoid(lse - sinks.float()[:, None]).transpose(0, 1)[..., None]
        out = (out * share).to(out.dtype)
        lse = torch.logaddexp(lse, sinks.float()[:, None])
        ctx.save_for_backward(q, k, v, sinks, out, lse, seed, unused, *lengths[:2])
        ctx.longest = lengths[2:]
        ctx.rule = rule
        return out

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        q, k, v, sinks, out, lse, seed, unused, *starts = ctx.saved_tensors
        lengths = (*starts, *ctx.longest)
        grads = _flash_backward(
            g.contiguous(), (q, k, v), (out, lse, seed, unused), lengths, ctx.rule
        )
        met = (g.float() * out.float()).sum(-1).transpose(0, 1)  # [H, N]
        of_sinks = -(torch.exp(sinks.float()[:, None] - lse) * met).sum(-1)
        return *grads, of_sinks.to(sinks.dtype), None, None


class KVShape(NamedTuple):
    """Heads of a layer's cache, and how many numbers each has of a key and of a value."""

    heads: int
    key: int
    value: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> KVShape:
        """Of k [N, K, D] and v [N, K, D]."""
        return cls(k.shape[1], k.shape[2], v.shape[2])


@dataclass(slots=True)
class KVCache:
    """Key/value blocks of every layer: [blocks, block_size, K, D], where keys and values have their
    own D. In FP8 each head of a token has a scale of its own; attention sees what the cache holds,
    that of the newest token too.

    Which block belongs to whom is the engine's business.
    """

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int
    # of FP8 keys and values: [blocks, K, block_size] float32 for each layer; None: not in FP8
    scales: list[tuple[Tensor, Tensor]] | None = None
    routes: RouteStore | None = None  # where the tokens went, of a mixture of experts

    @classmethod
    def allocate(
        cls,
        shapes: Sequence[KVShape],
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """`shapes` of all layers; `dtype`: e4m3, or that of the module."""

        def make(sizes: list[int]) -> list[Tensor]:
            return [
                torch.zeros(blocks, block_size, shape.heads, size, dtype=dtype, device=device)
                for shape, size in zip(shapes, sizes, strict=True)
            ]

        scales = None
        if dtype == fp8.E4M3:
            scales = [
                (
                    torch.zeros(blocks, shape.heads, block_size, device=device),
                    torch.zeros(blocks, shape.heads, block_size, device=device),
                )
                for shape in shapes
            ]
        keys = make([shape.key for shape in shapes])
        return cls(keys, make([shape.value for shape in shapes]), block_size, scales)

    @staticmethod
    def token_bytes(shapes: Sequence[KVShape], dtype: torch.dtype) -> int:
        """What one token takes."""
        scale = 4 if dtype == fp8.E4M3 else 0
        return sum(
            shape.heads * (size * dtype.itemsize + scale)
            for shape in shapes
            for size in (shape.key, shape.value)
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds, a block after the other, as numbers that can be copied."""
        parts = [*self.keys, *self.values]
        kept = [] if self.routes is None else [self.routes.kept]
        if self.scales is None:
            return [*parts, *kept]
        whole = [part.view(torch.uint8) for part in parts]
        return [*whole, *(scale for pair in self.scales for scale in pair), *kept]

    def takes_kernel(self, x: Tensor) -> bool:
        """Whether new keys are turned and put here by one kernel."""
        return x.is_cuda and HAS_TRITON and self.scales is None

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Puts k, v [N, K, D] at flat positions `slots` [N] (block * block_size + offset). Returns
        them as they are there.
        """
        pairs = ((self.keys[layer], k), (self.values[layer], v))
        if self.scales is None:
            for part, x in pairs:
                part.view(-1, *x.shape[1:]).index_copy_(0, slots, x)
            return k, v
        place = (slots // self.block_size, slots % self.block_size)
        kept = []
        for (part, x), scale in zip(pairs, self.scales[layer], strict=True):
            rows = fp8.Fp8Rows.of(x.reshape(-1, x.shape[-1]))
            flat = part.view(torch.uint8).view(-1, *x.shape[1:])
            flat.index_copy_(0, slots, rows.values.view(torch.uint8).view(x.shape))
            scale.transpose(1, 2).index_put_(place, rows.scale.view(x.shape[:-1]))
            kept.append(rows.plain(x.dtype).view(x.shape))
        return kept[0], kept[1]

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [N, K, D] at flat positions `slots` [N]."""
        place = (slots // self.block_size, slots % self.block_size)
        found = [
            _chosen(part[layer].flatten(0, 1), slots, dtype) for part in (self.keys, self.values)
        ]
        if self.scales is not None:
            for x, scale in zip(found, self.scales[layer], strict=True):
                x *= scale.transpose(1, 2)[place][..., None]
        return found[0], found[1]

    def read_blocks(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [N, block_size, K, D] of these blocks [N]."""
        found = [_chosen(part[layer], blocks, dtype) for part in (self.keys, self.values)]
        if self.scales is not None:
            for x, scale in zip(found, self.scales[layer], strict=True):
                x *= scale.index_select(0, blocks).transpose(1, 2)[..., None]
        return found[0], found[1]


def _chosen(x: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a part of the cache, as numbers to compute with."""
    if x.dtype != fp8.E4M3:
        return x.index_select(0, index)
    return x.view(torch.uint8).index_select(0, index).view(x.dtype).to(dtype)


@dataclass(slots=True)
class PrefillLayout:
    """Packed pieces of prompts whose keys and values are also written to the cache.

    A piece may continue what is there already (an earlier chunk of a long prompt, a turn before
    this one): then its keys are read from the cache.
    """

    lengths: list[int]  # new tokens of each prompt
    starts: Tensor
    cache: KVCache
    slots: Tensor  # [N] int64: where the new ones go
    # [sum of key lengths]: all keys of each prompt in order; None: nothing was there before
    key_slots: Tensor | None = None
    key_lengths: list[int] | None = None
    positions: Tensor | None = None  # [N] of the new ones in their prompts
    segments: Segments = field(init=False)

    def __post_init__(self) -> None:
        if self.key_lengths is None:
            self.segments = Segments(self.lengths, self.starts, self.lengths, self.starts)
        else:
            self.segments = Segments(
                self.lengths,
                self.starts,
                self.key_lengths,
                starts_of(self.key_lengths, self.starts.device),
            )

    @property
    def reach(self) -> int:
        """Positions that there are at most."""
        return max(self.key_lengths or self.lengths)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`rope`: cos and sin [positions, D] by which q and k are to be turned; None: they were."""
        assert rope is None or self.positions is not None
        if rope is not None and self.positions is not None and self.cache.takes_kernel(q):
            from reinforge.models.kernels.paged_attention import rotate_and_store

            into = self.cache.keys[layer], self.cache.values[layer]
            q, k = rotate_and_store(q, k, v, *into, self.slots, self.positions, rope)
        else:
            if rope is not None and self.positions is not None:
                cos, sin = (table.index_select(0, self.positions) for table in rope)
                q = rotate(q, cos, sin)
                k = rotate(k, cos, sin)
            k, v = self.cache.write(layer, self.slots, k, v)
        if self.key_slots is not None:
            k, v = self.cache.read(layer, self.key_slots, k.dtype)
        return self.segments.attend(q, k, v, rule)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads x [B, H, D] by cos and sin [B, D]."""
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]


@dataclass(slots=True)
class PagedLayout:
    """Decoding: one new token for each of B rows; its key and value are written first, then it
    attends to all.

    Several rows may be one sequence (`shared`): neighbours in place, each of which sees those
    before it.
    """

    cache: KVCache
    # [B, W] int64 cache blocks of each sequence, in order; unused entries point at any block
    tables: Tensor
    cached: Tensor  # [B] int64 tokens in the cache before the new one: where it goes
    parts: int = 1  # so many programs of a GPU share the keys of a sequence
    shared: bool = False  # keys and values of all rows must be there before any row attends

    @property
    def reach(self) -> int:
        """Positions that there are at most."""
        return self.tables.shape[1] * self.cache.block_size

    @property
    def slots(self) -> Tensor:
        """[B] int64: where the new tokens go."""
        size = self.cache.block_size
        block = self.tables.gather(1, (self.cached // size)[:, None])[:, 0]
        return block * size + self.cached % size

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`rope`: cos and sin [positions, D] by which q and k are to be turned; None: they were."""
        kernel = q.is_cuda and HAS_TRITON
        size = self.cache.block_size
        if self.shared and rope is not None and self.cache.takes_kernel(q):
            from reinforge.models.kernels.paged_attention import rotate_and_store

            into = self.cache.keys[layer], self.cache.values[layer]
            q, k = rotate_and_store(q, k, v, *into, self.tables, self.cached, rope)
            rope = None
        elif self.shared or not kernel:
            if rope is not None:
                cos, sin = (table.index_select(0, self.cached) for table in rope)
                q = rotate(q, cos, sin)
                k = rotate(k, cos, sin)
                rope = None
            self.cache.write(layer, self.slots, k, v)
        if kernel:
            from reinforge.models.kernels.paged_attention import paged_decode

            return paged_decode(
                q,
                k,
                v,
                self.cache.keys[layer],
                self.cache.values[layer],
                self.tables,
                self.cached,
                rule,
                parts=self.parts,
                rope=rope,
                scales=None if self.cache.scales is None else self.cache.scales[layer],
            )
        rows, width = self.tables.shape
        past_k, past_v = (
            x.view(rows, width * size, *x.shape[2:]).transpose(1, 2)
            for x in self.cache.read_blocks(layer, self.tables.reshape(-1), q.dtype)
        )
        at = torch.arange(width * size, device=q.device)[None]
        mask = at <= self.cached[:, None]
        if rule.window is not None:
            mask &= at > self.cached[:, None] - rule.window
        if rule.chunk is not None:
            mask &= at >= self.cached[:, None] // rule.chunk * rule.chunk
        # the G query heads of a key head are G queries of one position
        grouped = q.reshape(rows, k.shape[1], -1, k.shape[2])
        sinks = None if rule.sinks is None else rule.sinks.view(k.shape[1], -1, 1)
        out = dense_attention(
            grouped, past_k, past_v, rule, mask=mask[:, None, None], causal=False, sinks=sinks
        )
        return out.reshape(rows, -1, v.shape[2])
