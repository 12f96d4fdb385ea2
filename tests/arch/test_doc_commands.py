"""Every command in README, CONTRIBUTING and docs is one that there is: `reinforge ...` is parsed by
the command line itself, with all options; settings are keys of a configuration; programs, targets
and extras exist.

Nothing is run. What runs commands of the documentation is beside it: tests/e2e/test_cli_flow.py,
tests/e2e/test_recipes.py and the notebooks.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from helpers.doc_snippets import commands, snippets
from helpers.source_tree import ROOT
from reinforge.cli.main import app
from reinforge.config.explain import NAME, all_keys
from reinforge.config.load import load_config

COMMANDS = list(commands())
# typer has click within itself, or beside it in older versions
WrongUsage: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KEYS = {path for path, _ in all_keys()}
SECTIONS = {path[:i] for path in KEYS for i in range(1, len(path))}
SETTING = re.compile(r"([a-z_]+(?:\.[\w-]+)+)=.*", re.DOTALL)
PLACEHOLDER = re.compile(r"[A-Z_]+|<[a-z]+>")  # RUN, N: what a reader puts there
# of other people; a new one is looked at by hand once
OUTSIDE = {"cd", "cp", "curl", "docker", "export", "git", "jupyter", "mkdir", "pre-commit"} | {
    "source",
    "tensorboard",
    "trackio",
    "unset",
    "wandb",
}
FOLDERS = re.compile(r"(?:tests|benchmarks|tools|deploy|notebooks|recipes)/[\w./-]+")
STARTERS = ("srun", "torchrun")  # which start what follows their own options


def ours(words: list[str]) -> list[str] | None:
    """What `reinforge` is called with, if it is."""
    if Path(words[0]).name == "reinforge":
        return words[1:]
    if words[0] in STARTERS and "reinforge" in words and "-m" not in words:
        return words[words.index("reinforge") + 1 :]
    if "-m" in words and words[words.index("-m") + 1 : words.index("-m") + 2] == ["reinforge"]:
        return words[words.index("-m") + 2 :]
    return None


def parse(args: list[str]) -> None:
    """Raises what a user would be told. A placeholder may stand where a number is wanted, and a
    sentence may name a command without what it works on.
    """
    command: Any = typer.main.get_command(app)
    # K: any number; local|ray: either
    words = [re.sub(r"^[A-Z]$", "1", word.split("|")[0]) for word in args if word != "..."]
    while isinstance(command, TyperGroup) and words and not re.match("-|COMMAND", words[0]):
        context = command.make_context(command.name, [], resilient_parsing=True)
        name, found, words = command.resolve_command(context, words)
        if name is None:
            raise typer.BadParameter("there is no such command")
        command = found
    if isinstance(command, TyperGroup) or {"--help", "-h"} & set(words):
        return
    try:
        command.make_context(command.name, list(words))
    except typer.BadParameter as error:
        missing = type(error).__name__ == "MissingParameter"
        stands_for = any(PLACEHOLDER.fullmatch(word) and word in error.message for word in words)
        if not missing and not stands_for:
            raise


def is_key(key: str) -> bool:
    """A key of the schema, or inside of a value that has keys of its own (env.options.high)."""
    parts = tuple(int(part) if part.isdigit() else part for part in key.split("."))
    parts = tuple(0 if isinstance(part, int) else part for part in parts)
    return parts in KEYS or any(
        parts[:i] in KEYS - SECTIONS or (*parts[: i - 1], NAME) in KEYS | SECTIONS
        for i in range(1, len(parts) + 1)
    )


REINFORGE = [(where, args) for where, words in COMMANDS if (args := ours(words)) is not None]


def test_there_are_commands() -> None:
    assert len(REINFORGE) >= 150
    assert len({args[0] for _, args in REINFORGE if args}) >= 20


@pytest.mark.parametrize(
    "line",
    ["nothing", "train c.yaml --deep", "runs nothing", "plan", "tiny runs/tiny --context many"],
)
def test_wrong_ones_are_noticed(line: str) -> None:
    if line == "plan":  # a sentence may name it alone
        parse(line.split())
        return
    with pytest.raises(WrongUsage):
        parse(line.split())


@pytest.mark.parametrize(
    ("key", "known"),
    [("train.steps", True), ("train.stepz", False), ("env.options.high", True), ("trian.x", False)],
)
def test_wrong_keys_are_noticed(key: str, known: bool) -> None:
    assert is_key(key) is known


def test_the_command_line_takes_them() -> None:
    wrong = []
    for where, args in REINFORGE:
        try:
            parse(args)
        except WrongUsage as error:
            wrong.append(f"{where}: reinforge {' '.join(args)}: {error.format_message()}")
    assert wrong == []


def test_settings_are_keys() -> None:
    """Of a recipe with the recipe, which is loaded with them."""
    wrong = []
    for where, args in REINFORGE:
        settings = [word for word in args if SETTING.fullmatch(word)]
        recipes = [word for word in args if word.startswith(("recipe:", "recipes/"))]
        for setting in settings:
            key = re.sub(r"^stages\.[\w-]+\.", "", setting.partition("=")[0])  # of a pipeline
            if not is_key(key):
                wrong.append(f"{where}: {setting}")
        for recipe in recipes:
            name = recipe.removeprefix("recipe:").removeprefix("recipes/").removesuffix(".yaml")
            path = ROOT / "recipes" / f"{name}.yaml"
            if not path.exists():
                wrong.append(f"{where}: {recipe}")
            elif settings:
                load_config(path, settings)
    assert wrong == []


def test_programs_targets_and_extras_exist() -> None:
    wrong = []
    for where, words in COMMANDS:
        if ours(words) is not None:
            continue
        program = Path(words[0]).name
        if program == "make":
            called = [word for word in words[1:] if "=" not in word]
            missing = [word for word in called if word not in TARGETS]
        elif program in ("python", "python3", "pytest", "docker"):
            files = [word.partition("::")[0] for word in words[1:]]
            missing = [
                word for word in files if FOLDERS.fullmatch(word) and not (ROOT / word).exists()
            ]
        elif program in ("pip", "pipx"):
            named = re.findall(r"reinforge\[([\w,-]+)\]", " ".join(words))
            extras = {extra for each in named for extra in each.split(",")}
            missing = sorted(extras - PROJECT["optional-dependencies"].keys())
        else:
            missing = [] if program in OUTSIDE else [program]
        wrong += [f"{where}: {' '.join(words)}: {word}" for word in missing]
    assert wrong == []


def test_options_of_our_programs_exist() -> None:
    """`python benchmarks/X.py --option`: the option stands in the file."""
    wrong = []
    for where, words in COMMANDS:
        files = [word for word in words if re.fullmatch(r"(benchmarks|tools)/\w+\.py", word)]
        if not files or not (ROOT / files[0]).exists():
            continue
        text = (ROOT / files[0]).read_text(encoding="utf-8")
        options = [
            word.partition("=")[0] for word in words if word.startswith("--") and word != "--help"
        ]
        wrong += [f"{where}: {files[0]} {word}" for word in options if f'"{word}"' not in text]
    assert wrong == []


def test_what_curl_sends_is_json() -> None:
    posted = [words for _, words in COMMANDS if words[0] == "curl" and "-d" in words]
    sent = [words[words.index("-d") + 1] for words in posted]
    assert all(isinstance(json.loads(text), dict) for text in sent) and sent


@pytest.mark.parametrize("snippet", snippets("json"), ids=str)
def test_json_parses(snippet: Any) -> None:
    lines = [line for line in snippet.text.splitlines() if line.strip()]
    try:
        json.loads(snippet.text)
    except json.JSONDecodeError:  # rows of a file
        assert [json.loads(line) for line in lines]
