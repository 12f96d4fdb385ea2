"""The public names, pinned: adding one is a decision, removing one breaks somebody."""

from __future__ import annotations

import subprocess
import sys

import pytest
from source_tree import SRC

import reinforge

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


ORDERS = {
    "attribute first": "import reinforge; train = reinforge.train; import reinforge.train",
    "subpackage first": "import reinforge.train; train = reinforge.train",
    "from the package": (
        "from reinforge import train; import reinforge.train as t; assert t is train"
    ),
    "a module of it first": "import reinforge.train.rl; from reinforge import train",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_train_is_a_function_and_a_package(order: str) -> None:
    """Whichever way it was imported first, calling `reinforge.train` reaches
    `reinforge.app.api.train` with its arguments.
    """
    code = f"""
import sys, types
sys.path.insert(0, {str(SRC)!r})
api = types.ModuleType("reinforge.app.api")
api.train = lambda *args, **kwargs: (args, kwargs)
sys.modules["reinforge.app.api"] = api
{order}
assert train("a.yaml", overrides=["x=1"]) == (("a.yaml",), {{"overrides": ["x=1"]}})
import reinforge
assert reinforge.train is train and train.__name__ == "reinforge.train" and train.__path__
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
