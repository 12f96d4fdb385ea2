"""The rows of a benchmark: of a file, of a directory, of the hub, or given as objects.

All are read and checked before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from reinforge.core.errors import InputError
from reinforge.data.objects import rows_of
from reinforge.data.readers import FILES, TEXTS, read
from reinforge.evals.benchmarks.preset import HubSplit, Preset, Record

# a path, a hub id, or the rows themselves
GivenRows = str | Path | Iterable[Any]
TABLES = tuple(suffix for suffix in FILES if suffix not in TEXTS)


@dataclass(frozen=True, slots=True)
class RowsOption:
    """Where somebody says which rows: an option of the command line, or a key of a config."""

    where: str  # for errors
    example: str  # how a file is given there
    suffix: str = ""  # of the file's name in a directory: gsm8k.shots.jsonl
    instead: str = ""  # what else helps


def rows_option(task: str) -> RowsOption:
    return RowsOption(f"--rows {task}", f"--rows {task}=FILE")


def shots_option(task: str) -> RowsOption:
    return RowsOption(f"--shots {task}", f"--shots {task}=FILE", ".shots", " or --fewshot 0")


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """A row as its data set has it, and its name in records."""

    id: str
    record: Record


def read_rows(
    preset: Preset, given: GivenRows | None, limit: int | None, option: RowsOption | None = None
) -> list[BenchmarkRow]:
    """The rows that are asked; None: those of the hub."""
    option = option or rows_option(preset.name)
    records = _checked(preset, _records(preset, preset.rows, given, option))
    rows: list[BenchmarkRow] = []
    seen: set[str] = set()
    for i, record in enumerate(islice(records, limit)):
        own = record.get(preset.id_column) if preset.id_column else None
        name = str(i if own is None else own)
        if name in seen:
            raise InputError(
                f"two rows have the {preset.id_column} {name!r:.80}.",
                where=option.where,
                fix="Leave one out, or rename them.",
            )
        seen.add(name)
        rows.append(BenchmarkRow(name, record))
    if not rows:
        raise InputError("there are no rows.", where=option.where)
    return rows


def read_examples(
    preset: Preset,
    given: GivenRows | None,
    count: int,
    rows: Sequence[BenchmarkRow],
    option: RowsOption | None = None,
) -> list[list[Record]]:
    """For every row the first `count` examples: of its own subject, where the preset says so and
    the rows have one. None: those of the hub. A row is no example of itself.
    """
    option = option or shots_option(preset.name)
    if count == 0:
        return [[] for _ in rows]
    if preset.examples is None and given is None:
        raise InputError(
            f"{preset.name} has no few-shot form.", where="--fewshot", fix="Leave it out."
        )
    found = list(_checked(preset, _records(preset, preset.examples, given, option)))
    by: dict[Any, list[Record]] = {}
    for example in found:
        by.setdefault(_kind(preset, example), []).append(example)
    chosen = []
    for row in rows:
        kind = _kind(preset, row.record)
        mine = list(islice((e for e in by.get(kind, []) if e != row.record), count))
        if len(mine) < count:
            about = f" with {preset.same} {kind!r}" if kind is not None else ""
            raise InputError(
                f"{count} examples are wanted, and there are {len(mine)}{about}.",
                where=option.where,
                fix=f"Give more of them: {option.example}{option.instead}.",
            )
        chosen.append(mine)
    return chosen


def _kind(preset: Preset, record: Record) -> Any:
    return record.get(preset.same) if preset.same is not None else None


def _records(
    preset: Preset, split: HubSplit | None, given: GivenRows | None, option: RowsOption
) -> Iterator[tuple[str, Record]]:
    if given is None:
        assert split is not None
        return _of_hub(preset, split, option)
    if not isinstance(given, str | Path):
        found = rows_of(given, option.where)
        return ((f"{option.where} row {i}", row) for i, row in enumerate(found))
    path = Path(given).expanduser()
    if path.is_dir():
        files = _files(path, preset, split, option)
        return chain.from_iterable(read(str(file)) for file in files)
    if path.suffix.lower() in TABLES:
        if not path.is_file():
            raise InputError(
                f"there is no file {path}.", where=option.where, fix=_by_path(preset, option)
            )
        return read(str(path))
    if path.exists():
        raise InputError(
            f"cannot read {path}.",
            where=option.where,
            fix=f"Give a file that ends in {', '.join(TABLES)}, or a directory of them.",
        )
    at = split or preset.rows
    return _of_hub(preset, HubSplit(str(given), at.split, at.subset), option)


def _of_hub(preset: Preset, split: HubSplit, option: RowsOption) -> Iterator[tuple[str, Record]]:
    options = {"name": split.subset} if split.subset else {}
    try:
        yield from read(split.dataset, split=split.split, options=options)
    except InputError as error:
        raise InputError(
            f"{split}: {error.what}", where=option.where, fix=_by_path(preset, option)
        ) from None


def _by_path(preset: Preset, option: RowsOption) -> str:
    return (
        f"Give them by path: {option.example} (.jsonl or .parquet, with the columns"
        f" {', '.join(preset.columns)}){option.instead}."
    )


def _files(folder: Path, preset: Preset, split: HubSplit | None, option: RowsOption) -> list[Path]:
    """Of a directory: gsm8k.jsonl or gsm8k.shots.jsonl; or in gsm8k/ (or in it itself), below the
    subset's name if that is there, the files that begin with the name of the split, as a download
    of the hub has them.
    """
    word = f"{preset.name}{option.suffix}"
    for suffix in TABLES:
        if (file := folder / f"{word}{suffix}").is_file():
            return [file]
    wanted = split or HubSplit("", "train")
    base = folder / preset.name if (folder / preset.name).is_dir() else folder
    places = [base / wanted.subset] if wanted.subset else []
    for place in (*places, base, base / "data"):
        found = sorted(
            file
            for file in (place.iterdir() if place.is_dir() else ())
            if file.suffix in TABLES and file.stem.split("-")[0] == wanted.split
        )
        if found:
            return found
    raise InputError(
        f"{folder} has no {word}.jsonl, and no files of the split {wanted.split}.",
        where=option.where,
        fix=_by_path(preset, option),
    )


def _checked(preset: Preset, records: Iterable[tuple[str, Record]]) -> Iterator[Record]:
    """Records that the preset can ask and judge; others are told with their place."""
    for place, record in records:
        missing = [
            name for name in preset.columns if not isinstance(record, Mapping) or name not in record
        ]
        if missing:
            columns = ", ".join(map(str, record)) if isinstance(record, Mapping) else "none"
            raise InputError(
                f"has no column {missing[0]!r}, only {columns or 'none'}.",
                where=place,
                fix=f"Rows of {preset.name} have {', '.join(preset.columns)}.",
            )
        try:
            preset.instruction(record)
            preset.gold(record)
        except InputError as error:
            raise InputError(
                error.what, where=place, fix=error.fix or "Repair or remove the row."
            ) from None
        yield record
