"""How objects travel between the ranks of one run: pickle, between processes that this program
started itself and from nowhere else.

A user's function that was loaded from a file (`parts.py:surrogate`) travels as the name of the
file.
"""

from __future__ import annotations

import io
import pickle
import sys
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from reinforge.core.errors import InputError
from reinforge.core.user_files import load_file


class Pickler(pickle.Pickler):
    """Pickles what travels between ranks; it also knows the functions that were loaded from a file
    by its path.
    """

    def reducer_override(self, obj: Any) -> Any:
        if (
            isinstance(obj, FunctionType)
            and "." not in obj.__qualname__
            and obj.__module__ not in sys.modules
        ):
            file = obj.__globals__.get("__file__")
            if file is not None:
                return _function_in, (str(Path(file).resolve()), obj.__module__, obj.__qualname__)
        return NotImplemented


def pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"something cannot be sent to the other ranks: {error}.",
            where="train.backend",
            fix="Define functions at the top level of a file, or use train.backend=local.",
        ) from error
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return pickle.loads(data)


@cache
def _module(file: str, name: str) -> ModuleType:
    return load_file(Path(file), name)


def _function_in(file: str, module: str, name: str) -> Any:
    return getattr(_module(file, module), name)
