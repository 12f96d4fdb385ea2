"""What every model of ours has in common: a transformers trunk under our packed attention, and how
scalars are read from it.

Legend: N tokens of a pack, M trained tokens, S samples, E hidden size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.core import mlp_tiles
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.models import attention, exact_norm, quick_norm, rope
from reinforge.models.adapter_dropout import dropouts
from reinforge.models.attention import AttentionLayout, PackedLayout
from reinforge.models.checkpointing import set_function
from reinforge.models.compile_cache import cache_on_disk
from reinforge.models.exact import RowWiseMode
from reinforge.models.exact_attention import layout as exact_layout
from reinforge.models.experts import replace_experts
from reinforge.models.fused_linear import replace_linears
from reinforge.models.hand_on import hand_on
from reinforge.models.mixers import holds_mixer, keeping, recomputed, replace_mixers
from reinforge.models.quick_layer import replace_layers
from reinforge.models.quick_mlp import replace_mlps
from reinforge.models.quick_rope import replace_rope
from reinforge.models.sequence import SequenceSlices, SliceReading, Ulysses
from reinforge.models.state import PackedStates, StateFlow
from reinforge.models.tiled_mlp import tile_mlps


class PackedModel:
    """A transformers model (or its peft wrapper) whose trunk runs on sequences that lie end to end.

    `value_head` reads a number from a hidden state: the score head of a `ScalarModel` (or several,
    one for each of its attributes), or what `CausalModel.add_value_head` put there, or nothing.
    """

    value_head: nn.Linear | None = None
    # the longest sequence that is computed right; None: any (see `models.rope`)
    reach: int | None = None
    recomputing: bool = False  # layers are computed again in the backward pass
    mixers: int = 0  # layers that keep state: convolutions, recurrences (see `models.state`)
    # where it computes; None: where its weights are, which may lie in host memory between passes
    computes_on: torch.device | None = None
    # the ranks that each compute a part of every pack; None: this process computes it all
    slices: SequenceSlices | None = None

    def __init__(self, module: nn.Module, tokenizer: Any = None, *, exact: bool = False):
        # what is trained and saved: the transformers model, or its peft wrapper
        self.module = module
        self.plain: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
        # exact: see `models.exact`
        self.tokenizer = tokenizer
        self.exact = exact
        self.config = self.plain.config.get_text_config()
        self.trunk: Any = self.plain.base_model
        if self.trunk is self.plain:  # its class names a part that it does not have (Llama 4)
            self.trunk = self.plain.model
        self.reach = rope.reach(self.config)
        rope.hold_still(self.trunk)
        hand_on(self.trunk)
        attention.register()
        if attention.NAME not in {
            self.plain.config._attn_implementation,
            self.config._attn_implementation,
        }:
            self.plain.set_attn_implementation(attention.NAME)
        _silence_dropout(module.eval())
        if exact and self.device.type == "cuda" and not attention.HAS_TRITON:
            raise InputError(
                "exact log-probs on a GPU need triton, which is not installed.",
                where="model.exact",
                fix="pip install triton",
            )
        replace_experts(self.plain)
        self.mixers = replace_mixers(module)
        if exact:
            exact_norm.replace_norms(module)
        elif torch.cuda.is_available():  # it may be moved there later
            quick_norm.replace_norms(module)
            replace_mlps(module)
            replace_rope(module)
            replace_linears(module)
            replace_layers(module)

    @property
    def context(self) -> int | None:
        """The longest sequence that the model was made for."""
        return rope.context(self.config)

    @property
    def device(self) -> torch.device:
        return self.computes_on or next(self.trunk.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.trunk.parameters()).dtype

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers. LongCat counts two to a layer: one attention each."""
        stacks = [part for part in self.trunk.modules() if isinstance(part, nn.ModuleList)]
        counts = (self.config.num_hidden_layers, getattr(self.config, "num_layers", None))
        return next(part for count in counts for part in stacks if len(part) == count)

    def compile_layers(self) -> None:
        """torch.compile of each decoder layer, attention left out: norms, rotary embedding and
        activations are fused. All layers of a class share one compilation, for any number of
        tokens; training and decoding make one each. The next process finds them on disk.
        """
        cache_on_disk()  # before the compiler starts processes of its own
        import torch._dynamo
        import torch._inductor.config

        assert not self.exact, "a compiler may add up in another order for another number of tokens"
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        # tiles of sums by rule, not by which was faster this time: another tile has other bits
        torch._inductor.config.deterministic = True
        attention.register(compiled=True)
        for layer in self.layers:
            if not holds_mixer(layer):  # who asks for its state asks the host
                layer.compile(dynamic=True)

    def recompute(self, on: bool) -> None:
        """Lets layers with gradient checkpointing do it.

        Only their own flag is set: the rest stays in evaluation mode, where no architecture adds
        noise (router jitter, dropout of its own making) that the sampling policy did not have.
        """
        self.recomputing = False
        for part in self.module.modules():
            if getattr(part, "gradient_checkpointing", False):
                self.recomputing = on
                part.training = on
                if self.mixers:
                    set_function(part, recomputed)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: AttentionLayout,
        states: StateFlow | None = None,
    ) -> Tensor:
        """[N, E] last hidden states of N tokens whose relations `layout` describes. `states`: those
        of its layers that keep state.
        """
        assert states is not None or not self.mixers, "a model that keeps state, and no state"
        if self.exact:
            layout = exact_layout(layout)
        elif mlp_tiles.in_tiles(len(tokens)):
            # dropout of an adapter is decided for a whole pack
            tile_mlps(self.trunk, self.recomputing and not any(dropouts(self.module)))
        with RowWiseMode() if self.exact else nullcontext(), keeping(states):
            out = self.trunk(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                layout=layout,
                places=positions,
            )
        hidden: Tensor = out.last_hidden_state.squeeze(0)
        # Mamba adds layers up in float32, and its head reads the precision of the model
        return hidden.to(self.dtype) if hidden.dtype == torch.float32 else hidden

    def states(self, batch: Batch) -> Tensor:
        """[N, E] hidden states of a pack; of this rank's slice of it where there are `slices`.

        `reading` finds places in them.
        """
        self._check_reach(batch)
        whole = PackedLayout(batch.lengths, batch.starts, batch.prefix)
        if self.slices is None:
            return self.hidden(batch.tokens, batch.positions, whole, self.packed_states(batch))
        if self.mixers:
            raise InputError(
                f"{self.mixers} layers of {type(self.plain).__name__} keep state beside keys and"
                " values, which a rank with a slice of a pack does not have.",
                where="train.sequence_parallel",
                fix="Leave it at 1.",
            )
        here = self.slices.span(batch.n_tokens)
        if batch.n_tokens < self.slices.size:
            # every rank computes all of it, and the gradient of its own rows
            return self.hidden(batch.tokens, batch.positions, whole)[here]
        return self.hidden(
            batch.tokens[here], batch.positions[here], Ulysses(whole, self.slices, batch.n_tokens)
        )

    def packed_states(self, batch: Batch) -> PackedStates | None:
        """How the states of a pack flow; None: there are none."""
        return PackedStates(batch.lengths, self.device, batch.prefix) if self.mixers else None

    def _check_reach(self, batch: Batch) -> None:
        longest = max((len(s.tokens) for s in batch.samples), default=0)
        if self.reach is not None and longest > self.reach:
            raise InputError(
                f"a sequence of {longest} tokens is past the {self.reach} of this model's own"
                " rotary embedding; past them its frequencies would depend on the length of each"
                " sequence.",
                where="data.max_length",
                fix=f"Keep prompt and answer together within {self.reach} tokens.",
            )

    def reading(self, batch: Batch, places: Tensor) -> SliceReading:
        """How the hidden states at `places` of a pack are read."""
        return SliceReading.of(places, batch.n_tokens, self.slices)

    def values(self, batch: Batch, states: Tensor | None = None, *, after: bool = False) -> Tensor:
        """[M] float32, or [M, A] of A heads: the head before each trained token, at row t-1 for
        token t, so it cannot know what was sampled (a critic); or `after` it, at row t (a reward
        model). `states` are those of the pack, where the caller has them.
        """
        states = self.states(batch) if states is None else states
        places = self.reading(batch, batch.targets if after else batch.sources)
        return places.join(self.read(places.rows(states)))

    def last_values(self, batch: Batch, states: Tensor | None = None) -> Tensor:
        """[S] float32, or [S, A] of A heads: the head at the last token of every sample; 0 for a
        sample that a pack left out (nothing to train).
        """
        states = self.states(batch) if states is None else states
        places = self.reading(batch, batch.ends.clamp(min=0))
        found = places.join(self.read(places.rows(states)))
        left_out = (batch.ends < 0).view(-1, *[1] * (found.ndim - 1))
        return torch.where(left_out, 0.0, found)

    def read(self, rows: Tensor) -> Tensor:
        """The value head, in float32 whatever the model's precision: bfloat16 keeps three digits,
        and advantages are differences. [n] of one head, [n, A] of A.
        """
        head = self.value_head
        assert head is not None, "this model has no value head"
        found = F.linear(
            rows.float(), head.weight.float(), None if head.bias is None else head.bias.float()
        )
        return found[:, 0] if found.shape[1] == 1 else found


def _silence_dropout(module: nn.Module) -> None:
    """Dropout makes the policy that trains another one than the policy that sampled: it is off
    everywhere.
    """
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        # architectures that call F.dropout keep the rate as a number: dropout, layerdrop, ...
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
