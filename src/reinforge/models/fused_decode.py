"""One new token per sequence through a Llama-like trunk with few kernels.

The weights are those of the module that trains; what is replaced is the sequence of small
operations between its matrix products: residual and norm are one kernel, rotation and attention
another, and products of few rows are our own. Architectures are known by the parts of their layers,
and `FusedDecode.of` compares what it computes with each layer's own forward before it is used: an
architecture that does anything else keeps the forward of its module.

Legend: B sequences, E hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.models import fp8, fp8_layers
from reinforge.models.attention import HAS_TRITON, KVCache, PagedLayout
from reinforge.models.causal import CausalModel
from reinforge.models.fp8 import Fp8Rows
from reinforge.models.fp8_layers import copy_of
from reinforge.models.fused_linear import joint_weight, separate


def _kernels(x: Tensor) -> Any:
    """The Triton kernels, where they run."""
    if not (x.is_cuda and HAS_TRITON):
        return None
    from reinforge.models.kernels import layer

    return layer


# ---- the small operations ----


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers computes it: in float32, rounded before the weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, into: Fp8Rows | None = None
) -> Tensor:
    """x [B, E] += delta ([B, E], or [parts, B, E] whose parts are summed), in place; the RMS norm
    of the sum. `into`: is set to that norm in FP8 as well.
    """
    if kernels := _kernels(x):
        return kernels.add_norm(x, delta, weight, eps, into)
    if delta is not None:
        x += delta if delta.ndim == 2 else delta.sum(0).to(x.dtype)
    normed = rms_norm(x, weight, eps)
    if into is not None:
        into.set(normed)
    return normed


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of every head of x [B, H, D], in place."""
    if kernels := _kernels(x):
        return kernels.head_norm(x, weight, eps)
    return x.copy_(rms_norm(x, weight, eps))


def silu_mul(x: Tensor) -> Tensor:
    """silu(x[:, :N])·x[:, N:] of x [B, 2N]."""
    if kernels := _kernels(x):
        return kernels.silu_mul(x)
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(slots=True)
class Projection:
    """A linear layer, and the low-rank product that an adapter adds to it: scale·up(down(x))."""

    linear: nn.Linear
    down: nn.Linear | None = None
    up: nn.Linear | None = None
    scale: float = 1.0

    @property
    def size(self) -> int:
        return self.linear.out_features


def add_low_rank(y: Tensor, x: Tensor, parts: Sequence[Projection]) -> Tensor:
    """What the adapters of these projections add to their outputs y [B, N] side by side, in place.
    Computed in the precision of the adapter, as peft does.
    """
    first = 0
    for part in parts:
        if part.down is not None and part.up is not None:
            narrow = F.linear(x.to(part.down.weight.dtype), part.down.weight)
            piece = y[:, first : first + part.size]
            if kernels := _kernels(x):
                kernels.add_low_rank(piece, narrow, part.up.weight, part.scale)
            else:
                piece.copy_(piece + F.linear(narrow, part.up.weight) * part.scale)
        first += part.size
    return y


def _plain(parts: Sequence[Projection]) -> bool:
    return all(part.up is None for part in parts)


def product(x: Tensor, parts: Sequence[Projection], rows: Fp8Rows | None = None) -> Tensor:
    """x [B, K] through projections that read the same input, their outputs side by side. `rows`: x
    in FP8, where somebody has it already.
    """
    linears = [part.linear for part in parts]
    kernels = _kernels(x)
    if copy := copy_of(linears):
        if rows is None:
            rows = Fp8Rows.of(x)
        if kernels and len(x) <= kernels.FP8_ROWS:
            y = kernels.few_rows(rows, copy.rows, copy.bias, dtype=x.dtype)
        else:
            y = fp8.product(rows, copy.rows, copy.bias, x.dtype)
        return add_low_rank(y, x, parts)
    weight, bias = joint_weight(linears)
    if kernels and len(x) <= kernels.FEW_ROWS:
        return add_low_rank(kernels.few_rows(x, weight, bias), x, parts)
    return add_low_rank(F.linear(x, weight, bias), x, parts)


def gated_product(x: Tensor, parts: Sequence[Projection], rows: Fp8Rows | None = None) -> Tensor:
    """silu(first projection)·(second projection) of x [B, K]; `rows`: see `product`."""
    kernels = _kernels(x)
    linears = [part.linear for part in parts]
    if kernels and _plain(parts) and linears[0].bias is None:
        copy = copy_of(linears)
        if copy is not None and len(x) <= kernels.FP8_ROWS:
            rows = Fp8Rows.of(x) if rows is None else rows
            return kernels.few_rows(rows, copy.rows, gated=True, dtype=x.dtype)
        if copy is None and len(x) <= kernels.GATED_ROWS:
            return kernels.few_rows(x, joint_weight(linears)[0], gated=True)
    return silu_mul(product(x, parts, rows))


