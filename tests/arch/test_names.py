"""Names that a newcomer can guess: one class for one name, and no word of a private dictionary."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from helpers.source_tree import PACKAGE

# What these were is in docs/glossary.md: worker group, mailbox, payload, rollout
# buffer, rollout batch, row sampler, resumable engine, dispatch, shards, tool template ...
RETIRED = """
    ahead answered asked begun bind blame both carry choose chooser contest crew deal dealt desk
    door form given gold grid hand hands harvest heard host line made memory pace pacing paired
    parcel parcelled piece pieces place race ranked seat talk told tried wanted world
"""
# nouns, whatever they end in, and an exit of the command line
NOUNS = frozenset({"Recording", "Sampling", "Terminated"})


def classes() -> dict[str, list[Path]]:
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(PACKAGE))
    return found


def test_a_class_name_means_one_class() -> None:
    twice = {name: places for name, places in classes().items() if len(places) > 1}
    assert not twice


def test_retired_words_name_no_class_and_no_module() -> None:
    named = {name: name.strip("_").lower() for name in classes()}
    named |= {str(path): path.stem for path in PACKAGE.rglob("*.py")}
    retired = set(RETIRED.split())
    assert not {name for name, word in named.items() if word in retired}


def test_a_participle_is_no_noun() -> None:
    """`Answered` is what happened to something; the something has a name."""
    words = [name for name in classes() if re.fullmatch(r"_?[A-Z][a-z]+(ed|ing)", name)]
    assert set(words) <= NOUNS, sorted(set(words) - NOUNS)
