"""Metrics are for people: loops and backends decide by reports, and how numbers of one name are
combined is a property of the metric and not of its name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from helpers.source_tree import PACKAGE, modules, tree

DECIDING = ("loops/", "backends/", "cluster/", "build/")
METRIC = re.compile(r"[a-z_]+(/[a-z_@]+)+")
# (file, name) of what is read by its name all the same: why
ALLOWED = {
    ("loops/rl.py", "train/loss"): "for people, beside what the step did with its groups",
    ("loops/run.py", "time/eval"): "seconds of a phase",
    ("loops/run.py", "time/checkpoint"): "seconds of a phase",
    ("loops/trace.py", "ratio/max"): "for people, of one sample",
    ("loops/trace.py", "ratio/min"): "for people, of one sample",
}


def read_by_name() -> Iterator[tuple[str, str]]:
    """(file, name) of every `x["a/b"]` that is read, and of every `x.get("a/b")`."""
    for path in modules().values():
        place = path.relative_to(PACKAGE).as_posix()
        if not place.startswith(DECIDING):
            continue
        for node in ast.walk(tree(path)):
            match node:
                case ast.Subscript(slice=ast.Constant(value=str(name)), ctx=ast.Load()):
                    pass
                case ast.Call(
                    func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]
                ):
                    pass
                case _:
                    continue
            if METRIC.fullmatch(name):
                yield place, name


def test_nothing_is_decided_by_the_name_of_a_metric() -> None:
    assert set(read_by_name()) == ALLOWED.keys()


def test_a_name_does_not_say_how_a_metric_is_combined() -> None:
    for path in modules().values():
        for node in ast.walk(tree(path)):
            match node:
                case ast.Call(func=ast.Attribute(attr="endswith"), args=[ast.Constant(value=end)]):
                    assert end not in ("/max", "/min"), f"{path}:{node.lineno}"
