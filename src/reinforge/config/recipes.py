"""The recipes by name: `recipe:chain_sum` wherever a configuration file is asked for, installed or
from a clone.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from reinforge.algorithms.settings import closest
from reinforge.core.errors import InputError

PREFIX = "recipe:"
MOST_NAMED = 8
SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z`'\"])")


def recipes_dir() -> Path:
    """Inside the installed package; in a clone at the root of the repository."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def recipe_names() -> list[str]:
    """Every recipe, as `recipe:` takes it: `chain_sum`, `algorithms/grpo` ..."""
    root = recipes_dir()
    return sorted(
        path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")
    )


def is_recipe(path: Path | str) -> bool:
    return str(path).startswith(PREFIX)


def recipe_path(name: str) -> Path:
    """The file of `recipe:chain_sum` or `chain_sum`."""
    short = name.removeprefix(PREFIX).removesuffix(".yaml")
    names = recipe_names()
    if short not in names:
        near = [other for other in names if short.rsplit("/", 1)[-1] in other]
        if near:
            more = " ..." if len(near) > MOST_NAMED else ""
            hint = f"There are: {', '.join(near[:MOST_NAMED])}{more}. "
        else:
            hint = probably_meant(short)
        raise InputError(
            f"there is no recipe {short!r}.",
            where=f"{PREFIX}{short}",
            fix=f"{hint}`reinforge recipes` lists all.",
        )
    return recipes_dir() / f"{short}.yaml"


def probably_meant(name: str) -> str:
    """The recipe that somebody had in mind, as a question; nothing where none is near. The name of
    its folder may be missing.

    >>> probably_meant("chainsum"), probably_meant("gpro"), probably_meant("xyz")
    ('Did you mean recipe:chain_sum? ', 'Did you mean recipe:algorithms/grpo? ', '')
    """
    short = {full.rsplit("/", 1)[-1]: full for full in reversed(recipe_names())}
    near = closest(name.rsplit("/", 1)[-1], short, 0.7)
    return f"Did you mean {PREFIX}{short[near]}? " if near else ""


def recipe_text(name: str) -> str:
    """A recipe's YAML.

    It names files beside it as `recipes/...`: by name, that is wherever the recipes lie.
    """
    text = recipe_path(name).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    root = f"{recipes_dir()}/"
    return "".join(
        line if line.lstrip().startswith("#") else line.replace("recipes/", root) for line in lines
    )


def summary(name: str) -> str:
    """What a recipe's first comment says of it: every whole sentence that begins on its first line.

    A sentence that only leads to the commands below it ends with a colon, and is left out.
    """
    prose = []
    for line in recipe_path(name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith("#   "):  # commands are indented
            break
        prose.append(line.removeprefix("# ").strip())
    begins = 0  # where the sentence that is looked at begins
    told = []
    for sentence in SENTENCE_END.split(" ".join(prose)):
        if begins > len(prose[0]) or not sentence.endswith("."):
            break
        told.append(sentence)
        begins += len(sentence) + 1
    return " ".join(told)


def how_to_make(path: str) -> str | None:
    """The commands that make the toy model which recipes look for under this path, as a line to
    paste; None where it is no such path.

    The comments of the recipes name them: `reinforge tiny runs/tiny && reinforge train ...`. What
    they make that is there already is left out.
    """
    for recipe in recipe_names():
        for line in recipe_path(recipe).read_text(encoding="utf-8").splitlines():
            if not line.startswith("#   "):
                continue
            told = line.lstrip("# ").partition(" #")[0]
            commands = [command.split() for command in told.split(" && ")]
            for i, command in enumerate(commands):
                if (target := _target(command)) == path or path.startswith(f"{target}/"):
                    needed = [each for each in commands[:i] if not _is_there(_target(each))]
                    return " && ".join(_by_name(each) for each in [*needed, command])
    return None


def _target(command: list[str]) -> str | None:
    """The directory of a model that a command makes, or of several."""
    match command:
        case ["reinforge", "tiny", target, *_]:
            return target
        case ["reinforge", "export", _, target, *_]:
            return target
        case ["reinforge", "demo", "--dir", target, *_]:
            return target
    return None


def _is_there(target: str | None) -> bool:
    return target is not None and Path(target).exists()


def _by_name(command: list[str]) -> str:
    """A command whose recipe is named as every installation knows it.

    >>> _by_name(["reinforge", "train", "recipes/algorithms/sft.yaml"])
    'reinforge train recipe:algorithms/sft'
    """
    return re.sub(r"\brecipes/(\S+)\.yaml", rf"{PREFIX}\1", " ".join(command))


def copy_recipes(target: Path) -> None:
    """All of them, with the programs beside them, into a directory that is not there yet."""
    if target.exists():
        raise InputError(
            "this exists already.", where=str(target), fix="Name a directory that is not there yet."
        )
    shutil.copytree(recipes_dir(), target, ignore=shutil.ignore_patterns("__pycache__"))
