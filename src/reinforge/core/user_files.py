"""A user's file as a module, and what is in it. No torch here: workers of rewards import this."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from reinforge.core.errors import InputError


class _SourceLoader(SourceFileLoader):
    """Reads the file, whatever Python has kept of it: that is compared by size and by seconds, so
    a file that was just edited (in a notebook, by a program) would be the old one. `load_file`
    makes it.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def load_file(path: Path, name: str) -> ModuleType:
    """The file as a module of this name, which is not entered into sys.modules."""
    loader = _SourceLoader(name, str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path.resolve(), loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def load_attribute(name: str, where: str, kind: str = "function") -> Any:
    """`path/to/file.py:attribute` or `package.module:attribute`, which can be called. `kind` is
    what it is called in errors.
    """
    source, _, attribute = name.rpartition(":")
    if not source:
        raise InputError(
            f"{name!r} names no {kind}.",
            where=where,
            fix=f"Write file.py:{kind} or package.module:{kind}.",
        )
    if source.endswith(".py"):
        path = Path(source).expanduser()
        if not path.is_file():
            raise InputError(
                f"no such file: {path}",
                where=where,
                fix="Paths are relative to where you run the command.",
            )
        module = load_file(path, f"reinforge_user_{path.stem}")
    else:
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise InputError(
                f"cannot import {source}: {error}",
                where=where,
                fix="Install it, or put it on PYTHONPATH.",
            ) from error
    if not callable(getattr(module, attribute, None)):
        raise InputError(
            f"{source} has no {kind} {attribute!r}.",
            where=where,
            fix=f"It has: {', '.join(n for n in dir(module) if not n.startswith('_'))[:200]}.",
        )
    return getattr(module, attribute)
