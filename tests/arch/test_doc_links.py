"""Links between pages and of notebooks go to a file and a heading that there are, and pictures in
HTML to a file. Every block says its language, by which the tests know what to do with it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.doc_snippets import FENCE, PAGES, snippets
from helpers.source_tree import ROOT

LINK = re.compile(r"\]\((?!\w+:)(?P<file>[^)#\s]*)#(?P<anchor>[^)\s]+)\)")
SOURCE = re.compile(r"<(?:img|source)[^>]*\bsrc(?:set)?=\"(?!\w+:)([^\"]+)\"")


def anchors(page: Path) -> set[str]:
    """As the site and GitHub make them of headings; a repeated one gets a number."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#+ +(.+?)\s*#*$", text, re.MULTILINE):
        plain = re.sub(r"\]\([^)]*\)|[`*\[]", "", heading)
        slug = re.sub(r"[^\w\s-]", "", plain).strip().lower()
        slug = re.sub(r"[-\s]+", "-", slug)
        name, number = slug, 0
        while name in found:
            number += 1
            name = f"{slug}_{number}"
        found.add(name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_anchors_and_pictures_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    wrong = []
    for link in LINK.finditer(text):
        target = (page.parent / link["file"]).resolve() if link["file"] else page
        if target.suffix == ".md" and link["anchor"] not in anchors(target):
            wrong.append(link[0])
    wrong += [name for name in SOURCE.findall(text) if not (page.parent / name).exists()]
    assert wrong == []


# Others look at them: `text` is what a program printed, of which only commands after "$ " are read.
LANGUAGES = {
    "sh": "test_doc_commands.py",
    "bash": "test_doc_commands.py",
    "json": "test_doc_commands.py",
    "text": "test_doc_commands.py",
    "python": "test_doc_python.py",
    "py": "test_doc_python.py",
    "pycon": "test_doc_python.py",
    "yaml": "test_configs.py",
    "math": "test_equations.py",
}


def test_every_block_is_of_a_language_that_a_test_reads() -> None:
    assert [str(s) for s in snippets() if s.kind not in LANGUAGES] == []
    assert all((ROOT / "tests" / "arch" / name).exists() for name in LANGUAGES.values())


@pytest.mark.parametrize("source", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda p: p.stem)
def test_links_of_notebooks_exist(source: Path) -> None:
    targets = re.findall(r"\]\((?!\w+:)([^)#\s]+)", source.read_text(encoding="utf-8"))
    assert targets
    assert [name for name in targets if not (source.parent / name).resolve().exists()] == []


def test_an_anchor_is_made_as_the_site_makes_it() -> None:
    found = anchors(ROOT / "docs" / "gallery.md")
    assert {"qlora-dpo", "dr-grpo", "larger-models-on-a-gpu"} <= found
