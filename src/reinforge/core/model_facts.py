"""The numbers of a model that its memory and its time depend on.

Imports no torch: `plan` asks before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reinforge.core.state_facts import StateFacts

FLOAT = 4  # bytes
# MLPs of two matrices
UNGATED = {"gpt2", "opt", "gpt_neox", "gptj", "gpt_neo", "bloom", "falcon", "phi", "codegen", "mpt"}


def setting(config: Any, name: str) -> Any:
    """An attribute of a transformers configuration, None where it has none. Of one that layers have
    in several sizes (heads of Gemma 4), which transformers does not give, it is that of most.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return vars(config).get(name)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the memory of a model depends on, as plain numbers. Predictions of `plan` and the sizes
    of micro-batches are computed from it.

    `weights`, `trained`, `matrices` and `met` are counted parameters (`models/weight_kinds.py`);
    without them they are computed, as if every layer attended.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    value_dim: int | None = None  # of a head's values; None: as of its keys
    itemsize: int = 2
    rank: int | None = None  # of an adapter; None: all weights are trained
    targets: tuple[str, ...] | None = None  # modules with an adapter; None: all linear ones
    checkpointing: bool = False
    on_host: bool = False  # what checkpointing keeps waits in host memory
    compiled: bool = False
    fused: bool = False  # norms and gates are a kernel each: 16 bits on a GPU
    optimizer: str = "adamw"  # its name
    offload: bool = False  # masters and moments in host memory
    split: bool = False  # masters are the weights and what they lack
    narrow: bool = False  # gradients are added up in the weights' own precision
    gated: bool = True
    experts: int = 1
    active: int = 1  # experts per token
    shared: int = 0  # inner size of experts that every token meets
    weights: int | None = None
    trained: int | None = None
    gradients: int | None = None  # their bytes on one device; None: of all that is trained
    matrices: int | None = None  # counted in the layers; None: computed from the sizes
    met: int | None = None  # of these, by one token
    packed: int = 0  # of the weights, in NF4
    head_norms: bool = False  # queries and keys have norms of their own
    # ranks that FSDP2 cuts the weights over; None: they are whole. All counts are of the whole
    shards: int | None = None
    state: StateFacts | None = None  # of layers that keep state; None: all attend

    @classmethod
    def of(cls, config: Any, **more: Any) -> ModelFacts:
        """From a transformers configuration (of the text model).

        `more` are the fields that it does not know.
        """

        def first(*names: str) -> int | None:
            return next(
                (
                    int(value)
                    for name in names
                    if isinstance(value := setting(config, name), int) and value
                ),
                None,
            )

        hidden = first("hidden_size") or 1
        heads = first("num_attention_heads") or 1
        experts = first("num_local_experts", "num_experts", "n_routed_experts") or 1
        inner = (
            (first("moe_intermediate_size") if experts > 1 else None)
            or first("intermediate_size", "ffn_dim", "n_inner")
            or 4 * hidden
        )
        if setting(config, "block_auto_adjust_ff_dim"):
            inner = _adjusted(config, inner)
        # of latent attention, whose cache holds keys and values of all heads
        latent = (first("qk_nope_head_dim") or 0) + (first("qk_rope_head_dim") or 0)
        found = {
            "layers": first("num_hidden_layers") or 1,
            "hidden": hidden,
            "inner": inner,
            "heads": heads,
            "kv_heads": heads if latent else first("num_key_value_heads") or heads,
            "head_dim": latent or first("head_dim") or hidden // heads,
            "value_dim": first("v_head_dim"),
            "vocab": first("vocab_size") or 1,
            "tied": bool(getattr(config, "tie_word_embeddings", False)),
            "experts": experts,
            "active": (first("num_experts_per_tok") if experts > 1 else None) or 1,
            "shared": _shared(first, inner) if experts > 1 else 0,
            "gated": getattr(config, "model_type", "") not in UNGATED,
            "state": StateFacts.of(config),
        }
        return cls(**{**found, **more})

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def value(self) -> int:
        return self.kv_heads * (self.value_dim or self.head_dim)

    @property
    def attended(self) -> int:
        """What attention gives."""
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def attending(self) -> int:
        """Layers with keys and values."""
        return self.layers if self.state is None else self.state.attending

    @property
    def slot_bytes(self) -> int:
        """States of one sequence."""
        if self.state is None:
            return 0
        return self.state.narrow * self.itemsize + self.state.wide * FLOAT

    def linears(self) -> dict[str, tuple[int, int, int]]:
        """(inputs, outputs, how many) of each matrix of a layer.

        Architectures with other names have matrices of these sizes.
        """
        mlp = {
            "up_proj": (self.hidden, self.inner, self.experts),
            "down_proj": (self.inner, self.hidden, self.experts),
        }
        return {
            "q_proj": (self.hidden, self.query, 1),
            "k_proj": (self.hidden, self.key, 1),
            "v_proj": (self.hidden, self.value, 1),
            "o_proj": (self.attended, self.hidden, 1),
            **({"gate_proj": mlp["up_proj"]} if self.gated else {}),
            **mlp,
        }

    @property
    def wide(self) -> int:
        """Inner numbers of the MLP, or of the experts, that one token meets."""
        return self.inner * self.active + self.shared

    def body(self, active: bool = False) -> int:
        """Parameters of the layers; `active`: those that one token meets."""
        counted = self.met if active else self.matrices
        if counted is not None:
            return counted
        return self.layers * sum(
            a * b * (min(n, self.active) if active else n) for a, b, n in self.linears().values()
        )

    def parameters(self) -> int:
        return (
            self.weights
            or self.body()
            + (1 if self.tied else 2) * self.vocab * self.hidden
            + (2 * self.layers + 1) * self.hidden
        )

    def learning(self) -> int:
        """Parameters that the optimizer sees."""
        if self.trained is not None or self.rank is None:
            return self.parameters() if self.trained is None else self.trained
        adapted = [
            size
            for name, size in self.linears().items()
            if self.targets is None or name in self.targets
        ]
        return self.layers * self.rank * sum((a + b) * n for a, b, n in adapted)

    @property
    def masters(self) -> bool:
        """Whether what is trained needs a float32 copy: adapters are float32 themselves."""
        return self.itemsize < FLOAT and self.rank is None


def _adjusted(config: Any, inner: int) -> int:
    """What LFM2's layers make of the inner size that its configuration says."""
    unit = int(config.block_multiple_of)
    return unit * math.ceil(int(config.block_ffn_dim_multiplier * int(2 * inner / 3)) / unit)


def _shared(first: Callable[..., int | None], inner: int) -> int:
    """Inner size of the experts that every token meets beside those that are chosen for it."""
    one = first("shared_expert_intermediate_size", "shared_intermediate_size")
    return one or inner * (first("n_shared_experts", "num_shared_experts") or 0)
