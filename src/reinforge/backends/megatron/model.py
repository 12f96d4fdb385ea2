"""A causal LM made of Megatron's transformer layers.

Megatron has the matrices of a layer cut over the ranks of a tensor group (column- and row-parallel
linears), joint q/k/v and gate/up products, norms and residuals. Ours are packs instead of padded
rows (attention is `models/attention.py`, put in as Megatron's `core_attention`), embedding and
head, which every rank has whole, and everything after the hidden states. Neither Transformer Engine
nor apex is needed, nor CUDA.

Legend: T ranks of a tensor group, G key/value heads of this rank, R query heads for each of them, D
head size, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reinforge.backends.distributed.ranks import RankMember
from reinforge.backends.megatron.library import build_layer, configuration, connect
from reinforge.config.megatron import uncut, unknown_in
from reinforge.core.errors import InputError
from reinforge.models.attention import AttentionLayout, PackedLayout
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.causal import CausalModel
from reinforge.models.packed import PackedModel
from reinforge.models.state import StateFlow

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """Where a parameter of transformers lies: in `own`, a parameter of `MegatronModel.module`,
    whose part `view` it is; of a parameter that the tensor group has cut along `dim`, this rank's
    shard.
    """

    own: str
    view: View
    dim: int | None = None

    def take(self, tensor: Tensor) -> Tensor:
        """The shard in a tensor like `own` (a weight, a moment), shaped as in transformers."""
        part = self.view(tensor)
        return part.flatten(0, -tensor.ndim) if part.ndim > tensor.ndim else part

    def put(self, tensor: Tensor, piece: Tensor) -> None:
        part = self.view(tensor)
        part.copy_(piece.reshape(part.shape))

    def cut(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The shard of one rank of the group."""
        return whole if self.dim is None else whole.chunk(size, self.dim)[rank]


def whole(tensor: Tensor) -> Tensor:
    return tensor


class PackedCoreAttention(nn.Module):
    """Megatron's place for attention between the linears.

    `now` is shared by the layers and holds the layout of the pack.
    """

    def __init__(self, now: SimpleNamespace, config: Any, layer_number: int, *_: Any, **__: Any):
        super().__init__()
        self.now = now
        self.layer = layer_number - 1
        self.rule = AttentionRule(scale=config.kv_channels**-0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        """q [N, 1, H, D], k and v [N, 1, K, D] -> [N, 1, H·D]."""
        out: Tensor = self.now.layout.attend(self.layer, q[:, 0], k[:, 0], v[:, 0], self.rule)
        return out.flatten(1)[:, None]


class MegatronModules(nn.Module):
    """The modules of a `MegatronModel`: what is trained, where a transformers model would stand."""

    def __init__(self, embed: nn.Module, layers: nn.ModuleList, norm: nn.Module, head: nn.Module):
        super().__init__()
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.head = head

    def get_input_embeddings(self) -> nn.Module:
        """As transformers calls it: weights are counted by what they are."""
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class MegatronModel(CausalModel):
    """This rank's part of a causal LM, in Megatron's layers. `MegatronWorker` makes it of `hosted`,
    the transformers model, which was loaded whole into host memory. `places` tells where each
    parameter of `hosted` went.
    """

    def __init__(
        self, member: RankMember, hosted: CausalModel, tensor: int, *, trained: bool = True
    ):
        self.group, self.copies = connect(tensor)
        self.tensor, self.place = tensor, dist.get_rank(self.group)
        self.config = hosted.config
        self.tokenizer = hosted.tokenizer
        self.exact = False
        self.rule = hosted.rule
        check_architecture(hosted, tensor)
        self.now = SimpleNamespace(layout=None)
        names = {id(p): name for name, p in hosted.module.named_parameters()}
        self.places: dict[str, WeightPlacement] = {}
        layers = nn.ModuleList()
        settings = configuration(hosted, tensor)
        for i, theirs in enumerate(hosted.layers):
            layers.append(self._layer(settings, i, theirs, names))
        trunk: Any = hosted.trunk
        self.module = (
            MegatronModules(trunk.embed_tokens, layers, trunk.norm, hosted.head)
            .requires_grad_(trained)
            .eval()
        )
        self.plain = self.causal = self.trunk = self.module
        self.head = hosted.head
        for name, part in (
            ("embed", trunk.embed_tokens),
            ("norm", trunk.norm),
            ("head", hosted.head),
        ):
            for key, p in part.named_parameters():
                self.places.setdefault(names[id(p)], WeightPlacement(f"{name}.{key}", whole))
        odd = sorted(set(names.values()) - self.places.keys())
        if odd:
            raise unsupported(hosted, f"a parameter {odd[0]}")
        self.checkpointing = bool(getattr(hosted.plain, "is_gradient_checkpointing", False))
        # the memory model asks for it by transformers' name
        cast(Any, self.module).is_gradient_checkpointing = self.checkpointing
        self.frequencies: Tensor = trunk.rotary_emb.inv_freq.float()
        self.recomputes = False
        prove(self, hosted)
        self.module.to(member.device)
        self.frequencies = self.frequencies.to(member.device)

    def _layer(self, settings: Any, i: int, theirs: Any, names: dict[int, str]) -> nn.Module:
        """Layer `i` with this rank's part of the weights of transformers' layer."""
        attention = theirs.self_attn
        layer = build_layer(
            settings, i, partial(PackedCoreAttention, self.now), normed=hasattr(attention, "q_norm")
        )
        groups = settings.num_query_groups // self.tensor
        size = settings.kv_channels
        queries = settings.num_attention_heads // settings.num_query_groups

        def heads(which: slice, tensor: Tensor) -> Tensor:
            return tensor.view(groups, queries + 2, size, *tensor.shape[1:])[:, which]

        def half(which: int, tensor: Tensor) -> Tensor:
            return tensor.view(2, -1, *tensor.shape[1:])[which]

        q, k, v = (
            partial(heads, which)
            for which in (
                slice(0, queries),
                slice(queries, queries + 1),
                slice(queries + 1, queries + 2),
            )
        )
        found: list[tuple[nn.Module, str, View, int | None]] = [
            (attention.q_proj, "self_attention.linear_qkv", q, 0),
            (attention.k_proj, "self_attention.linear_qkv", k, 0),
            (attention.v_proj, "self_attention.linear_qkv", v, 0),
            (attention.o_proj, "self_attention.linear_proj", whole, 1),
            (theirs.mlp.gate_proj, "mlp.linear_fc1", partial(half, 0), 0),
            (theirs.mlp.up_proj, "mlp.linear_fc1", partial(half, 1), 0),
            (theirs.mlp.down_proj, "mlp.linear_fc2", whole, 1),
            (theirs.input_layernorm, "input_layernorm", whole, None),
            (theirs.post_attention_layernorm, "pre_mlp_layernorm", whole, None),
        ]
        if hasattr(attention, "q_norm"):
            found += [
                (attention.q_norm, "self_attention.q_layernorm", whole, None),
                (attention.k_norm, "self_attention.k_layernorm", whole, None),
            ]
        ours = dict(layer.named_parameters())
        for part, own, view, dim in found:
            for key, p in part.named_parameters():
                place = WeightPlacement(f"layers.{i}.{own}.{key}", view, dim)
                place.put(ours[f"{own}.{key}"].data, place.cut(p.data, self.place, self.tensor))
                self.places[names[id(p)]] = place
        return layer

    @property
    def cut_over_group(self) -> set[str]:
        """Parameters of `module` of which each rank of the tensor group has another shard."""
        return {place.own for place in self.places.values() if place.dim is not None}

    @property
    def summed_over_group(self) -> set[str]:
        """Parameters that every rank has whole, and that see a part of the heads on each."""
        return {
            place.own
            for place in self.places.values()
            if "q_layernorm" in place.own or "k_layernorm" in place.own
        }

    def recompute(self, on: bool) -> None:
        self.recomputes = on and self.checkpointing

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: AttentionLayout,
        states: StateFlow | None = None,
    ) -> Tensor:
        """[N, E]. Every rank of the tensor group has all tokens. No layer keeps state."""
        self.now.layout = layout
        x = self.module.embed(tokens)[:, None]  # [N, 1, E], as Megatron has it
        angles = positions[:, None].float() * self.frequencies
        turns = torch.cat([angles, angles], -1)[:, None, None]
        for layer in self.module.layers:
            run = partial(_run, layer, turns)
            x = (
                checkpoint(run, x, use_reentrant=False)
                if self.recomputes and torch.is_grad_enabled()
                else run(x)
            )
        out: Tensor = self.module.norm(x[:, 0])
        return out


