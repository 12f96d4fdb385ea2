"""From the name of a source to its records, lazily and strictly: (where it was found, a dict of its
columns).

Everything read here was written by somebody else: what JSON does not allow (NaN, 1e999, lone
surrogates, two equal keys) is refused with file and line instead of turning up as a strange number
in a loss.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from reinforge.core.errors import InputError
from reinforge.core.hub import offline
from reinforge.core.hub_trouble import gated, hub_trouble, not_there
from reinforge.data import arithmetic, games
from reinforge.data.bad_rows import by_reason

Record = tuple[str, dict[str, Any]]
# episodes: rows for environments that bring their own tasks
GENERATED = ("arithmetic", "games", "reasoning_gym", "episodes")
# a parquet file may become so many times its size, or so many bytes
EXPANSION = 1000
UNPACKED = 256 << 20
# of a parquet file that are unpacked at a time
FIRST_ROWS = 16
MOST_ROWS = 256
BATCH_BYTES = 4 << 20
TEXTS = (".txt", ".md")
FOLDER = "folder"  # of such files
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """One sentence with the nearest known names, or with all of them if there are few."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"There are: {', '.join(known[:40])}{', ...' if len(known) > 40 else ''}."


def kind_of(source: str) -> str:
    """arithmetic, games, reasoning_gym, a file suffix such as .jsonl, folder, or hub."""
    scheme, colon, _ = source.partition(":")
    if colon and scheme in GENERATED:
        return scheme
    suffix = Path(source).suffix.lower()
    if suffix in FILES:
        return suffix
    if _texts_below(Path(source).expanduser()):
        return FOLDER
    if Path(source).exists():
        raise InputError(
            "cannot read"
            f" {'a directory' if Path(source).is_dir() else f'a {suffix or source} file'}",
            where=f"data.source {source}",
            fix=f"Give a file that ends in {', '.join(FILES)}, or a directory of text files.",
        )
    if HUB_ID.match(source):
        return "hub"
    hint = did_you_mean(scheme, GENERATED) if colon else "Check the path."
    raise InputError(
        "is no file, no hub data set id and no generator", where=f"data.source {source}", fix=hint
    )


def read(
    source: str, *, split: str = "train", options: dict[str, Any] | None = None
) -> Iterator[Record]:
    """The records of a source. Generators of problems never end: see `size_of`."""
    options = dict(options or {})
    kind = kind_of(source)
    name = source.partition(":")[2]
    if kind == "arithmetic":
        return (
            (f"{source} problem {i}", record)
            for i, record in enumerate(arithmetic.generate(name, options))
        )
    if kind == "games":
        return (
            (f"{source} game {i}", record) for i, record in enumerate(games.generate(name, options))
        )
    if kind == "reasoning_gym":
        return _reasoning_gym(name, options)
    if kind == "hub":
        return _hub(source, split, options)
    if kind == "episodes" and not options:
        return ((f"{source} {i}", {"id": str(i), "prompt": f"episode {i}"}) for i in count())
    if options:
        raise InputError(
            f"{'episodes' if kind == 'episodes' else 'a file'} has no options, but there are"
            f" {', '.join(options)}",
            where="data.options",
            fix="Remove them; those of a recipe with data.options={}.",
        )
    path = Path(source).expanduser()
    if kind == FOLDER:
        return (record for file in _texts_below(path) for record in _text_file(file))
    if not path.is_file():
        raise InputError(
            "there is no such file",
            where=f"data.source {source}",
            fix=f"Paths are relative to {Path.cwd()}.",
        )
    return FILES[kind](path)


def size_of(source: str, options: dict[str, Any]) -> int | None:
    """How many problems a generated source is asked for; None for a file or hub data set, which has
    its own end.
    """
    kind = kind_of(source)
    name = source.partition(":")[2]
    if kind == "arithmetic":
        return arithmetic.parse(name, options).size
    if kind == "games":
        return games.parse(name, options).size
    if kind == "reasoning_gym":
        size = options.get("size", 500)
        if not isinstance(size, int) or size < 1:
            raise InputError(
                f"size is {size!r}, not a positive number", where=f"{source} options.size"
            )
        return size
    if kind == "episodes":
        if not name.isdecimal() or int(name) < 1:
            raise InputError(
                f"{name!r} is no number of rows",
                where=f"data.source {source}",
                fix="Write for example episodes:256.",
            )
        return int(name)
    return None


