"""Modules that belong to a Python caller: what they were before a run can be written down, and they
are transformers' own again after it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from reinforge.core.errors import InputError
from reinforge.models.adapters import is_adapted
from reinforge.models.causal import VALUE_HEAD
from reinforge.models.save import writing

ADAPTER = "adapter"  # the folder of an adapter, below that of its base


@contextmanager
def lent(module: Any) -> Iterator[None]:
    """Inside, the module may become a model of ours. Afterwards it attends, drops out and computes
    as it did before, and asks for the same gradients.
    """
    plain = _plain(module)
    attention = plain.config._attn_implementation
    training = module.training
    rates = [
        (part, name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, float) and ("drop" in name or isinstance(part, _DropoutNd))
    ]
    learns = {name: p.requires_grad for name, p in module.named_parameters()}
    own_forward = {id(part) for part in module.modules() if "forward" in vars(part)}
    try:
        yield
    finally:
        plain.set_attn_implementation(attention)
        for part, name, value in rates:
            setattr(part, name, value)
        for part in module.modules():
            if "forward" in vars(part) and id(part) not in own_forward:
                del part.forward
        module._modules.pop(VALUE_HEAD, None)
        now = dict(module.named_parameters())
        for name, wanted in learns.items():
            now[name].requires_grad_(wanted)
        module.train(training)


def take_adapter_out(adapted: Any) -> None:
    """The base of a peft model is again what it was before it got the adapter."""
    base = adapted.unload()
    if hasattr(base, "peft_config"):
        del base.peft_config


def check_given(module: Any) -> None:
    """Refuses what cannot be trained, or not be found again."""
    if not is_adapted(module):
        return
    kinds = {name: str(cfg.peft_type.value) for name, cfg in module.peft_config.items()}
    if kinds != {"default": "LORA"}:
        told = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise InputError(
            f"the model has the adapters {told}.",
            where="model",
            fix="Give a model with one LoRA adapter that is called default, peft's own name.",
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError(
            "no weight of the model is to be trained.",
            where="model",
            fix="Load its adapter with PeftModel.from_pretrained(..., is_trainable=True).",
        )


def save_initial(module: Any, folder: Path) -> None:
    """Writes the weights that a run begins with, whole or not at all: a model, and its adapter in a
    folder below.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with writing():
            plain = _plain(module)
            weights = {
                own: tensor
                for name, tensor in plain.state_dict().items()
                if (own := _name_without_adapter(name)) is not None
            }
            plain.save_pretrained(aside, state_dict=weights)
            if is_adapted(module):
                module.save_pretrained(aside / ADAPTER, save_embedding_layers=False)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@torch.no_grad()
def restore_initial(module: Any, folder: Path) -> None:
    """Puts the weights back that `save_initial` wrote."""
    plain = _plain(module)
    saved = type(plain).from_pretrained(folder, dtype=plain.dtype).state_dict()
    for name, tensor in plain.state_dict().items():
        own = _name_without_adapter(name)
        if own is not None:
            tensor.copy_(saved[own])
    if is_adapted(module):
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(module, load_peft_weights(str(folder / ADAPTER), device="cpu"))


def _plain(module: Any) -> Any:
    return module.get_base_model() if is_adapted(module) else module


def _name_without_adapter(name: str) -> str | None:
    """The name of a weight in the model without its adapter; None for one of the adapter.

    >>> _name_without_adapter("model.layers.0.q_proj.base_layer.weight")
    'model.layers.0.q_proj.weight'
    >>> _name_without_adapter("model.layers.0.q_proj.lora_A.default.weight")
    """
    parts = name.split(".")
    if any(part.startswith("lora_") or part == "modules_to_save" for part in parts):
        return None
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))