def _run(layer: nn.Module, turns: Tensor, x: Tensor) -> Tensor:
    out: Tensor = layer(x, attention_mask=None, rotary_pos_emb=turns)[0]
    return out


# ---- what can be made of Megatron's layers ----


def unsupported(hosted: PackedModel, why: str) -> InputError:
    return InputError(
        f"{type(hosted.plain).__name__} has {why}, which the backend megatron does not know.",
        where="train.backend",
        fix="Set train.backend=fsdp, which trains every architecture.",
    )


def check_architecture(hosted: CausalModel, tensor: int) -> None:
    """`prove` finds what else is wrong, where it is large: in bfloat16 rounding hides much."""
    said = hosted.config.to_dict()
    if (why := unknown_in(said)) is not None:
        raise unsupported(hosted, why)
    layer = cast(Any, hosted.layers[0])
    if layer.self_attn.o_proj.bias is not None or layer.mlp.down_proj.bias is not None:
        raise unsupported(hosted, "biases behind attention or in its MLP")
    if getattr(hosted.trunk.rotary_emb, "attention_scaling", 1.0) != 1.0:
        raise unsupported(hosted, "a rotary embedding that scales attention")
    if (why := uncut(said, tensor)) is not None:
        raise InputError(
            why, where="train.tensor_parallel", fix="Set it to a number that divides them."
        )


@torch.no_grad()
def prove(ours: MegatronModel, hosted: CausalModel) -> None:
    """The same log-probs on a few tokens, before anything is trained.

    Run by all ranks of a tensor group at once.
    """
    size = hosted.head.weight.shape[0]
    tokens = torch.arange(12) * 7919 % min(size, 1000) % size
    lengths = [7, 5]
    positions = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.tensor([0, 7, 12], dtype=torch.int32)
    found, wanted = (
        m.logits(m.hidden(tokens, positions, PackedLayout(lengths, starts))).log_softmax(-1)
        for m in (ours, hosted)
    )
    error = float((found - wanted).abs().mean())
    if not error < (1e-3 if hosted.dtype == torch.float32 else 0.1):
        raise unsupported(
            hosted, f"other log-probs in Megatron's layers (mean difference {error:.3g})"
        )
