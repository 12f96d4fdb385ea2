"""Which models the backend megatron can build, from their config.json, and whether it is installed.

It has no section: `train.ranks` and `train.tensor_parallel` are all it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

# others have parameters of the same names and compute something else with them
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def installed() -> bool:
    """Others put packages into the namespace `megatron` too."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def unknown_in(model: Mapping[str, Any]) -> str | None:
    """What the config.json of a model has that Megatron's layers, as we build them, have not."""
    kind = model.get("model_type")
    if kind not in ARCHITECTURES:
        return f"the architecture {kind}, not one of {', '.join(ARCHITECTURES)}"
    if model.get("hidden_act", "silu") != "silu":
        return f"the activation {model['hidden_act']}"
    slides = "sliding_attention" in (model.get("layer_types") or ["sliding_attention"])
    if model.get("sliding_window") is not None and model.get("use_sliding_window", True) and slides:
        return "sliding windows"
    rotary = f"{model.get('rope_scaling')} {model.get('rope_parameters')}"
    if "dynamic" in rotary or "longrope" in rotary:
        return "a rotary embedding that depends on the length"
    return None


def uncut(model: Mapping[str, Any], ranks: int) -> str | None:
    """Why the layers of a model cannot be cut into so many equal parts; None: they can, or the file
    does not say.
    """
    heads = model.get("num_attention_heads")
    width = model.get("intermediate_size")
    keys = model.get("num_key_value_heads") or heads
    if all(n is None or n % ranks == 0 for n in (heads, keys, width)):
        return None
    return (
        f"{heads} query heads, {keys} key heads and an inner width of {width} cannot all be cut"
        f" into {ranks} equal parts."
    )
