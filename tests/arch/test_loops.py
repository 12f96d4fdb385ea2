"""A run and what it is made of get everything when they are made: nobody sets it from outside."""

from __future__ import annotations

import ast

from helpers.source_tree import PACKAGE, modules, tree

OWNERS = ("run", "evaluator", "checkpointer", "signals", "attempt")


def last_name(node: ast.expr) -> str:
    """`run` of `trainer.run`, and of `run` itself."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def set_from_outside(source: ast.AST) -> list[tuple[int, str]]:
    """Assignments to an attribute of a run, an evaluator, ..., wherever they are."""
    return [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and last_name(node.value) in OWNERS
    ]


def test_nothing_is_set_on_a_run_from_outside() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {what}"
        for name, path in modules().items()
        if name.startswith(("reinforge.loops", "reinforge.build"))
        for line, what in set_from_outside(tree(path))
    ]
    assert found == []


def test_the_guard_sees_it() -> None:
    code = "run.settle = x\nself.run.checkpointer.memory += y\nself.run = x\nother.passing = y\n"
    found = set_from_outside(ast.parse(code))
    assert found == [(1, "run.settle"), (2, "self.run.checkpointer.memory")]
