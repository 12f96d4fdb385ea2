"""LoRA through peft. The reference model is the same module with its adapter off; nothing is merged or copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforge.config.schema import AdapterConfig
from reinforge.core.errors import InputError


def add_adapter(module: Any, cfg: AdapterConfig, *, seed: int) -> Any:
    """Wraps the module. Adapter weights are float32 (they are small and learn at small rates) and initialised by `seed`."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if cfg.path:
        wrapped = PeftModel.from_pretrained(module, cfg.path, is_trainable=True)
    else:
        lora = LoraConfig(r=cfg.rank, lora_alpha=cfg.alpha or 2 * cfg.rank, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
                          target_modules=cfg.targets if isinstance(cfg.targets, str) else list(cfg.targets))  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                wrapped = get_peft_model(module, lora)
            except ValueError as error:
                raise InputError(
                    str(error).splitlines()[0], where="adapter.targets", fix="Use all-linear, or names that occur in the model."
                ) from error
    make_lean(wrapped)
    return wrapped


def make_lean(module: Any) -> None:
    """Plain LoRA layers compute in the precision of their input: peft casts the input to the adapter's float32 first, which moves more
    memory than the base layer does. The weights stay float32, and so do their gradients."""
    from peft.tuners.lora import Linear

    for layer in module.modules():
        if type(layer) is Linear and not any(layer.use_dora.values()) and not any(layer.lora_bias.values()):
            layer.forward = _Lean(layer, layer.forward).forward


class _Lean:
    """y = base(x) + s B A x, and peft's own way whenever there is anything else about it (several adapters, merged, a mixed batch)."""

    def __init__(self, layer: Any, usual: Any):
        self.layer, self.usual = layer, usual

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.layer
        if layer.disable_adapters and not layer.merged:
            return layer.base_layer(x, *args, **kwargs)
        if layer.merged or len(layer.active_adapters) != 1 or kwargs:
            return self.usual(x, *args, **kwargs)
        name = layer.active_adapters[0]
        down, up = layer.lora_A[name].weight.to(x.dtype), layer.lora_B[name].weight.to(x.dtype)
        return layer.base_layer(x, *args) + F.linear(F.linear(x, down), up) * layer.scaling[name]


@contextmanager
def adapter_off(module: Any) -> Iterator[None]:
    """Inside, the module is the base model: the reference."""
    with module.disable_adapter():
        yield


def is_adapted(module: Any) -> bool:
    return hasattr(module, "disable_adapter") and hasattr(module, "peft_config")
