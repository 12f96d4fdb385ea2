"""What `train.backend: megatron` does not do, and for which models.

It has no section: `train.ranks` and `train.tensor_parallel` are all it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

# others have parameters of the same names and compute something else with them
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def installed() -> bool:
    """Others put packages into the namespace `megatron` too."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def check_megatron(cfg: Any) -> None:
    """Raises ValueError, naming the key, for what runs on other backends only."""
    train = cfg.train
    if train.backend != "megatron":
        return
    if cfg.model.exact:
        raise ValueError(
            "model.exact: it is proved for one process; set train.backend=local, or leave it out"
        )
    if cfg.model.compile:
        raise ValueError(
            "model.compile: Megatron's layers are not compiled; set it to false, or"
            " train.backend=fsdp"
        )
    if cfg.adapter is not None:
        raise ValueError(
            "adapter: Megatron's layers train whole weights; leave it out, or set"
            " train.backend=fsdp"
        )
    if cfg.algorithm.family == "reward":
        raise ValueError(
            "algorithm.name: the backend megatron trains causal LMs only; set train.backend=fsdp"
            " for a reward model"
        )
    if cfg.critic is not None:
        raise ValueError(
            "critic: the backend megatron trains causal LMs only; set train.backend=fsdp, or use an"
            " algorithm without a critic"
        )
    if cfg.teacher is not None:
        raise ValueError(
            "teacher: distillation was not tried with Megatron; set train.backend=fsdp"
        )
    for key in ("ema", "neftune"):
        if getattr(train, key) is not None:
            raise ValueError(
                f"train.{key}: the backend megatron does not know it; leave it out, or set"
                " train.backend=fsdp"
            )
    if train.optimizer.offload:
        raise ValueError(
            "train.optimizer.offload: the backend megatron does not know it; set train.backend=fsdp"
            " and train.offload_weights"
        )
    if cfg.algorithm.kl.reference.kind != "frozen":
        raise ValueError(
            "algorithm.kl.reference: a reference that follows the weights needs train.backend=fsdp"
            " or local"
        )


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


def missing(cfg: Any) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong, what to do) for what this machine does not have."""
    if cfg.train.backend == "megatron" and not installed():
        yield (
            "train.backend",
            "megatron-core is not installed.",
            "pip install 'reinforge[megatron]'",
        )
