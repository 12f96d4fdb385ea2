"""New tokens through a Llama-like trunk with few kernels: one for each of several sequences, or
pieces of prompts.

The weights are those of the module that trains; what is replaced is the sequence of small
operations between its matrix products (`models.decode_ops`; `models.exact_ops` in exact mode).
Architectures are known by the parts of their layers, and `FusedDecode.of` compares what it computes
with each layer's own forward before it is used, in exact mode to the bit: an architecture that does
anything else keeps the forward of its module.

Legend: B sequences, E hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.core.kv_pool import block_tokens
from reinforge.models import decode_ops, exact_ops, fp8_layers
from reinforge.models.attention import KVCache, KVShape, PagedLayout, PrefillLayout
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.causal import CausalModel
from reinforge.models.decode_ops import DecodeOps
from reinforge.models.decoding import decoding
from reinforge.models.exact import RowWiseMode
from reinforge.models.exact_attention import ExactPaged
from reinforge.models.fp8 import Fp8Rows
from reinforge.models.fp8_layers import copy_of
from reinforge.models.fused_experts import FusedExperts
from reinforge.models.fused_linear import separate
from reinforge.models.mixture import ModelMixture
from reinforge.models.projections import Projection
from reinforge.models.routing import Replay, Routers, holds_experts, release

# ---- a layer ----


class OtherParts(Exception):
    """A trunk is made of other parts than those that are known here."""


@dataclass(slots=True)
class _Norm:
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        eps = getattr(module, "variance_epsilon", None)
        weight = getattr(module, "weight", None)
        if not isinstance(eps, float) or not isinstance(weight, nn.Parameter):
            raise OtherParts
        if len(list(module.parameters())) > 1:
            raise OtherParts
        return cls(weight, eps)


def _projection(parent: Any, name: str) -> Projection:
    """The plain linear layer of this name, with the LoRA adapter around it if there is one."""
    found = getattr(parent, name, None)
    if type(found) is nn.Linear:
        return Projection(_whole(found))
    adapters = getattr(found, "lora_A", None)
    if found is None or adapters is None:
        raise OtherParts
    active = [name for name in found.active_adapters if name in adapters]
    if found.merged or found.disable_adapters or found.lora_variant or len(active) != 1:
        raise OtherParts
    down, up = adapters[active[0]], found.lora_B[active[0]]
    if type(found.base_layer) is not nn.Linear or up.bias is not None:
        raise OtherParts
    return Projection(
        _whole(found.base_layer), _whole(down), _whole(up), float(found.scaling[active[0]])
    )


def _whole(linear: nn.Linear) -> nn.Linear:
    """Refuses one whose weights lie elsewhere in part."""
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
        raise OtherParts
    return linear


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


@dataclass(slots=True)
class _GatedMLP:
    gate_up: list[Projection]
    down: Projection

    @classmethod
    def of(cls, mlp: Any) -> _GatedMLP:
        if not _is_silu(getattr(mlp, "act_fn", None)):
            raise OtherParts
        gate_up = [_projection(mlp, name) for name in ("gate_proj", "up_proj")]
        return cls(gate_up, _projection(mlp, "down_proj"))

    def forward(
        self, ops: DecodeOps, x: Tensor, delta: Tensor | None, norm: _Norm
    ) -> Tensor | None:
        normed, rows = _normed(ops, x, delta, norm, self.gate_up)
        return ops.add_product(x, ops.gated_product(normed, self.gate_up, rows), self.down)


@dataclass(slots=True)
class _ExpertBlock:
    block: Any
    fused: FusedExperts | None  # None: by the forward of its module

    @classmethod
    def of(cls, block: Any, exact: bool) -> _ExpertBlock:
        return cls(block, None if exact else FusedExperts.of(block))

    def forward(self, ops: DecodeOps, x: Tensor, delta: Tensor | None, norm: _Norm) -> Tensor:
        normed = ops.add_norm(x, delta, norm.weight, norm.eps)
        if self.fused is not None:
            return self.fused.forward(normed)
        said = self.block(normed[None])
        found: Tensor = said[0] if isinstance(said, tuple) else said
        return found[0]


@dataclass(slots=True)
class FusedLayer:
    """The parts of one decoder layer: norm, attention, norm, gated MLP or experts. `FusedDecode`
    has one per layer.
    """

    index: int
    first_norm: _Norm
    second_norm: _Norm
    qkv: list[Projection]
    head_norms: list[_Norm]  # of queries and keys, or none
    out: Projection
    mlp: _GatedMLP | _ExpertBlock
    head_size: int
    ops: DecodeOps
    # as the layer itself was heard to say
    rule: AttentionRule = field(default_factory=AttentionRule)

    @classmethod
    def of(cls, layer: Any, *, exact: bool = False) -> FusedLayer:
        if _children(layer) != {"self_attn", "mlp", *NORMS}:
            raise OtherParts
        attention = layer.self_attn
        mlp = layer.mlp
        size = getattr(attention, "head_dim", None)
        if not isinstance(size, int):
            raise OtherParts
        head_norms = []
        if hasattr(attention, "q_norm") or hasattr(attention, "k_norm"):
            head_norms = [_Norm.of(getattr(attention, n, None)) for n in ("q_norm", "k_norm")]
        return cls(
            int(attention.layer_idx),
            first_norm=_Norm.of(layer.input_layernorm),
            second_norm=_Norm.of(layer.post_attention_layernorm),
            qkv=[_projection(attention, name) for name in ("q_proj", "k_proj", "v_proj")],
            head_norms=head_norms,
            out=_projection(attention, "o_proj"),
            mlp=_ExpertBlock.of(mlp, exact) if holds_experts(mlp) else _GatedMLP.of(mlp),
            head_size=size,
            ops=exact_ops if exact else decode_ops,
        )

    @property
    def shape(self) -> KVShape:
        """Of its cache."""
        return KVShape(self.qkv[1].size // self.head_size, self.head_size, self.head_size)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: tuple[Tensor, Tensor],
        layout: PagedLayout | PrefillLayout | ExactPaged,
    ) -> Tensor | None:
        """x [B, E] is the residual stream before the last layer's `delta` was added, and takes both
        in; the delta of this layer is returned. None: nothing is left to be added.
        """
        ops = self.ops
        normed, rows = _normed(ops, x, delta, self.first_norm, self.qkv)
        heads = ops.product(normed, self.qkv, rows).view(len(x), -1, self.head_size)
        counts = [part.size // self.head_size for part in self.qkv]
        q, k, v = heads.split(counts, 1)
        if self.head_norms:
            q, k = (
                ops.head_norm(part, norm.weight, norm.eps)
                for part, norm in zip((q, k), self.head_norms, strict=True)
            )
        attended = layout.attend(self.index, q, k, v, self.rule, rope=rope).reshape(len(x), -1)
        delta = ops.add_product(x, attended, self.out)
        return self.mlp.forward(ops, x, delta, self.second_norm)


def _normed(
    ops: DecodeOps, x: Tensor, delta: Tensor | None, norm: _Norm, readers: Sequence[Projection]
) -> tuple[Tensor, Fp8Rows | None]:
    """`add_norm`, in FP8 too where its readers multiply so."""
    into = None
    if copy_of([part.linear for part in readers]) is not None:
        into = Fp8Rows.empty(x.shape[0], x.shape[1], x.device)
    return ops.add_norm(x, delta, norm.weight, norm.eps, into), into


NORMS = ("input_layernorm", "post_attention_layernorm")


def _is_silu(f: Any) -> bool:
    return isinstance(f, nn.SiLU) or f is F.silu or type(f).__name__ == "SiLUActivation"


# ---- the trunk ----


class FusedDecode:
    """The trunk of a model, embedding to last norm, for one new token per sequence and, unless it
    is exact, for prompts. The native engine makes one where the architecture allows it.
    """

    def __init__(self, trunk: Any, layers: list[FusedLayer], norm: _Norm, exact: bool):
        self.embed = trunk.embed_tokens
        self.rotary = trunk.rotary_emb
        self.layers = layers
        self.norm = norm
        self.exact = exact
        # by how many positions they have; captured graphs read them, so none is given up
        self._ropes: dict[int, tuple[Tensor, Tensor]] = {}
        self.shapes = [layer.shape for layer in layers]

    @classmethod
    def of(cls, model: CausalModel) -> FusedDecode | None:
        """None: the trunk is made of other parts, or of such parts in another way."""
        if isinstance(model, ModelMixture):  # its trunk is that of one of two models
            return None
        trunk: Any = model.trunk
        exact = model.exact
        try:
            if _children(trunk) != PARTS or type(trunk.embed_tokens) is not nn.Embedding:
                return None
            layers = [FusedLayer.of(layer, exact=exact) for layer in trunk.layers]
            fused = cls(trunk, layers, _Norm.of(trunk.norm), exact)
        except OtherParts:
            return None
        for own, layer in zip(trunk.layers, layers, strict=True):
            if not _proven(own, layer, fused.rotary, exact):
                return None
        rows = EXACT_ROWS if exact else (len(TRIAL),)
        return fused if all(fused._proven(model, n) for n in rows) else None

    def hidden(self, tokens: Tensor, layout: PagedLayout | PrefillLayout) -> Tensor:
        """[B, E] last hidden states of new tokens: of the newest of each sequence, or of prompts.
        Those in exact mode belong to the module, whose forward a pack of training repeats.
        """
        with decoding(), _mode(self.exact):
            x = self.embed(tokens)
            rope = self._rope_of(x, layout.reach)
            shared = _layout(layout, self.exact)
            delta: Tensor | None = None
            for layer in self.layers:
                delta = layer.forward(x, delta, rope, shared)
            return self.layers[0].ops.add_norm(x, delta, self.norm.weight, self.norm.eps)

    def _rope_of(self, x: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin of so many positions at least, computed once."""
        size = 1 << (positions - 1).bit_length()
        if size not in self._ropes:
            self._ropes[size] = _rope(self.rotary, x, torch.arange(size, device=x.device))
        return self._ropes[size]

    @torch.no_grad()
    def _proven(self, model: CausalModel, rows: int) -> bool:
        """Whether the whole trunk gives the module's own hidden states for so many sequences, up to
        rounding, or to the bit in exact mode: what is done before the first layer and after the
        last one.
        """
        device = model.device
        layouts = [trial(self.shapes, model.dtype, device, rows) for _ in range(2)]
        tokens = torch.arange(1, rows + 1, device=device) % self.embed.num_embeddings
        routers = Routers.of(model)
        with nullcontext() if routers is None else routers.watched():
            ours = self.hidden(tokens, layouts[0])
            if routers is not None and routers.seen and not self.exact:
                # a token goes elsewhere for a rounding, and that is no difference of the trunks
                routers.give(routers.taken(), Replay.ON)
        try:
            with torch.compiler.set_stance("force_eager"):
                theirs = model.hidden(tokens, layouts[1].cached, layouts[1])
        finally:
            if routers is not None:
                routers.give(None, Replay.OFF)
        if self.exact:
            return torch.equal(ours, theirs)
        gap = (ours.float() - theirs.float()).norm()
        return bool(gap <= LOOSE[model.dtype] * theirs.float().norm())


PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
TRIAL = (0, 3, 150)  # tokens in the cache of the sequences of a trial, again and again
EXACT_ROWS = (3, 70)
FAR = 1 << 20  # positions further on, where a layer must do the same with the same rotation
# relative differences that rounding explains, of a layer in float32 and of a whole trunk
CLOSE = 1e-4
LOOSE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


def _mode(exact: bool) -> AbstractContextManager[Any]:
    return RowWiseMode() if exact else nullcontext()


def _layout(
    layout: PagedLayout | PrefillLayout, exact: bool
) -> PagedLayout | PrefillLayout | ExactPaged:
    if not exact:
        return layout
    assert isinstance(layout, PagedLayout), "prompts of an exact model"
    return ExactPaged.of(layout)


def _rope(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(x[None], positions[None])
    return cos[0], sin[0]


def trial(
    shapes: list[KVShape], dtype: torch.dtype, device: torch.device, rows: int = len(TRIAL)
) -> PagedLayout:
    """Some sequences with random keys and values in a small cache, the same ones each time."""
    block = block_tokens(device.type)
    width = max(TRIAL) // block + 1
    cache = KVCache.allocate(shapes, rows * width, block, dtype, device)
    generator = torch.Generator().manual_seed(0)
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    tables = torch.arange(rows * width, device=device).view(rows, width)
    lengths = [TRIAL[row % len(TRIAL)] for row in range(rows)]
    return PagedLayout(cache, tables, torch.tensor(lengths, device=device))


@dataclass(slots=True)
class _Listener:
    """A layout that writes down what a layer asks its attention for."""

    paged: PagedLayout | PrefillLayout | ExactPaged
    asked: AttentionRule | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        self.asked = rule
        return self.paged.attend(0, q, k, v, rule)


def _own_forward(
    layer: Any, x: Tensor, rope: tuple[Tensor, Tensor], positions: Tensor, layout: _Listener
) -> Tensor:
    """[B, E] of x [B, E] through the layer itself."""
    out = layer.forward(
        x[None],
        position_embeddings=tuple(part[None] for part in rope),
        position_ids=positions[None],
        layout=layout,
    )
    found: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
    return found


@torch.no_grad()
def _proven(own: Any, layer: FusedLayer, rotary: Any, exact: bool) -> bool:
    """Whether the parts of a layer, put together here, are its own forward: in float32 up to
    rounding; in exact mode to the bit, in its own precision. What the layer asks its attention for
    is taken over.
    """
    copied = copy.deepcopy(own)
    separate(copied)
    fp8_layers.plain(copied)
    release(copied)
    if not exact:
        copied = copied.float()
    try:
        return _same(copied, layer, rotary, exact)
    finally:
        # forwards of its parts refer to them in circles, which wait for the garbage collector, and
        # a layer of a 7B model takes a GiB
        for weight in copied.parameters():
            weight.data = weight.new_empty(0)


def _same(copied: Any, layer: FusedLayer, rotary: Any, exact: bool) -> bool:
    """`_proven` of a copy of the layer."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in copied.named_parameters():
        if "lora_B" in name:  # begins at 0, and would hide itself
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    fused = FusedLayer.of(copied, exact=exact)
    first_weight = fused.out.linear.weight
    device = first_weight.device
    fused.index = 0
    first, second, third = (trial([fused.shape], first_weight.dtype, device) for _ in range(3))
    before = torch.randn(len(TRIAL), fused.qkv[0].linear.in_features, generator=generator)
    before = before.to(first_weight)
    with _mode(exact):
        own_rope = _rope(rotary, before, first.cached)
        listener = _Listener(_layout(first, exact))
        after, later = (
            _own_forward(copied, before, own_rope, first.cached + shift, layout)
            for shift, layout in ((0, listener), (FAR, _Listener(_layout(third, exact))))
        )
        if not torch.equal(after, later):  # what depends on a position in other ways than by `rope`
            return False
        if listener.asked is None or listener.asked.sinks is not None:
            return False
        for one in (layer, fused):
            one.rule = listener.asked
        x = before.clone()
        rope = _rope(rotary, before, torch.arange(max(TRIAL) + 1, device=device))
        delta = fused.forward(x, None, rope, _layout(second, exact))
    ours = x if delta is None else x + (delta if delta.ndim == 2 else delta.sum(0))
    if exact:
        return torch.equal(ours, after)
    return bool((ours - after).norm() <= CLOSE * (after - before).norm())
