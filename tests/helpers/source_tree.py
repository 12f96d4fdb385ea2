"""What the architecture tests read: the modules of the package, what each imports and where, and
the files of the project.
"""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from helpers.paths import ROOT, SRC

PACKAGE = SRC / "reinforge"


@dataclass(frozen=True)
class Import:
    module: str  # dotted, absolute; the submodule where `from package import submodule` names one
    line: int
    # runs when the file is imported (not inside a function, not under TYPE_CHECKING)
    at_module_level: bool
    in_function: bool  # runs when a function is called


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _absolute(node: ast.ImportFrom, module: str, path: Path) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


@cache
def imports(module: str) -> list[Import]:
    """Every import statement of a module, the ones inside functions and under TYPE_CHECKING
    included.
    """
    path = modules()[module]
    found = []

    def visit(node: ast.AST, at_module_level: bool, in_function: bool) -> None:
        def add(name: str, line: int) -> None:
            found.append(Import(name, line, at_module_level, in_function))

        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, path)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                add(submodule if submodule in modules() else base, node.lineno)
        for child in ast.iter_child_nodes(node):
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing_only = (
                isinstance(node, ast.If)
                and "TYPE_CHECKING" in ast.dump(node.test)
                and child in node.body
            )
            visit(
                child,
                at_module_level=at_module_level and not deferred and not typing_only,
                in_function=in_function or deferred,
            )

    visit(tree(path), at_module_level=True, in_function=False)
    return found


@cache
def project_files() -> list[Path]:
    """Every file that is or would be committed: what git tracks or does not ignore.

    Without git: everything but caches.
    """
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        inside = [p.relative_to(ROOT).parts for p in ROOT.rglob("*")]
        made = {"runs", "site", "build", "__pycache__"}
        own = [
            parts
            for parts in inside
            if not (made & set(parts) or any(x.endswith(".egg-info") for x in parts))
        ]
        paths = [
            ROOT.joinpath(*parts)
            for parts in own
            if not parts[0].startswith(".") or parts[0] in (".ci", ".gitignore")
        ]
    return sorted(p for p in paths if p.is_file())
