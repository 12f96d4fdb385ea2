"""A user's file as a module. No torch here: workers of rewards import this."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


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
