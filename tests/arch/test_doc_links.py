"""Links between pages go to a heading that there is, and pictures in HTML to a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.doc_snippets import FENCE, PAGES
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


def test_an_anchor_is_made_as_the_site_makes_it() -> None:
    found = anchors(ROOT / "docs" / "gallery.md")
    assert {"qlora-dpo", "dr-grpo", "larger-models-on-a-gpu"} <= found
