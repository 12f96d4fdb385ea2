"""The site: its search from a disk, what its first page says, and the list of commands."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import yaml

from helpers.needs import missing
from helpers.paths import ROOT
from reinforge.cli.main import ReinforgeCommands
from reinforge.cli.runs import RunsCommands

sys.path.append(str(ROOT / "tools"))
from chromium import Chromium, find

SHIM = "scripts/iframe-worker.js"

# as the search of the theme: it counts words, and answers whoever started it
WORKER = """
addEventListener("message", async event => {
  postMessage({ words: event.data.split(" ").length, from: typeof lunr });
});
self.lunr = {};
"""
ASK = """new Promise(done => {
  const worker = new Worker("worker.js");
  worker.addEventListener("message", event => done(event.data));
  worker.postMessage("three words here");
})"""


def test_a_worker_answers_on_a_page_from_a_disk(tmp_path: Path) -> None:
    if find() is None:
        missing("browser", "chromium is not installed")
    shim = (ROOT / "docs" / SHIM).read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    page.write_text(f"<body><script>{shim}</script></body>")
    (tmp_path / "worker.js").write_text(WORKER)
    with Chromium() as browser:
        browser.open(page)
        assert browser.evaluate(ASK) == {"words": 3, "from": "object"}
        assert browser.evaluate("typeof lunr") == "undefined", "it ran in the page itself"
        assert browser.errors == []


def test_the_site_asks_no_other_host() -> None:
    """The plugin `offline` brings a script from elsewhere unless one of this name is given."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    site = yaml.safe_load(text)
    assert site["extra"]["polyfills"] == [SHIM]
    assert {"search", "offline"} <= set(site["plugins"])
    assert site["theme"]["font"] is False
    assert re.findall(r"https?://", text) == []


def rows(page: str) -> list[str]:
    """Of the table with what was measured."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| measured"))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return lines[first:last]


def test_readme_and_home_state_the_same_figures_and_these_were_measured() -> None:
    assert rows("README.md") == rows("docs/index.md")
    text = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    measured = [float(figure) for figure in re.findall(r"\d+\.\d+", text)]
    figures = re.findall(r"\d+\.\d+", " ".join(rows("README.md")))
    assert len(figures) >= 8
    for figure in figures:
        digits = len(figure.split(".")[1])  # 0.174 there may be 0.17 here
        assert float(figure) in [round(value, digits) for value in measured], figure


def test_every_command_is_on_the_page_of_commands() -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?`) \| ", page, re.MULTILINE)
    named = {word for cell in cells for word in re.findall(r"[a-z]+", cell)}
    assert set(ReinforgeCommands.entries) - named == set()
    assert {*RunsCommands.entries, "list", "show", "report", "why"} - named == set()


def test_a_bar_in_the_code_of_a_table_has_no_backslash_on_the_site() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "site_hooks.py"))["on_page_markdown"]
    text = "| `str \\| None` | a \\| b |\n\n`a \\| b` in a sentence\n"
    assert made(text, page=None) == "| `str | None` | a \\| b |\n\n`a \\| b` in a sentence\n"
