"""LoRA through peft. The reference model is the same module with its adapter off; nothing is merged or copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
    return wrapped


@contextmanager
def adapter_off(module: Any) -> Iterator[None]:
    """Inside, the module is the base model: the reference."""
    with module.disable_adapter():
        yield


def is_adapted(module: Any) -> bool:
    return hasattr(module, "disable_adapter") and hasattr(module, "peft_config")
