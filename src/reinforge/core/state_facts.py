"""What layers that keep state take, by a model's configuration alone.

Imports no torch: `plan` asks before anything is loaded. `models.state` has the states themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

# of layers that keep state beside keys and values in a way that packs and the engine know
STATEFUL = frozenset({"conv", "linear_attention", "mamba", "hybrid"})
# of layers that have keys and values
ATTENDING = frozenset(
    {"attention", "full_attention", "sliding_attention", "chunked_attention", "hybrid"}
)
# these keep state too, and do not list their layers
RECURRENT = frozenset({"bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2"})
CHUNK = 64  # tokens of a recurrence that are computed at once


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What the layers of a hybrid take, as counts of numbers; `ModelFacts` holds it."""

    attending: int  # layers with keys and values
    narrow: int = 0  # of one sequence, in the model's precision: inputs of convolutions
    wide: int = 0  # of one sequence, in float32: states of recurrences
    work: int = 0  # of one token while it is computed, in float32, in the layer with the most

    @classmethod
    def of(cls, config: Any) -> StateFacts | None:
        """From a transformers configuration (of the text model); None: no layer keeps state."""
        kinds = layer_kinds(config)
        mixers = sum(kind in STATEFUL for kind in kinds)
        if not mixers:
            return None
        narrow, wide, work = _mixer(config)
        attending = sum(kind in ATTENDING for kind in kinds)
        return cls(attending, mixers * narrow, mixers * wide, work)


def layer_kinds(config: Any) -> list[str]:
    """Of each layer, as far as a configuration lists them or has a rule for them."""
    for key in ("layer_types", "layers_block_type"):
        listed = getattr(config, key, None)
        if isinstance(listed, list):
            return [kind for kind in listed if isinstance(kind, str)]
    name = getattr(config, "model_type", None)
    if name not in RECURRENT:
        return []
    layers = range(int(config.num_hidden_layers))
    if name == "falcon_h1":
        return ["hybrid" for _ in layers]
    attending: Iterable[int] = ()
    if name == "bamba":
        attending = config.attn_layer_indices or ()
    if name == "jamba":
        attending = layers[config.attn_layer_offset :: config.attn_layer_period]
    return ["attention" if layer in attending else "mamba" for layer in layers]


def _mixer(config: Any) -> tuple[int, int, int]:
    """Of one layer that keeps state: `narrow`, `wide` and `work` of StateFacts.

    The factors of `work` were measured on a CPU, as the highest memory beside the inputs while
    1,024 tokens of two sequences were computed, and rounded up.
    """

    def first(*names: str) -> int:
        found = (getattr(config, name, None) for name in names)
        return next((int(value) for value in found if isinstance(value, int)), 0)

    hidden = first("hidden_size")
    taps = first("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel") - 1
    if first("conv_L_cache"):
        return taps * hidden, 0, 0
    heads = first("linear_num_value_heads", "linear_num_heads")
    if heads:
        key = first("linear_key_head_dim", "linear_head_dim")
        value = first("linear_value_head_dim", "linear_head_dim")
        queries = first("linear_num_key_heads", "linear_num_heads")
        channels = 2 * queries * key + heads * value
        return taps * channels, heads * key * value, heads * (8 * key + 5 * value + 9 * CHUNK)
    return _mamba(first, taps, hidden)


def _mamba(first: Callable[..., int], taps: int, hidden: int) -> tuple[int, int, int]:
    """Mamba-2, which has heads, or the first one, which has channels."""
    state = first("mamba_d_state", "ssm_state_size", "state_size")
    inner = first("mamba_expand", "expand") * hidden
    heads = first("mamba_n_heads", "mamba_num_heads", "num_heads")
    if not heads:
        return taps * inner, inner * state, 5 * inner
    size = first("mamba_d_head", "mamba_head_dim", "head_dim") or inner // heads
    inner = heads * size
    channels = inner + 2 * first("mamba_n_groups", "n_groups") * state
    return taps * channels, inner * state, heads * (8 * size + 5 * state + 4 * CHUNK)
