"""What docstrings, comments and the pages about the code name exists: files, and members of classes
and modules. A rename that leaves an old name behind in a sentence is found here.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from helpers.source_tree import PACKAGE, ROOT, modules, project_files, tree

PAGES = ("docs/architecture.md", "docs/add-a-model.md", "CONTRIBUTING.md")
CLASS = re.compile(r"`([A-Z][a-z0-9]+[A-Z]\w*)`")
# `Class.member`, `module.NAME` and `module.Class`, in backticks; calls and indices may follow
MEMBER = re.compile(r"`([A-Za-z_]\w*)\.([A-Za-z_]\w*)(?:\(\)|\[[^`]*\])?`")
FILE = re.compile(r"(?<![\w*/.{<-])((?:[\w.-]+/)*[\w-]+\.py)\b(?!:)")
COMMENT = re.compile(r"(?:^|\s)# .*")
# libraries that a module of ours has its name from
LIBRARIES = {"openai"}
# files that users write, in examples; NAME stands for a file that is to be written
EXAMPLES = {
    "file.py",
    "my_advantage.py",
    "my_reward.py",
    "my_rewards.py",
    "rewards.py",
    "sitecustomize.py",
}


def prose(path: Path) -> list[tuple[int, str]]:
    """(line, text) of the docstrings and comments of a module."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                found.append((node.body[0].lineno, text))
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if comment := COMMENT.search(line):
            found.append((number, comment.group()))
    return found


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for path in modules().values():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


@cache
def names() -> frozenset[str]:
    """What is defined or imported anywhere in the package."""
    return frozenset().union(*(_top_level(path) for path in modules().values()))


@cache
def members(cls: ast.ClassDef) -> frozenset[str] | None:
    """What a class and its bases have; None where a base is not ours, so that nobody knows."""
    found: set[str] = set()
    for base in cls.bases:
        name = ast.unparse(base).split("[")[0].rpartition(".")[2]
        if name in ("Protocol", "Generic", "NamedTuple", "Exception", "RuntimeError"):
            continue
        ours = classes().get(name)
        if not ours:
            return None
        for one in ours:
            inherited = members(one)
            if inherited is None:
                return None
            found |= inherited
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return frozenset(found)


def unknown_members(text: str) -> list[str]:
    """`SomeClass` that nobody has, `Class.member` where a class of ours has no such member,
    `module.NAME` that is not there.
    """
    found = [name for name in CLASS.findall(text) if name not in names()]
    for owner, member in MEMBER.findall(text):
        if member == "py":
            continue
        if owner in classes():
            known = [members(cls) for cls in classes()[owner]]
            if all(names is not None and member not in names for names in known):
                found.append(f"{owner}.{member}")
        elif owner.islower() and not member.islower() and owner not in LIBRARIES:
            places = [p for name, p in modules().items() if name.rpartition(".")[2] == owner]
            if places and not any(member in _top_level(p) for p in places):
                found.append(f"{owner}.{member}")
    return found


@cache
def _top_level(path: Path) -> set[str]:
    found: set[str] = set()
    for node in tree(path).body:
        for part in ast.walk(node):
            if isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(part.name)
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                found.add(part.id)
            elif isinstance(part, ast.alias):
                found.add(part.asname or part.name)
    return found


@cache
def _files() -> frozenset[str]:
    return frozenset(path.relative_to(ROOT).as_posix() for path in project_files())


def unknown_files(text: str) -> list[str]:
    """Files that no file of the project ends with."""
    return [
        name
        for name in FILE.findall(text)
        if "NAME" not in name
        and name.rpartition("/")[2] not in EXAMPLES
        and not any(file == name or file.endswith(f"/{name}") for file in _files())
    ]


def test_docstrings_and_comments_name_what_exists() -> None:
    wrong = []
    for path in modules().values():
        for line, text in prose(path):
            missing = [*unknown_members(text), *unknown_files(text)]
            wrong += [f"{path.relative_to(PACKAGE)}:{line}: {name}" for name in missing]
    assert not wrong, "named in a docstring or comment, and not there:\n" + "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_pages_about_the_code_name_what_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [*unknown_members(text), *unknown_files(text)] == []


def test_the_guard_sees_a_name_that_is_gone() -> None:
    assert unknown_members("`Batch.pack` and `Batch.view`, `build.BUILDERS`, `build.MAKERS`") == [
        "Batch.view",
        "build.MAKERS",
    ]
    assert unknown_files("see core/batch.py, batch.py and core/bundle.py") == ["core/bundle.py"]
    assert unknown_members("`algorithm.old` is a key of the config") == []
    assert unknown_members("a `TrainedTokens`, once a `TokenView`") == ["TokenView"]
