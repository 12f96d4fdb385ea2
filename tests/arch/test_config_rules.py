"""config/ has no import circle, and says in one place only which backend or engine does what."""

from __future__ import annotations

import ast

from helpers.source_tree import imports, modules, tree
from reinforge.config.engine import SERVERS

CONFIG = "reinforge.config"
RULES = "reinforge.config.rules"
CHOICES = {"backend", "engine", "kind"}  # train.backend, rollout.engine, cluster.kind


def test_config_has_no_circle_with_hidden_imports_counted() -> None:
    names = [name for name in modules() if name == CONFIG or name.startswith(f"{CONFIG}.")]
    left = {name: {found.module for found in imports(name)} & set(names) - {name} for name in names}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"


def test_only_the_rules_compare_the_backend_or_the_engine() -> None:
    wrong = []
    for name, path in modules().items():
        if not name.startswith(f"{CONFIG}.") or name.startswith(RULES):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and ast.unparse(node.left) in {
                f"{owner}.{choice}"
                for owner in ("train", "rollout", "cluster", "config.train", "cfg.train")
                for choice in CHOICES
            }:
                wrong.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "make it a row of config/rules/:\n" + "\n".join(wrong)


def test_only_its_own_files_name_a_server() -> None:
    """So that a new one is a line of `SERVERS` and a dialect, perhaps with a plug-in beside it.

    Those who translate files of other libraries name servers as these do.
    """
    homes = {
        server: (
            "reinforge.config.engine",
            "reinforge.migrate.libraries.",
            facts.dialect.partition(":")[0],
        )
        for server, facts in SERVERS.items()
    }
    wrong = []
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if node.value in homes and not name.startswith(homes[node.value]):
                wrong.append(f"{name}:{node.lineno}: {node.value}")
    assert not wrong, "make it a fact of `ServerFacts`:\n" + "\n".join(wrong)
