"""Layers of transformers that are given more than they hand on to their attention.

A layout travels as a keyword argument through the model. Some decoder layers take it and call their
attention without it (Nemotron, StableLM), though that would pass it on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

HANDED = ("layout", "places")  # what `PackedModel.hidden` says and attention wants to know


def hand_on(trunk: nn.Module) -> None:
    """Makes layers that drop it hand on what they are given. Hooks run again where a layer is
    recomputed in the backward.
    """
    for layer in trunk.modules():
        attention = getattr(layer, "self_attn", None)
        if attention is None or hasattr(attention, "handed") or not drops(type(layer).forward):
            continue
        attention.handed = {}
        layer.register_forward_pre_hook(_hear, with_kwargs=True)
        attention.register_forward_pre_hook(_tell, with_kwargs=True)


@cache
def drops(forward: Callable[..., Any]) -> bool:
    """Whether the forward of a layer takes any keywords, and never says them to another one."""
    forward = inspect.unwrap(forward)
    rest = [
        one.name
        for one in inspect.signature(forward).parameters.values()
        if one.kind is one.VAR_KEYWORD
    ]
    try:
        source = inspect.getsource(forward)
    except OSError:
        return False
    body = source.partition(f"**{rest[0]}")[2] if rest else ""
    return bool(rest) and f"**{rest[0]}" not in body


def _hear(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    layer.self_attn.handed = {key: kwargs[key] for key in HANDED if key in kwargs}


def _tell(attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    handed = attention.handed
    attention.handed = {}  # a layout holds a cache
    return args, {**kwargs, **handed}
