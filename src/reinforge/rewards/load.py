"""A function by its name, and the name by which another process finds a function.

No torch here: workers import this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

from reinforge.core.errors import InputError
from reinforge.core.user_files import load_attribute

T = TypeVar("T")
NOTHING: Mapping[str, Any] = MappingProxyType({})
PYTHON = "python"  # the source of a function that is in the program's memory only
_given: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("_given", default=NOTHING)


@contextmanager
def functions_given(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, `load_function` finds these under the names that `name_of_given` gave them."""
    token = _given.set(functions)
    try:
        yield
    finally:
        _given.reset(token)


def with_given_now(function: Callable[..., T]) -> Callable[..., T]:
    """The function, which finds the functions that are given now whenever it is called later."""
    functions = _given.get()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        with functions_given(functions):
            return function(*args, **kwargs)

    return call


def name_of_given(function: Callable[..., Any]) -> str:
    """The name of a function that a Python caller gave: by which any process finds it, or
    `python:<its name>`.
    """
    own = getattr(function, "__name__", type(function).__name__)
    return importable(function) or f"{PYTHON}:{own}"


def load_function(name: str, where: str) -> Callable[..., Any]:
    """`path/to/file.py:function` or `package.module:function`."""
    if name in _given.get():
        return _given.get()[name]
    source, _, attribute = name.rpartition(":")
    if source == PYTHON:
        raise InputError(
            f"{attribute} was given as a Python object, which is not kept.",
            where=where,
            fix="Pass it again, or put it into a file and name it file.py:function.",
        )
    found: Callable[..., Any] = load_attribute(name, where)
    return found


def file_of(function: Any) -> str | None:
    """`/path/to/file.py:function` of a function that stands in a file of the user's; None for ours
    and for what `importable` cannot name.
    """
    name = importable(function)
    if name is None or name.startswith("reinforge."):
        return None
    file = getattr(sys.modules[name.rpartition(":")[0]], "__file__", None)
    return f"{file}:{name.rpartition(':')[2]}" if file and file.endswith(".py") else None


def importable(function: Any) -> str | None:
    """`module:function` if another process finds this very function there; None for closures,
    lambdas, objects, and what stands in the main script, which importing would run again.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        return None
    home = sys.modules.get(module)
    if getattr(home, name, None) is not function or getattr(home, "__spec__", None) is None:
        return None
    return f"{module}:{name}"
