"""benchmarks/open.list: every line is taken by its program, with all that follows. A line that is
wrong is found here, and not on a machine that is rented by the minute.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import ROOT
from reinforge.config.load import config_from_dict
from reinforge.core.errors import InputError

BENCHMARKS = ROOT / "benchmarks"
LIST = BENCHMARKS / "open.list"
# what a setting is added to
LEAST = {
    "model": {"path": "m"},
    "data": {"source": "python"},
    "algorithm": {"name": "grpo"},
    "rewards": [{"name": "exact_match"}],
    "train": {"steps": 1},
    "run": {"dir": "r"},
}


class Parsed(Exception):
    """A program has understood its arguments."""


def lines() -> list[tuple[str, list[str]]]:
    found = [line.split(None, 2) for line in LIST.read_text().splitlines()]
    return [(line[0], shlex.split(line[2])) for line in found if line and line[0][0] != "#"]


def settings_of(given: argparse.Namespace) -> list[str]:
    """KEY=VALUE, however the program is given them."""
    then = getattr(given, "then", None) or []
    named = [*(getattr(given, "set", None) or []), *(getattr(given, "settings", None) or [])]
    return [*named, *(setting for each in then for setting in each.split())]


@pytest.mark.parametrize(("name", "words"), lines(), ids=[name for name, _ in lines()])
def test_its_program_takes_it(monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]) -> None:
    assert words[0] == "python"
    if words[1:3] == ["-m", "pytest"]:
        paths = [word for word in words if word.startswith("tests/")]
        assert paths and all((ROOT / path).exists() for path in paths)
        return
    file = Path(words[1])
    assert file.parent.name == "benchmarks" and (ROOT / file).exists()
    parse_args = argparse.ArgumentParser.parse_args
    seen: list[argparse.Namespace] = []

    def parses(self: argparse.ArgumentParser, *given: Any) -> Any:
        seen.append(parse_args(self, *given))
        raise Parsed

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module(file.stem)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parses)
    monkeypatch.setattr(sys, "argv", words[1:])
    with pytest.raises(Parsed):
        program.main()
    if file.stem == "gpu_learn":  # it reads the values of settings by itself
        program.config(seen[0], "r")
    settings = settings_of(seen[0])
    assert bool(settings) == any("=" in word for word in words)
    try:
        config_from_dict(LEAST, overrides=settings)
    except InputError as error:
        pytest.fail(f"{name}: {error}")
