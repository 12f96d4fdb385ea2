"""How the pages of a Python package read, in numbers: `python tools/pages.py src/reinforge`.

Printed for each directory: characters per line that is not blank, lines past 100 and 120 columns,
exceptions from the formatter, tuple assignments (`a, b = x, y`) per 1000 lines, imports of the
package's own modules inside functions, and circles in its import graph with those counted.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path


def sources(root: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name, tests aside."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        if "tests" not in parts:
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


def imported(node: ast.AST, modules: dict[str, Path]) -> Iterator[str]:
    """The package's own modules that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    if isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if inner in modules:
                yield inner
            elif node.module in modules:
                yield node.module


def in_functions(tree: ast.Module, modules: dict[str, Path]) -> int:
    """Import statements inside functions that name a module of the package."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(n): n for function in functions for n in ast.walk(function)}
    return sum(any(imported(node, modules)) for node in inside.values())


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other, directly or not."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: dict[str, set[str]], into: list[str]) -> None:
        stack = [(start, iter(sorted(edges[start])))]
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            following = next((other for other in rest if other not in seen), None)
            if following is None:
                into.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(edges[following]))))

    for module in sorted(graph):
        if module not in seen:
            visit(module, graph, order)
    backwards: dict[str, set[str]] = {module: set() for module in graph}
    for module, others in graph.items():
        for other in others:
            backwards[other].add(module)
    seen.clear()
    found = []
    for module in reversed(order):
        if module not in seen:
            together: list[str] = []
            visit(module, backwards, together)
            if len(together) > 1:
                found.append(sorted(together))
    return found


def measure(root: Path) -> dict[str, float | int]:
    modules = sources(root)
    lines = [line for path in modules.values() for line in path.read_text("utf-8").splitlines()]
    filled = [line for line in lines if line.strip()]
    trees = {name: ast.parse(path.read_text("utf-8")) for name, path in modules.items()}
    graph = {
        name: {m for node in ast.walk(tree) for m in imported(node, modules) if m != name}
        for name, tree in trees.items()
    }
    tuples = sum(
        isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
    )
    return {
        "files": len(modules),
        "lines": len(lines),
        "characters per line": round(sum(map(len, filled)) / len(filled), 1),
        "lines past 100": sum(len(line) > 100 for line in lines),
        "lines past 120": sum(len(line) > 120 for line in lines),
        "fmt: skip": sum("fmt: skip" in line for line in lines),
        "tuple assignments per 1000": round(1000 * tuples / len(lines), 1),
        "own imports in functions": sum(in_functions(tree, modules) for tree in trees.values()),
        "import circles": len(circles(graph)),
        "longest file": max(len(p.read_text("utf-8").splitlines()) for p in modules.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("packages", nargs="+", type=Path)
    found = {path.name: measure(path) for path in parser.parse_args().packages}
    for name in next(iter(found.values())):
        print(f"{name:28}", *(f"{values[name]:>12}" for values in found.values()))


if __name__ == "__main__":
    main()
