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
    layers: int = 0  # that keep state
    # what one of them keeps of one token for its backward pass
    kept_narrow: int = 0  # in the model's precision
    kept_wide: int = 0  # in float32

    @classmethod
    def of(cls, config: Any) -> StateFacts | None:
        """From a transformers configuration (of the text model); None: no layer keeps state."""
        kinds = layer_kinds(config)
        mixers = sum(kind in STATEFUL for kind in kinds)
        if not mixers:
            return None
        one = _mixer(config)
        return cls(
            attending=sum(kind in ATTENDING for kind in kinds),
            narrow=mixers * one.narrow,
            wide=mixers * one.wide,
            work=one.work,
            layers=mixers,
            kept_narrow=one.kept_narrow,
            kept_wide=one.kept_wide,
        )


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


@dataclass(frozen=True, slots=True)
class _MixerSizes:
    """Of one layer that keeps state, as in `StateFacts`; `_mixer` makes it."""

    narrow: int
    wide: int
    work: int
    kept_narrow: int
    kept_wide: int


def _mixer(config: Any) -> _MixerSizes:
    """The factors of `work` were measured on a CPU, as the highest memory beside the inputs while
    1,024 tokens of two sequences were computed, and rounded up. Those of what is kept are fitted to
    the tensors that autograd saved, in float32 and bfloat16, over shapes of each kind.
    """

    def first(*names: str) -> int:
        found = (getattr(config, name, None) for name in names)
        return next((int(value) for value in found if isinstance(value, int)), 0)

    hidden = first("hidden_size")
    taps = first("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel") - 1
    if first("conv_L_cache"):
        # three projections in one, the inputs of the convolution and of the output's projection,
        # and what the convolution gives
        return _MixerSizes(taps * hidden, 0, 0, 6 * hidden, 0)
    heads = first("linear_num_value_heads", "linear_num_heads")
    if not heads:
        return _mamba(first, taps, hidden)
    key = first("linear_key_head_dim", "linear_head_dim")
    value = first("linear_value_head_dim", "linear_head_dim")
    channels = 2 * first("linear_num_key_heads", "linear_num_heads") * key + heads * value
    return _MixerSizes(
        narrow=taps * channels,
        wide=heads * key * value,
        work=heads * (8 * key + 5 * value + 9 * CHUNK),
        kept_narrow=hidden + 2 * channels + heads * (8 * key + 3 * value),
        kept_wide=heads * (5 * key + 7 * value + 5 * CHUNK),
    )


def _mamba(first: Callable[..., int], taps: int, hidden: int) -> _MixerSizes:
    """Mamba-2, which has heads, or the first one, which has channels."""
    state = first("mamba_d_state", "ssm_state_size", "state_size")
    inner = first("mamba_expand", "expand") * hidden
    heads = first("mamba_n_heads", "mamba_num_heads", "num_heads")
    if not heads:
        kept = hidden + 8 * inner
        return _MixerSizes(taps * inner, inner * state, 5 * inner, kept, inner * (2 * state + 4))
    size = first("mamba_d_head", "mamba_head_dim", "head_dim") or inner // heads
    inner = heads * size
    sides = 2 * first("mamba_n_groups", "n_groups") * state
    return _MixerSizes(
        narrow=taps * (inner + sides),
        wide=inner * state,
        work=heads * (8 * size + 5 * state + 4 * CHUNK),
        kept_narrow=hidden + 5 * inner + 7 * sides,
        kept_wide=heads * (8 * size + 6 * state + 3 * CHUNK),
    )
