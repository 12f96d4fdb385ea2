"""The command `models`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from reinforge.algorithms.settings import closest
from reinforge.cli.show import console, print_mapping, print_table
from reinforge.config import model_table
from reinforge.config.architectures import NO_DECODERS
from reinforge.config.model import ModelConfig
from reinforge.config.model_table import COLUMNS, TOLD, Support
from reinforge.core.errors import InputError

WORDS = {
    "right": "right at toy size: log-probs, gradients and greedy answers of transformers",
    "trains": "trains right at toy size; the native engine cannot generate with it",
    "refused": "refused",
    "not tried": model_table.NOT_TRIED,
}
WIDE = 100  # columns of a terminal that has room for the names people know in the same table
MARKS = {"yes": "yes, was run", "code": "follows from the code, was not run", "no": "no"}


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help=(
                "An architecture (qwen2, LlamaForCausalLM), a model's directory or its config.json,"
                " or a hub id."
            ),
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show which architectures are supported, by which engine, backend and feature.

    [bold]Examples[/bold]

      reinforge models

      reinforge models qwen3_moe

      reinforge models path/to/model
    """
    found = list(model_table.table()) if name is None else [support_of(name)]
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    elif name is None:
        _print_all(found)
    else:
        _print_one(found[0])


def support_of(name: str) -> Support:
    """What is known of an architecture or of a model."""
    found = _in_table(name)
    if found.verdict != "not tried":
        return found
    from reinforge.models.load import no_text_model

    why = no_text_model(found.name)
    return found if why is None else model_table.refused(found.name, why)


def _in_table(name: str) -> Support:
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    known = model_table.named(name)
    if file.is_file() or (path.exists() and known is None):
        return model_table.support(_read(file))
    if known is not None:
        return model_table.support({"model_type": known})
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from reinforge.models.load import load_config

        try:
            return model_table.support(load_config(ModelConfig(path=name), "NAME").to_dict())
        except InputError as error:
            if (near := _near(name.partition("/")[2])) is None:
                raise
            fix = f"{error.fix} By its name it is of the kind that `reinforge models {near}` shows."
            raise InputError(error.what, where=error.where, fix=fix) from error
    if (listed := _listed_by_transformers(name)) is not None:
        return model_table.support({"model_type": listed})
    near = _near(name)
    guess = f"Did you mean {near}? " if near else ""
    raise InputError(
        f"{name!r} is neither an architecture that something is known of nor a model here.",
        where="NAME",
        fix=(
            f"{guess}`reinforge models` lists what was tried; `reinforge models DIRECTORY` tells of"
            " a model that lies here, and OWNER/NAME of one on the hub."
        ),
    )


def _near(name: str) -> str | None:
    """The architecture that a name begins with, or is much like."""
    near = model_table.beginning(name)
    if near is None and (alike := closest(model_table.plain(name), model_table.plain_names(), 0.7)):
        near = model_table.named(alike)
    return near


def _listed_by_transformers(name: str) -> str | None:
    """The model_type that transformers has by this name, however it is spelled."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return {model_table.plain(each): each for each in CONFIG_MAPPING_NAMES}.get(
        model_table.plain(name)
    )


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(f"there is no {file}.", where="NAME", fix="Give the directory of a model.")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"{file} is no JSON: {error}.", where="NAME", fix="Give a model's config.json."
        ) from error
    if not isinstance(found, dict) or "model_type" not in found:
        run = (file.parent / "metrics.jsonl").exists()
        raise InputError(
            f"{file.parent} is a run, not a model." if run else f"{file} names no model_type.",
            where="NAME",
            fix=(
                f"`reinforge export {file.parent} OUT` writes its model; give that."
                if run
                else "Give a model's config.json."
            ),
        )
    return found


def _print_all(found: list[Support]) -> None:
    out = console()
    wide = out.width >= WIDE or not out.is_terminal
    print_table(
        [
            {
                "architecture": each.name,
                **{column: each.cells[column].mark for column in TOLD},
                **({"known as": each.known_as or ""} if wide else {}),
            }
            for each in found
            if each.verdict in ("right", "trains")
        ]
    )
    if not wide:
        print()
        print_table(
            [
                {"architecture": each.name, "known as": each.known_as}
                for each in found
                if each.known_as and each.verdict in ("right", "trains")
            ]
        )
    print()
    refused = [each.name for each in found if each.verdict == "refused"]
    decoders = [name for name in refused if name not in NO_DECODERS]
    print_mapping(
        {
            "all of these": "packs, shared prompts, LoRA, save and load, in float32 and bfloat16",
            "refused": decoders,
            "no decoders": f"{len(refused) - len(decoders)} encoders and others, refused too",
            "others": model_table.NOT_TRIED,
            "more": "reinforge models NAME says why, and by which engine and backend",
        }
    )


def _print_one(found: Support) -> None:
    told: dict[str, Any] = {
        "architecture": found.name,
        "known as": found.known_as,
        "other types of that name": model_table.also_known_so(found.name) or None,
        "verdict": WORDS[found.verdict] + (f": {found.reason}" if found.reason else ""),
    }
    if found.verdict in ("right", "trains"):
        for column in COLUMNS:
            cell = found.cells[column]
            told[column] = MARKS[cell.mark] + (f": {cell.why}" if cell.why else "")
    print_mapping(told)
