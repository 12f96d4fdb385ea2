"""What tests do to a native engine, wherever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reinforge.engines.native import NativeEngine


def native_idle(engine: NativeEngine) -> bool:
    """Whether it holds nothing for anybody."""
    return engine.pool.free == engine.pool.total and not engine._running and not engine._waiting


def break_native(engine: NativeEngine) -> Callable[[], None]:
    """Makes its forward pass fail; what it returns repairs it."""
    model = engine.model
    hidden = engine.model.hidden

    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("device lost")

    model.hidden = broken  # type: ignore[method-assign]
    return lambda: setattr(model, "hidden", hidden)
