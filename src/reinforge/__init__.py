"""reinforge: post-training for language models, from instruction tuning to reinforcement learning.

The public names are listed here, once, and load on first use: `import reinforge` imports no torch.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from reinforge.version import __version__

if TYPE_CHECKING:  # what a type checker sees; at run time `__getattr__` brings the same
    from reinforge.api import (
        Trainer,
        benchmark,
        chat,
        evaluate,
        generate,
        make_data,
        score,
        train,
    )
    from reinforge.build.result import RunResult
    from reinforge.config.load import load_config
    from reinforge.config.schema import Config
    from reinforge.core.engine import Sampling
    from reinforge.core.errors import InputError
    from reinforge.core.sample import Group, Row, Sample
    from reinforge.evals.benchmarks.result import BenchmarkResult
    from reinforge.loops.callbacks import Callback
    from reinforge.loops.control import RunControl
    from reinforge.loops.open_step import RunStep

# of tqdm, which transformers brings, in every notebook without widgets: its bars are text then
warnings.filterwarnings("ignore", message="IProgress not found")

_PUBLIC = {
    "train": "reinforge.api:train",
    "Trainer": "reinforge.api:Trainer",
    "RunResult": "reinforge.build.result:RunResult",
    "RunStep": "reinforge.loops.open_step:RunStep",
    "Callback": "reinforge.loops.callbacks:Callback",
    "RunControl": "reinforge.loops.control:RunControl",
    "evaluate": "reinforge.api:evaluate",
    "benchmark": "reinforge.api:benchmark",
    "BenchmarkResult": "reinforge.evals.benchmarks.result:BenchmarkResult",
    "generate": "reinforge.api:generate",
    "make_data": "reinforge.api:make_data",
    "score": "reinforge.api:score",
    "chat": "reinforge.api:chat",
    "load_config": "reinforge.config.load:load_config",
    "Config": "reinforge.config.schema:Config",
    "Row": "reinforge.core.sample:Row",
    "Sample": "reinforge.core.sample:Sample",
    "Group": "reinforge.core.sample:Group",
    "Sampling": "reinforge.core.engine:Sampling",
    "InputError": "reinforge.core.errors:InputError",
}

__all__ = [
    "train",
    "Trainer",
    "RunResult",
    "RunStep",
    "Callback",
    "RunControl",
    "evaluate",
    "benchmark",
    "BenchmarkResult",
    "generate",
    "make_data",
    "score",
    "chat",
    "load_config",
    "Config",
    "Row",
    "Sample",
    "Group",
    "Sampling",
    "InputError",
    "__version__",
]


def _resolve(name: str) -> Any:
    module, attribute = _PUBLIC[name].split(":")
    return getattr(import_module(module), attribute)


if not TYPE_CHECKING:  # it would give every misspelt name a type

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = _resolve(name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
