"""The command `migrate`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from reinforge.config.load import config_from_dict
from reinforge.core.errors import InputError
from reinforge.migrate.translate import Migration, migrate_file
from reinforge.migrate.write import report_of, yaml_of


def migrate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A script or configuration of TRL, veRL, OpenRLHF, LLaMA-Factory or NeMo-RL.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the configuration there."),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help="trl, verl, openrlhf, llamafactory or nemo_rl; default: by what is in the file.",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="On how many GPUs the file is meant to run, where it counts batches per device.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print configuration and notes as JSON.")
    ] = False,
) -> None:
    """Make a configuration of a script or file of TRL, veRL, OpenRLHF, LLaMA-Factory or NeMo-RL.

    Nothing in the file is run. What every key became is told: mapped, something else here, nothing
    to set, no counterpart, or not known.

    [bold]Examples[/bold]

      reinforge migrate config.yaml --from trl

      reinforge migrate run_qwen3-8b.sh -o grpo.yaml

      reinforge migrate qwen3_lora_sft.yaml --devices 8 -o sft.yaml
    """
    migration = migrate_file(file, library, devices=devices)
    if as_json:
        print(json.dumps(_as_dict(migration), indent=2, default=str))
    elif out is None:
        print(yaml_of(migration), end="")
        print("\n".join(report_of(migration)), file=sys.stderr)
    if out is not None:
        if out.exists():
            raise InputError("this file exists.", where=str(out), fix="Name another, or remove it.")
        out.write_text(yaml_of(migration), encoding="utf-8")
        if not as_json:
            print("\n".join(report_of(migration)))
            print(f"\nwrote {out}; next: reinforge plan {out}")
    # whatever our rules say of it, after it could be read
    config_from_dict(migration.config, where=str(out or file))


def _as_dict(migration: Migration) -> dict[str, object]:
    return {
        "library": migration.library,
        "method": migration.method,
        "config": migration.config,
        "notes": [asdict(note) for note in migration.notes],
        "remarks": list(migration.remarks),
        "defaults": migration.defaults,
    }