# files


def strict_json(text: str, where: str) -> Any:
    """`json.loads` without Python's extensions to JSON."""

    def constant(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    def number(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"{digits} does not fit a float")
        return value

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(result := dict(items)) != len(items):
            raise ValueError(
                f"an object has two equal keys: {', '.join(k for k, _ in items)[:200]}"
            )
        return result

    try:
        value = json.loads(
            text, parse_constant=constant, parse_float=number, object_pairs_hook=pairs
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(
            "has half of a surrogate pair (\\ud800 to \\udfff), which is no text",
            where=where,
            fix="Remove or repair it.",
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"is not valid JSON: {error or 'nested too deep'}",
            where=where,
            fix="Repair or remove it.",
        ) from None
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(
            f"is {type(value).__name__}, not an object",
            where=where,
            fix='A row is an object such as {"prompt": "...", "answer": "..."}.',
        )
    return value


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"is not UTF-8: {error.reason} at byte {error.start}",
            where=where,
            fix="Convert the file to UTF-8.",
        ) from None


MOST_BROKEN = 1000  # lines that cannot be read, after which nobody looks for more


def _jsonl(path: Path) -> Iterator[Record]:
    """Row by row up to the first line that cannot be read; then those are told together, up to a
    number that says that it is another kind of file.
    """
    broken: list[tuple[str, str]] = []
    first: InputError | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                row = _row_of(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, where)
            except InputError as error:
                first = first or error.with_traceback(None)
                broken.append((where, error.what))
                if len(broken) == MOST_BROKEN:
                    break
                continue
            if row is not None and not broken:
                yield where, row
    if first is None:
        return
    if len(broken) == 1:
        raise first
    listed = "".join(f"\n  - {line}" for line in by_reason(broken))
    least = "at least " if len(broken) == MOST_BROKEN else ""
    what = f"{least}{len(broken):,} lines cannot be read:{listed}\n{first.fix}"
    raise InputError(what, where=str(path))


def _row_of(line: bytes, where: str) -> dict[str, Any] | None:
    """What a line of a .jsonl file holds; None of an empty one."""
    text = _text(line, where).strip()
    return _object(strict_json(text, where), where) if text else None


def _json(path: Path) -> Iterator[Record]:
    rows = strict_json(_text(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path)), str(path))
    if not isinstance(rows, list):
        raise InputError(
            f"holds {type(rows).__name__}, not a list of rows",
            where=str(path),
            fix="For one row per line, name it .jsonl.",
        )
    for i, row in enumerate(rows):
        where = f"{path} row {i}"
        yield where, _object(row, where)


def _csv(path: Path) -> Iterator[Record]:
    """Every value is text: "007" stays "007"."""
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            names = reader.fieldnames or []
            if len(set(names)) != len(names):
                raise InputError(
                    f"two columns have the same name: {', '.join(names)}",
                    where=f"{path}:1",
                    fix="Rename one.",
                )
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise InputError(
                        f"the row does not have the {len(names)} cells of the header",
                        where=where,
                        fix="Check its commas and quotes.",
                    )
                yield where, row
        except csv.Error as error:
            raise InputError(
                f"is not valid CSV: {error}",
                where=f"{path}:{reader.line_num}",
                fix="Check its quotes.",
            ) from None
        except UnicodeDecodeError as error:
            raise InputError(
                f"is not UTF-8: {error.reason}",
                where=f"{path}, after line {reader.line_num}",
                fix="Convert the file to UTF-8.",
            ) from None


