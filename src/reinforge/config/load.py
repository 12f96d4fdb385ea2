"""From a YAML file and `key=value` overrides to a `Config`, or to one error that names every
problem in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reinforge.config.base import spelled_out
from reinforge.config.explain import explain
from reinforge.config.recipes import is_recipe, probably_meant, recipe_text
from reinforge.config.schema import Config
from reinforge.config.strict import clean, dotted, parse, scalar
from reinforge.core.errors import InputError

MAX_BYTES = 1_000_000


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration file.

    Overrides are `dotted.key=value`, applied before anything is checked.
    """
    path = Path(path)
    data, lines = parse(read_text(path), str(path))
    places = {where: f"line {line}" for where, line in lines.items()}
    return build_config(data, str(path), overrides, places)


def config_from_dict(
    data: dict[str, Any], *, where: str = "config", overrides: Sequence[str] = ()
) -> Config:
    """The same checks for a configuration that Python code made."""
    try:
        plain = json.loads(json.dumps(data, default=os.fspath, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"not plain data: {error}.",
            where=where,
            fix="Use text, finite numbers, booleans, lists and dicts.",
        ) from error
    return build_config(plain, where, overrides, {})


def read_text(path: Path) -> str:
    """A configuration file's text (or that of `recipe:NAME`), or an error that says why there is
    none.
    """
    if is_recipe(path):
        return recipe_text(str(path))
    if path.is_dir():
        raise InputError(
            "this is a directory, not a configuration file.",
            where=str(path),
            fix="Give the .yaml file.",
        )
    if not path.exists():
        near = (
            sorted(str(p) for p in path.parent.glob("[!.]*.yaml"))[:5]
            if path.parent.is_dir()
            else []
        )
        raise InputError(
            "no such configuration file.",
            where=str(path),
            fix=probably_meant(path.stem)
            + (
                f"There are: {', '.join(near)}."
                if near
                else "Check the path. `reinforge recipes` lists what can be started from."
            ),
        )
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"not UTF-8 text (byte {error.start}).", where=str(path), fix="Save the file as UTF-8."
        ) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}.", where=str(path)) from error
    if len(raw) > MAX_BYTES:
        raise InputError(
            f"larger than {MAX_BYTES:,} bytes: this is no configuration.",
            where=str(path),
            fix="Put data into a data file.",
        )
    return text


def build_config(
    data: Any, where: str, overrides: Sequence[str], places: dict[tuple[str | int, ...], str]
) -> Config:
    """Plain data with overrides as a `Config`. `places` says on which line each key is."""
    if not isinstance(data, dict):
        got = "empty" if data is None else f"a {type(data).__name__}"
        raise InputError(
            f"the top level is {got}, not a mapping.",
            where=where,
            fix="Start with sections: `model:`, `algorithm:`, `data:`, `train:`, `run:`.",
        )
    if "stages" in data:
        raise InputError(
            "this is a pipeline of several runs, not one run.",
            where=where,
            fix=(
                "`reinforge train` and `reinforge plan` take it; for other commands name a stage's"
                " directory."
            ),
        )
    for override in overrides:
        path = apply_override(data, override)
        places = {at: line for at, line in places.items() if at[: len(path)] != path}
        places[path] = f"override `{override}`"
    try:
        # strict: no "1_000" as 1000, no true as 1
        return Config.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = explain(error, data, places)
        count = f"{len(problems)} problems:\n  - " if len(problems) > 1 else ""
        raise InputError(count + "\n  - ".join(problems), where=where) from None


def override_value(text: str, *, where: str) -> Any:
    """The value of `key=value`: a scalar by the rules of the file, or a flow list, flow mapping or
    quoted text.

    Anything else stays text, so that `data.template=Q: {question}` needs no quotes inside the
    quotes of the shell.
    """
    if text[:1] in ("[", "{", '"', "'"):
        return parse(text, where)[0]
    return scalar(clean(text, where=where), where=where)


def apply_override(data: dict[str, Any], override: str) -> tuple[str | int, ...]:
    """Sets one dotted key in place and returns its path.

    Sections that are missing appear; `rewards.0.weight` indexes a list.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    where = f"override `{override}`"
    if not equals or not all(parts):
        raise InputError(
            "not of the form key=value.", where=where, fix="Write e.g. `train.learning_rate=1e-5`."
        )
    if not text.strip():  # often a variable of the shell that is not set
        raise InputError(
            f"{key.strip()} is given nothing.",
            where=where,
            fix=f"Write a value, {key.strip()}=null for none, or {key.strip()}='\"\"' for a text"
            " without letters.",
        )
    value = override_value(text.strip(), where=where)
    here: Any = data
    path: tuple[str | int, ...] = ()
    # `agent: file.py:function` and agent.seconds=60
    if len(parts) > 1 and not parts[1].isdecimal() and parts[0] in data:
        data[parts[0]] = spelled_out(parts[0], data[parts[0]])
    for i, part in enumerate(parts):
        if not isinstance(here, list | dict):
            raise InputError(f"`{dotted(path)}` is {here!r}: it has no keys.", where=where)
        step: Any = part
        if isinstance(here, list):
            step = _index(here, part, path, where)
            here.extend([None] * (step + 1 - len(here)))
        path = (*path, step)
        old = here[step] if isinstance(here, list) else here.get(step)
        if i == len(parts) - 1:
            here[step] = value
        elif old is None:
            here[step] = [] if parts[i + 1].isdecimal() else {}
        here = here[step]
    return path


def _index(items: list[Any], part: str, path: tuple[str | int, ...], where: str) -> int:
    if not part.isdecimal() or int(part) > len(items):
        raise InputError(
            f"`{dotted(path)}` is a list of {len(items)}: `{part}` is no index of it.",
            where=where,
            fix=f"Use 0 to {len(items)} ({len(items)} appends).",
        )
    return int(part)
