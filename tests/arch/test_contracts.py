"""`core/` says all that callers use of an engine and of a backend, and nothing that nobody uses."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, get_args

import pytest

from helpers.backend_contract import MODELS, BackendContract
from helpers.engine_contract import EngineContract
from helpers.source_tree import PACKAGE, ROOT, modules, tree
from reinforge.config.engine import EngineName
from reinforge.config.rules.backends import BACKENDS
from reinforge.config.train import BackendName

# of each contract: where it stands, and the methods by which an implementation is known
CONTRACTS = {
    "Engine": ("core/engine.py", {"async generate", "async update", "async sleep"}),
    "Backend": ("core/backend.py", {"annotate", "forward_backward", "step", "weights"}),
}
# a class of tests that runs a contract
SUITE = re.compile(r"^class Test\w+\((BackendContract|OnTwoRanks|EngineContract)\)", re.MULTILINE)
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
        "EngineBeside",
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


@cache
def suites() -> list[type[Any]]:
    """The classes of tests/contract and tests/scale that run a contract."""
    found = []
    for folder in ("contract", "scale"):
        for path in sorted((ROOT / "tests" / folder).glob("test_*.py")):
            if not SUITE.search(path.read_text()):
                continue
            spec = spec_from_file_location(f"suite_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look for their module there
            spec.loader.exec_module(module)
            found += [
                each
                for each in vars(module).values()
                if isinstance(each, type) and each.__module__ == module.__name__
            ]
    return found


def cases(contract: type[Any]) -> list[Any]:
    return [case for suite in suites() if issubclass(suite, contract) for case in suite.cases]


def test_every_backend_has_a_case() -> None:
    """What `train.backend` names, and actors of Ray around it."""
    columns = {column.name for column in BACKENDS.columns}
    assert columns == {*get_args(BackendName), "ray"}
    assert {case.column for case in cases(BackendContract)} == columns


def test_every_engine_has_a_case() -> None:
    """What `rollout.engine` names, and every class that is an engine."""
    found = cases(EngineContract)
    assert {case.name for case in found} >= set(get_args(EngineName))
    classes = {case.implementation for case in found} - {"FakeEngine"}
    assert classes == implementations("Engine").keys()


def test_what_a_case_cannot_do_is_of_the_contract() -> None:
    for contract, others in ((BackendContract, set(MODELS)), (EngineContract, set())):
        points = {name for name in vars(contract) if name.startswith("test_")}
        for case in cases(contract):
            assert case.cannot.keys() <= points | others, case.name
            assert all(case.cannot.values()), f"{case.name} does not say why"