def _batches(file: Any) -> Iterator[Any]:
    """The rows of a parquet file: a few, which show how large a row is, then as many at a time as
    that allows.

    Never very many: later rows may be larger, which shows only when they are unpacked, and more
    than MOST_ROWS at a time is not faster.
    """
    first = next(file.iter_batches(batch_size=FIRST_ROWS), None)
    if first is None:
        return
    yield first
    fitting = BATCH_BYTES * first.num_rows // max(1, first.nbytes)
    seen = first.num_rows
    for batch in file.iter_batches(batch_size=min(max(fitting, FIRST_ROWS), MOST_ROWS)):
        again = min(seen, batch.num_rows)
        seen -= again
        if again < batch.num_rows:
            yield batch.slice(again)


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise InputError(f"is not a readable parquet file: {error}", where=str(path)) from None
    size = path.stat().st_size
    most = max(UNPACKED, EXPANSION * size)
    unpacked = 0
    count = 0
    for batch in _batches(file):
        unpacked += batch.nbytes
        if unpacked > most:
            raise InputError(
                f"{size:,} bytes have become {unpacked:,} by row {count + batch.num_rows}, which is"
                f" more than {EXPANSION} times as many",
                where=str(path),
                fix="Data that are meant to repeat themselves like this can be given as .jsonl.",
            )
        for row in batch.to_pylist():
            yield f"{path} row {count}", row
            count += 1


def _text_file(path: Path) -> Iterator[Record]:
    """A text of any length is one document."""
    yield str(path), {"text": _text(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path))}


def _texts_below(folder: Path) -> list[Path]:
    """The text files of a directory and of those in it, in the order of their names."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.rglob("*") if path.suffix in TEXTS and path.is_file())


FILES: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
    ".txt": _text_file,
    ".md": _text_file,
}


# other people's data


def _hub(source: str, split: str, options: dict[str, Any]) -> Iterator[Record]:
    import datasets

    why = offline()  # else it would try for a minute
    try:
        rows = datasets.load_dataset(source, split=split, **options)
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise _not_loaded(error, source, split, why) from None
    for i, row in enumerate(rows):
        yield f"{source} [{split}] row {i}", row


def _not_loaded(error: Exception, source: str, split: str, offline: str | None) -> InputError:
    where = f"data.source {source}"
    if (trouble := _trouble_of_data_set(error, f"datasets/{source}")) is not None:
        return InputError(trouble[0], where=where, fix=trouble[1])
    reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
    return InputError(
        f"cannot load split {split!r} of this hub data set"
        + (f" ({offline})" if offline else "")
        + f": {reason}",
        where=where,
        fix=(
            "Check the id, data.split, data.options and the network; offline, give a local"
            " .jsonl or .parquet file."
        ),
    )


def _trouble_of_data_set(error: Exception, repo: str) -> tuple[str, str] | None:
    """What the hub says no to. datasets raises an error of its own without the hub's behind it."""
    from datasets.exceptions import DatasetNotFoundError

    if isinstance(error, DatasetNotFoundError):
        return gated(repo) if "gated" in str(error) else not_there(repo)
    return hub_trouble(error, repo)


def _reasoning_gym(task: str, options: dict[str, Any]) -> Iterator[Record]:
    """Item i is drawn from seed + i, so two seeds closer than the size share items; `sources`
    removes the shared ones.
    """
    where = f"reasoning_gym:{task}"
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError(
            f"reasoning-gym cannot be imported: {error}.",
            where=where,
            fix="pip install 'reinforge[tasks]'",
        ) from error
    if task not in DATASETS:
        raise InputError("there is no such task", where=where, fix=did_you_mean(task, DATASETS))
    known = set(DATASETS[task][1].__dataclass_fields__) | {"seed", "size"}
    if unknown := sorted(set(options) - known):
        raise InputError(
            f"has no option {unknown[0]!r}", where=where, fix=did_you_mean(unknown[0], known)
        )
    # its own default seed is a different one each time
    options = {"seed": 0, "size": 500, **options}
    while True:  # past its size, go on with the next seeds
        try:
            dataset = reasoning_gym.create_dataset(task, **options)
        except (AssertionError, TypeError, ValueError) as error:
            raise InputError(f"refuses its options: {error}", where=f"{where} options") from None
        for i in range(options["size"]):
            entry = dataset[i]
            columns = {
                "question": entry["question"],
                "answer": entry["answer"],
                "metadata": entry["metadata"],
                "entry": entry,
            }
            yield (
                f"{where} seed {options['seed']} item {i}",
                {"id": f"{task}-{options['seed']}-{i}", **columns},
            )
        options["seed"] += options["size"]
