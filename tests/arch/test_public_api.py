"""The public names, pinned: adding one is a decision, removing one breaks somebody."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import pytest

import reinforge
from helpers.source_tree import ROOT, SRC

PUBLIC = [
    "BenchmarkResult",
    "Callback",
    "Config",
    "Group",
    "InputError",
    "Row",
    "RunControl",
    "RunResult",
    "RunStep",
    "Sample",
    "Sampling",
    "Trainer",
    "__version__",
    "benchmark",
    "chat",
    "evaluate",
    "generate",
    "load_config",
    "make_data",
    "score",
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


def page_module() -> ModuleType:
    """tools/api_reference.py."""
    place = ROOT / "tools" / "api_reference.py"
    spec = spec_from_file_location("api_reference", place)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_name_and_is_fresh() -> None:
    page = page_module()
    listed = [name for names in page.CHAPTERS.values() for name in names]
    assert sorted([*listed, "__version__"]) == PUBLIC
    committed = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert committed == page.api_markdown().rstrip("\n") + "\n", "run `make reference`"


@pytest.mark.parametrize("name", [n for n in PUBLIC if n not in ("__version__", "Config")])
def test_what_is_public_is_typed_and_told(name: str) -> None:
    value = getattr(reinforge, name)
    members = {name: value} if not inspect.isclass(value) else dict(public_members(value))
    for own, member in members.items():
        assert inspect.getdoc(member), f"{name}.{own} has no docstring"
        function = member.fget if isinstance(member, property) else member
        signature = inspect.signature(function)
        assert signature.return_annotation is not signature.empty, f"{name}.{own}"
        untyped = [
            p.name
            for p in signature.parameters.values()
            if p.annotation is p.empty and p.name not in ("self", "cls")
        ]
        assert not untyped, f"{name}.{own}: {untyped}"


def public_members(kind: type) -> Iterator[tuple[str, Any]]:
    for parent in kind.__mro__:
        if parent.__module__.startswith("reinforge."):
            for name, member in vars(parent).items():
                if not name.startswith("_") and (
                    isinstance(member, property) or inspect.isfunction(member)
                ):
                    yield name, member


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
