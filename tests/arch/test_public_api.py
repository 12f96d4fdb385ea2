"""The public names, pinned: adding one is a decision, removing one breaks somebody."""

from __future__ import annotations

import subprocess
import sys

import pytest

import reinforge
from helpers.source_tree import SRC

PUBLIC = [
    "Config",
    "Group",
    "InputError",
    "Row",
    "Sample",
    "Sampling",
    "__version__",
    "evaluate",
    "load_config",
    "train",
]


def test_the_public_names_are_these() -> None:
    assert sorted(reinforge.__all__) == PUBLIC
    assert dir(reinforge) == PUBLIC
    assert set(reinforge._PUBLIC) | {"__version__"} == set(PUBLIC)


@pytest.mark.parametrize("name", [n for n in PUBLIC if n != "train"])
def test_public_name_resolves_to_its_definition(name: str) -> None:
    value = getattr(reinforge, name)
    if name != "__version__":
        module, attribute = reinforge._PUBLIC[name].split(":")
        assert value is getattr(sys.modules[module], attribute)
        assert value.__doc__ or name == "Group", f"{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        reinforge.tarin  # noqa: B018


def test_train_is_a_function_and_nothing_else() -> None:
    """No package has its name: importing a module never changes what `reinforge.train` is."""
    code = f"""
import sys
sys.path.insert(0, {str(SRC)!r})
import reinforge, reinforge.loops, reinforge.api
assert reinforge.train is reinforge.api.train
assert "reinforge.train" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
