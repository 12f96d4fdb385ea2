"""What `--help` and the list of recipes look like to somebody at a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from reinforge.cli.lazy import LazyGroup
from reinforge.cli.main import app, main
from reinforge.config.recipes import recipe_names, summary

NARROWEST = 26  # columns that the words beside an option need to be read


SUMMARIES: dict[tuple[str, ...], str] = {}  # of those that are imported when they are called


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, listed in group.commands.items():
        lazy = isinstance(group, LazyGroup) and name in group.entries
        command = group.load(name) if lazy else listed
        if lazy:
            SUMMARIES[*path, name] = group.entries[name].summary
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


def first_line(command: Any) -> str:
    text: str = command.help or ""
    return text.strip().partition("\n\n")[0]


ALL = dict(commands(typer.main.get_command(app)))


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_what_a_command_does_is_one_line_of_its_docstring(path: tuple[str, ...]) -> None:
    """The list of commands keeps the docstring's newlines: a second line would be ragged there."""
    first = first_line(ALL[path])
    assert first.endswith(".") and "\n" not in first


@pytest.mark.parametrize("path", SUMMARIES, ids=" ".join)
def test_the_list_of_commands_says_what_the_page_says(path: tuple[str, ...]) -> None:
    assert SUMMARIES[path] == first_line(ALL[path])


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_a_help_page_leaves_room_for_its_words(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*path, "--help"]) == 0
    page = capsys.readouterr().out
    assert "…" not in page  # a word that did not fit
    assert "Ⓜ" not in page  # a time that was taken for an emoji
    for line in page.splitlines():
        if line.startswith("│") and ("  --" in line or "│ --" in line):
            words = line.strip("│").rstrip().split("  ")[-1].strip()
            begins = line.rindex(words)
            assert 80 - 2 - begins >= NARROWEST, line


def test_the_list_of_recipes_tells_whole_sentences() -> None:
    for name in recipe_names():
        assert summary(name).endswith("."), name
    assert summary("pipeline").endswith("evaluation, export.")  # goes on over two lines
    assert summary("families/forward_kl").endswith("on given text.")  # before its commands
    assert summary("algorithms/dr_grpo").startswith("Dr. GRPO: no division by the group's")
