"""Python in README, CONTRIBUTING and docs: it compiles, every name in it is one, what it imports of
reinforge is there, and functions of reinforge take the arguments that it gives them.

The blocks of a page are one program: a later one uses names of an earlier one. Some of them are run
elsewhere: tests/arch/test_docs.py, tests/e2e/test_migrate_programs.py, tests/unit/test_api_page.py.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import reinforge
from helpers.doc_snippets import Snippet, snippets
from helpers.source_tree import ROOT

KINDS = ("python", "py")  # a program, and lines for a file of this repository
FRAGMENT = "    "  # lines of a table or a class, as they stand there: compiled as such only


def programs(*kinds: str) -> dict[Path, list[Snippet]]:
    found: dict[Path, list[Snippet]] = {}
    for snippet in snippets(*kinds):
        found.setdefault(snippet.page, []).append(snippet)
    return found


def trees() -> Iterator[tuple[Snippet, ast.Module]]:
    for blocks in programs(*KINDS).values():
        for block in blocks:
            if not block.text.startswith(FRAGMENT):
                yield block, ast.parse(textwrap.dedent(block.text), str(block))


def test_it_compiles() -> None:
    assert sum(1 for _ in trees()) >= 35
    for block, tree in trees():
        compile(tree, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def undefined(folder: Path, kind: str) -> list[str]:
    """Names that a page uses and does not make, by ruff (F821)."""
    for number, (page, blocks) in enumerate(programs(kind).items()):
        whole = [textwrap.dedent(b.text) for b in blocks if not b.text.startswith(FRAGMENT)]
        name = page.relative_to(ROOT).as_posix().replace("/", "-")
        (folder / f"{number}-{name}.py").write_text("\n".join(whole), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select=F821,E9"]
        + ["--output-format=concise", str(folder)],
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(str(folder))]


def test_every_name_of_a_program_is_made_or_imported(tmp_path: Path) -> None:
    assert undefined(tmp_path, "python") == []


def test_names_of_lines_for_our_files_are_in_our_files(tmp_path: Path) -> None:
    """`py` blocks are put into a file of this repository, which has what they use."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests" / "helpers").glob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    words = set(re.findall(r"\w+", source))
    found = undefined(tmp_path, "py")
    names = [match[1] for line in found if (match := re.search(r"`(\w+)`$", line))]
    assert len(names) == len(found), found
    assert [name for name in names if name not in words] == []


def test_what_is_imported_is_there() -> None:
    wrong = []
    for block, tree in trees():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "reinforge"
            ):
                module = importlib.import_module(str(node.module))
                missing = [a.name for a in node.names if not hasattr(module, a.name)]
                wrong += [f"{block}: {node.module}.{name}" for name in missing]
            if isinstance(node, ast.Import):
                ours = [a.name for a in node.names if a.name.split(".")[0] == "reinforge"]
                for name in ours:
                    importlib.import_module(name)
    assert wrong == []


def test_functions_take_what_they_are_given() -> None:
    """`reinforge.train(..., steps=3)`: there is such a function, and such an argument."""
    wrong = []
    seen = 0
    for block, tree in trees():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            owner = call.func.value
            if not isinstance(owner, ast.Name) or owner.id != "reinforge":
                continue
            seen += 1
            function: Any = getattr(reinforge, call.func.attr, None)
            if function is None:
                wrong.append(f"{block}: reinforge.{call.func.attr}")
                continue
            given = {each.arg: None for each in call.keywords if each.arg is not None}
            try:
                inspect.signature(function).bind_partial(*call.args, **given)
            except TypeError as error:
                wrong.append(f"{block}: reinforge.{call.func.attr}: {error}")
    assert wrong == []
    assert seen >= 10


@pytest.mark.parametrize("block", snippets("pycon"), ids=str)
def test_examples_with_a_prompt_print_what_they_say(block: Snippet) -> None:
    example = doctest.DocTestParser().get_doctest(block.text, {}, str(block), None, None)
    assert doctest.DocTestRunner().run(example).failed == 0