def product_parts(x: Tensor, part: Projection) -> Tensor:
    """A projection for `add_norm`: [B, N], or [parts, B, N] to be summed."""
    kernels = _kernels(x)
    if kernels and _plain([part]) and part.linear.bias is None:
        copy = copy_of([part.linear])
        if copy is not None and len(x) <= kernels.FP8_PART_ROWS:
            return kernels.few_rows(Fp8Rows.of(x), copy.rows, parts=True)
        if copy is None and len(x) <= kernels.PART_ROWS:
            return kernels.few_rows(x, part.linear.weight, parts=True)
    return product(x, [part])


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
class FusedLayer:
    """The parts of one decoder layer: norm, attention, norm, gated MLP. `FusedDecode` has one per
    layer.
    """

    index: int
    first_norm: _Norm
    second_norm: _Norm
    qkv: list[Projection]
    head_norms: list[_Norm]  # of queries and keys, or none
    out: Projection
    gate_up: list[Projection]
    down: Projection
    head_size: int
    # as the layer itself was heard to say
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None

    @classmethod
    def of(cls, layer: Any) -> FusedLayer:
        if _children(layer) != {"self_attn", "mlp", *NORMS}:
            raise OtherParts
        attention = layer.self_attn
        mlp = layer.mlp
        size = getattr(attention, "head_dim", None)
        if not isinstance(size, int) or not _is_silu(getattr(mlp, "act_fn", None)):
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
            gate_up=[_projection(mlp, name) for name in ("gate_proj", "up_proj")],
            down=_projection(mlp, "down_proj"),
            head_size=size,
        )

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: tuple[Tensor, Tensor],
        layout: PagedLayout,
    ) -> Tensor:
        """x [B, E] is the residual stream before the last layer's `delta` was added, and takes both
        in; the delta of this layer is returned.
        """
        normed, rows = _normed(x, delta, self.first_norm, self.qkv)
        heads = product(normed, self.qkv, rows).view(len(x), -1, self.head_size)
        counts = [part.size // self.head_size for part in self.qkv]
        q, k, v = heads.split(counts, 1)
        for part, norm in zip((q, k), self.head_norms, strict=False):
            head_norm(part, norm.weight, norm.eps)
        attended = layout.attend(
            self.index, q, k, v, self.scale, self.window, self.softcap, rope=rope
        ).reshape(len(x), -1)
        delta = product_parts(attended, self.out)
        normed, rows = _normed(x, delta, self.second_norm, self.gate_up)
        return product_parts(gated_product(normed, self.gate_up, rows), self.down)


def _normed(
    x: Tensor, delta: Tensor | None, norm: _Norm, readers: Sequence[Projection]
) -> tuple[Tensor, Fp8Rows | None]:
    """`add_norm`, in FP8 too where its readers multiply so."""
    into = None
    if copy_of([part.linear for part in readers]) is not None:
        into = Fp8Rows.empty(x.shape[0], x.shape[1], x.device)
    return add_norm(x, delta, norm.weight, norm.eps, into), into


NORMS = ("input_layernorm", "post_attention_layernorm")


def _is_silu(f: Any) -> bool:
    return isinstance(f, nn.SiLU) or f is F.silu or type(f).__name__ == "SiLUActivation"


# ---- the trunk ----


class FusedDecode:
    """The trunk of a model, embedding to last norm, for one new token per sequence. The native
    engine makes one where the architecture allows it, and decodes with it.
    """

    def __init__(self, trunk: Any, layers: list[FusedLayer], norm: _Norm):
        self.embed = trunk.embed_tokens
        self.rotary = trunk.rotary_emb
        self.layers = layers
        self.norm = norm
        # by how many positions they have; captured graphs read them, so none is given up
        self._ropes: dict[int, tuple[Tensor, Tensor]] = {}
        self.shapes = [(layer.qkv[1].size // layer.head_size, layer.head_size) for layer in layers]

    @classmethod
    def of(cls, model: CausalModel) -> FusedDecode | None:
        """None: the trunk is made of other parts, or of such parts in another way."""
        if model.exact:
            return None
        trunk: Any = model.trunk
        try:
            if _children(trunk) != PARTS or type(trunk.embed_tokens) is not nn.Embedding:
                return None
            layers = [FusedLayer.of(layer) for layer in trunk.layers]
            fused = cls(trunk, layers, _Norm.of(trunk.norm))
        except OtherParts:
            return None
        for own, layer in zip(trunk.layers, layers, strict=True):
            if not _proven(own, layer, fused.rotary):
                return None
        return fused if fused._proven(model) else None

    def hidden(self, tokens: Tensor, layout: PagedLayout) -> Tensor:
        """[B, E] last hidden states of the newest token of each sequence."""
        x = self.embed(tokens)
        rope = self._rope_of(x, layout.tables.shape[1] * layout.cache.block_size)
        delta: Tensor | None = None
        for layer in self.layers:
            delta = layer.forward(x, delta, rope, layout)
        return add_norm(x, delta, self.norm.weight, self.norm.eps)

    def _rope_of(self, x: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin of so many positions at least, computed once."""
        size = 1 << (positions - 1).bit_length()
        if size not in self._ropes:
            self._ropes[size] = _rope(self.rotary, x, torch.arange(size, device=x.device))
        return self._ropes[size]

    @torch.no_grad()
    def _proven(self, model: CausalModel) -> bool:
        """Whether the whole trunk gives the module's own hidden states, up to rounding: what is
        done before the first layer and after the last one.
        """
        device = model.device
        layouts = [trial(self.shapes, model.dtype, device) for _ in range(2)]
        tokens = torch.arange(1, len(TRIAL) + 1, device=device)
        ours = self.hidden(tokens, layouts[0]).float()
        with torch.compiler.set_stance("force_eager"):
            theirs = model.hidden(tokens, layouts[1].cached, layouts[1]).float()
        return bool((ours - theirs).norm() <= LOOSE[model.dtype] * theirs.norm())


PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
TRIAL = (0, 3, 20)  # tokens in the cache of the sequences of a trial
BLOCK = 16
# relative differences that rounding explains, of a layer in float32 and of a whole trunk
CLOSE = 1e-4
LOOSE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


def _rope(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(x[None], positions[None])
    return cos[0], sin[0]


def trial(shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> PagedLayout:
    """Some sequences with random keys and values in a small cache, the same ones each time."""
    width = max(TRIAL) // BLOCK + 1
    cache = KVCache.allocate(shapes, len(TRIAL) * width, BLOCK, dtype, device)
    generator = torch.Generator().manual_seed(0)
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    tables = torch.arange(len(TRIAL) * width, device=device).view(len(TRIAL), width)
    return PagedLayout(cache, tables, torch.tensor(TRIAL, device=device))


@dataclass(slots=True)
class _Listener:
    """A layout that writes down what a layer asks its attention for."""

    paged: PagedLayout
    asked: tuple[float, int | None, float | None] | None = None

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        self.asked = (scale, window, softcap)
        return self.paged.attend(0, q, k, v, scale, window, softcap)


@torch.no_grad()
def _proven(own: Any, layer: FusedLayer, rotary: Any) -> bool:
    """Whether the parts of a layer, put together here, are its own forward, in float32. What the
    layer asks its attention for is taken over.
    """
    wide = copy.deepcopy(own)
    separate(wide)
    fp8_layers.plain(wide)
    wide = wide.float()
    generator = torch.Generator().manual_seed(1)
    for name, weight in wide.named_parameters():
        if "lora_B" in name:  # begins at 0, and would hide itself
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    fused = FusedLayer.of(wide)
    device = fused.out.linear.weight.device
    heads = fused.qkv[1].size // fused.head_size
    fused.index = 0
    first, second = (trial([(heads, fused.head_size)], torch.float32, device) for _ in range(2))
    before = torch.randn(len(TRIAL), fused.qkv[0].linear.in_features, generator=generator).to(
        device
    )
    own_rope = _rope(rotary, before, first.cached)
    listener = _Listener(first)
    after = wide.forward(
        before[None],
        position_embeddings=tuple(part[None] for part in own_rope),
        position_ids=first.cached[None],
        layout=listener,
    )
    after = (after[0] if isinstance(after, tuple) else after)[0]
    if listener.asked is None:
        return False
    for one in (layer, fused):
        one.scale, one.window, one.softcap = listener.asked
    x = before.clone()
    rope = _rope(rotary, before, torch.arange(max(TRIAL) + 1, device=device))
    delta = fused.forward(x, None, rope, second)
    ours = x + (delta if delta.ndim == 2 else delta.sum(0))
    return bool((ours - after).norm() <= CLOSE * (after - before).norm())
