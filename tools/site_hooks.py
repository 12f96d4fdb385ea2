"""Hooks of mkdocs: what GitHub's Markdown and the site's read differently."""

from __future__ import annotations

import re
from typing import Any

ROW = re.compile(r"^\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    r"""`\|` in the code of a table is a bar on GitHub, and a backslash with a bar here."""
    return ROW.sub(lambda row: CODE.sub(_plain, row.group()), markdown)


def _plain(code: re.Match[str]) -> str:
    return code.group().replace(r"\|", "|")
