"""The list of wrong changes (tools/mutants.toml) keeps up with the code: each can still be made,
and its tests exist.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from helpers.source_tree import ROOT


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_tool", ROOT / "tools" / "mutants.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TOOL = _tool()


@pytest.mark.parametrize("mutant", TOOL.read_list(), ids=lambda mutant: mutant.name)
def test_every_change_can_still_be_made(mutant: object) -> None:
    assert TOOL.problem_of(mutant) is None
