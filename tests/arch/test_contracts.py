"""`core/` says all that callers use of an engine and of a backend, and nothing that nobody uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.source_tree import PACKAGE, ROOT, modules, tree

# of each contract: where it stands, and the methods by which an implementation is known
CONTRACTS = {
    "Engine": ("core/engine.py", {"async generate", "async update", "async sleep"}),
    "Backend": ("core/backend.py", {"annotate", "forward_backward", "step", "weights"}),
}
# these implement a contract or hand its calls on: what they read of it is no use of it
DELEGATIONS = ("engines/", "backends/", "cluster/", "engines/resumable.py", "core/engine.py")


def members(node: ast.ClassDef) -> set[str]:
    """Methods and attributes of a class, those included that its methods set."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(part.name)
        elif isinstance(part, ast.Assign | ast.AnnAssign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found.add(target.id)
                elif isinstance(target, ast.Attribute):
                    found.add(target.attr)
    return {name for name in found if not name.startswith("_")}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in modules().values():
        place = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                yield place, node


def contract(name: str) -> set[str]:
    place = CONTRACTS[name][0]
    return next(members(node) for where, node in classes() if (where, node.name) == (place, name))


def implementations(name: str) -> dict[str, ast.ClassDef]:
    place, known_by = CONTRACTS[name]
    return {
        node.name: node for where, node in classes() if where != place and known_by <= methods(node)
    }


def methods(node: ast.ClassDef) -> set[str]:
    plain = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    return plain | {f"async {p.name}" for p in node.body if isinstance(p, ast.AsyncFunctionDef)}


def test_who_implements_a_contract() -> None:
    assert implementations("Engine").keys() == {
        "NativeEngine",
        "ServedEngine",
        "DataParallelEngine",
        "RemoteEngine",
        "ResumableEngine",
        "EngineWithOpponent",
    }
    assert implementations("Backend").keys() == {
        "LocalBackend",
        "DistributedBackend",
        "RemoteBackend",
    }


@pytest.mark.parametrize("name", CONTRACTS)
def test_an_implementation_has_all_of_the_contract(name: str) -> None:
    for kind, node in implementations(name).items():
        missing = contract(name) - members(node)
        assert not missing, f"{kind} lacks {sorted(missing)} of {name}"


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_member_of_a_contract_is_used_by_somebody(name: str) -> None:
    used = set()
    for path in modules().values():
        if path.relative_to(PACKAGE).as_posix().startswith(DELEGATIONS):
            continue
        used |= {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    assert contract(name) <= used, f"nobody uses {sorted(contract(name) - used)} of {name}"


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_implementation_is_made_by_a_test(name: str) -> None:
    """By the suites of tests/contract, or by tests of its own."""
    places = [p for folder in ("contract", "scale", "unit") for p in _tests(folder)]
    said = "\n".join(path.read_text() for path in places)
    missing = [kind for kind in implementations(name) if kind not in said]
    # a backend on ranks is made by the name of its kind
    assert [kind for kind in missing if kind != "DistributedBackend"] == []


def _tests(folder: str) -> list[Path]:
    return sorted((ROOT / "tests" / folder).rglob("*.py"))
