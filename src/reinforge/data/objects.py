"""Rows that a Python caller gives as objects: lists of dicts, data frames, tables, dicts of
columns.

Iterating over a data frame gives its column names, over a dict its keys, over an open file its
lines. Each of them is text, and text is a prompt: what is not sure to be rows is refused.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reinforge.core.errors import InputError

ROWS = (
    "Give a list of dicts, a data frame, a datasets.Dataset, a dict of columns, or the path of a"
    " file."
)


def rows_of(value: Any, name: str) -> list[Any]:
    """What `value` holds, as a list of rows.

    A row is a dict, or a text that is a prompt; `rows_from` checks each.

    >>> rows_of({"prompt": ["1+1=", "2+2="], "answer": [2, 4]}, "data")
    [{'prompt': '1+1=', 'answer': 2}, {'prompt': '2+2=', 'answer': 4}]
    """
    if isinstance(value, list):
        return value
    if isinstance(value, Mapping):
        return _of_mapping(value, name)
    if isinstance(value, str | bytes | bytearray | io.IOBase):
        raise _no_rows(value, name, "To read a file, give its path.")
    if isinstance(value, set | frozenset):
        raise _no_rows(
            value, name, "A set has no order, so that no two runs would be alike. Give a list."
        )
    if _is_frame(value):
        return _of_frame(value, name)
    if hasattr(value, "__iter__"):
        return list(value)
    # a torch Dataset need not end by itself
    if hasattr(value, "__getitem__") and hasattr(value, "__len__"):
        return [value[i] for i in range(len(value))]
    raise _no_rows(value, name, ROWS)


def _no_rows(value: Any, name: str, fix: str) -> InputError:
    return InputError(
        f"{name} is a {type(value).__name__}, not a list of rows.", where=name, fix=fix
    )


def _of_mapping(value: Mapping[Any, Any], name: str) -> list[Any]:
    """A dict of columns. One row alone and a dict of splits are dicts as well, and are refused."""
    if value and all(_is_split(part) for part in value.values()):
        raise _no_rows(value, name, f"Give one split: {name}[{next(iter(value))!r}].")
    columns = {
        str(key): found for key, part in value.items() if (found := _column(part)) is not None
    }
    if len(columns) < max(1, len(value)):
        raise _no_rows(value, name, "For one row, give [row]; for columns, give each as a list.")
    sizes = {key: len(column) for key, column in columns.items()}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise _no_rows(value, name, f"Its columns have different lengths: {shown}.")
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _is_split(value: Any) -> bool:
    """Whether it looks like a table of its own: the value of a dict of splits."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return _is_frame(value) or type(value).__module__.split(".")[0] == "datasets"


def _column(value: Any) -> list[Any] | None:
    """The cells of a column; None where this is no column."""
    if isinstance(value, str | bytes):
        return None
    if hasattr(value, "tolist"):  # an array, a tensor, a Series
        value = value.tolist()
    return [_plain(cell) for cell in value] if isinstance(value, Sequence) else None


def _is_frame(value: Any) -> bool:
    """Whether it is a table with named columns that does not iterate over rows (a datasets.Dataset
    does).
    """
    tabular = hasattr(value, "columns") or hasattr(value, "column_names")
    return tabular and type(value).__module__.split(".")[0] != "datasets"


def _of_frame(value: Any, name: str) -> list[Any]:
    """pandas, polars and pyarrow, and what has their methods.

    A missing cell becomes None, an array a list.
    """
    if hasattr(value, "to_pylist"):  # pyarrow
        return list(value.to_pylist())
    if hasattr(value, "to_dicts"):  # polars
        return list(value.to_dicts())
    # pandas
    if hasattr(value, "to_dict") and hasattr(value, "notna") and hasattr(value, "itertuples"):
        names = [str(column) for column in value.columns]
        if len(set(names)) != len(names):
            raise _no_rows(
                value, name, f"Two of its columns have the same name: {', '.join(names)}."
            )
        kept = value.notna().itertuples(index=False, name=None)
        cells = value.itertuples(index=False, name=None)
        return [_record(names, row, there) for row, there in zip(cells, kept, strict=True)]
    raise _no_rows(value, name, "Make a list of dicts of it, or a pandas.DataFrame.")


def _record(names: Sequence[str], cells: Iterable[Any], there: Iterable[bool]) -> dict[str, Any]:
    return {
        name: _plain(cell) if kept else None
        for name, cell, kept in zip(names, cells, there, strict=True)
    }


def _plain(value: Any) -> Any:
    """Without numpy: arrays become lists and its numbers Python's, also inside lists and dicts."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
