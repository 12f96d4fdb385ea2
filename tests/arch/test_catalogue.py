"""What an algorithm is stands once, in algorithms/catalogue.py: nobody else asks for a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from helpers.source_tree import PACKAGE, modules
from reinforge.algorithms.catalogue import TABLE

CATALOGUE = "algorithms/catalogue.py"
# Registries of functions: there a key is the name of a loss or a part, which may be that of an
# algorithm too. A comparison is refused there like everywhere.
REGISTRIES = ("algorithms/",)
# The same word for another thing: (file, word).
OTHER_THINGS = {
    ("rewards/build.py", "process"),  # the reward of a process reward model
    ("rewards/names.py", "process"),
    ("check/rewards.py", "process"),
    ("plan/hub.py", "process"),
    ("plan/preflight.py", "process"),
    ("algorithms/pairing.py", "sigmoid"),  # how wins are counted
    ("algorithms/losses/preference.py", "reverse_kl"),  # the divergence of DPO
    ("models/exact_functions.py", "sigmoid"),  # a function of torch
    ("offline/labels.py", "margin"),  # a column of data
    ("offline/make_data.py", "margin"),  # by which answers of a pair differ
    ("data/formats/table.py", "margin"),
    ("data/formats/table.py", "kto"),  # a format of rows
    ("config/data.py", "kto"),
    ("watch/view.py", "margin"),  # what a number on the screen is called
    ("cli/main.py", "sft"),  # a command
    ("cli/demo.py", "sft"),  # a heading of what the demo prints
}


def names_asked_for(tree: ast.AST, *, registry: bool) -> Iterator[tuple[int, str]]:
    """(line, name) of algorithms that code compares with, looks up, or keeps a list or table of.

    A name as a value (`{"name": "grpo"}`, a default, a text) is no question and stays allowed.
    """
    for node in ast.walk(tree):
        asked: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("get", "pop", "startswith", "endswith", "index", "count"):
                asked = list(node.args[:1])
        elif isinstance(node, ast.Dict) and not registry:
            asked = list(node.keys)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set) and not registry:
            constant = all(isinstance(e, ast.Constant | ast.Starred) for e in node.elts)
            asked = list(node.elts) if constant else []
        for one in asked:
            yield from _names(one)


def _names(node: ast.expr | None) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in TABLE:
        yield node.lineno, node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for element in node.elts:
            yield from _names(element)


def test_nobody_asks_for_an_algorithm_by_its_name() -> None:
    found = []
    for path in modules().values():
        place = path.relative_to(PACKAGE).as_posix()
        # libraries of others name algorithms: what they call them is what is translated
        if place == CATALOGUE or place.startswith("migrate/libraries/"):
            continue
        registry = place.startswith(REGISTRIES)
        found += [
            f"{place}:{line}: {name}"
            for line, name in names_asked_for(ast.parse(path.read_text()), registry=registry)
            if (place, name) not in OTHER_THINGS
        ]
    assert not found, "ask the catalogue for a property instead of\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        'if name == "grpo": pass',
        'if "gkd" != cfg.algorithm.name: pass',
        'x = name in ("ppo", "vapo")',
        'CRITICS = frozenset({"ppo", "vapo"})',
        'SINGLE = ("remax", *OTHERS)',
        'UNITS = {"margin": 2}',
        'share = TABLE["gkd"].options',
        'row = TABLE.get("topk")',
        'match name:\n    case "spin" | "xpo": pass',
    ],
)
def test_the_guard_sees_such_a_question(code: str) -> None:
    assert list(names_asked_for(ast.parse(code), registry=False))


def test_the_guard_lets_values_pass_and_registries_only_have_keys() -> None:
    value = ast.parse('raw = {"algorithm": {"name": "grpo"}}\nprint("ppo")')
    table = ast.parse('LOSSES = {"kto": kto}')
    question = ast.parse('if name == "aot": pass')
    assert list(names_asked_for(value, registry=False)) == []
    assert list(names_asked_for(table, registry=True)) == []
    assert list(names_asked_for(question, registry=True)) == [(1, "aot")]


def test_exceptions_are_needed() -> None:
    """An exception for a line that is gone would hide a new one."""
    for place, word in OTHER_THINGS:
        tree = ast.parse((PACKAGE / place).read_text())
        found = names_asked_for(tree, registry=place.startswith(REGISTRIES))
        assert word in {name for _, name in found}, (place, word)
