"""reinforge: post-training for language models, from instruction tuning to reinforcement learning.

The public names are listed here, once, and load on first use: `import reinforge` imports no torch.

`reinforge.train` is both the floor of training loops (`reinforge.train.rl`) and the function that
runs a configuration (`reinforge.train("config.yaml")`); docs/decisions/0001-callable-train.md says
why.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from reinforge.version import __version__

if TYPE_CHECKING:  # what a type checker sees; at run time `__getattr__` brings the same
    from reinforge.app.api import evaluate, train
    from reinforge.config.load import load_config
    from reinforge.config.schema import Config
    from reinforge.core.engine import Sampling
    from reinforge.core.errors import InputError
    from reinforge.core.sample import Group, Row, Sample

_PUBLIC = {
    "train": "reinforge.app.api:train",
    "evaluate": "reinforge.app.api:evaluate",
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
    "evaluate",
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


class _CallableModule(ModuleType):
    # A subpackage that can be called like the public function of the same name, and looks like it
    # to `help` and editors. The function is imported when it is called or looked at.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function()(*args, **kwargs)

    def _function(self) -> Any:
        return _resolve(self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(self._function())

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._function().__doc__


def _make_callable(module: str) -> None:
    """Called by a subpackage on its first line, so that every way of importing it gives the
    callable one.
    """
    sys.modules[module].__class__ = _CallableModule


if not TYPE_CHECKING:  # it would give every misspelt name a type

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = import_module("reinforge.train") if name == "train" else _resolve(name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
