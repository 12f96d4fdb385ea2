"""Rows given as Python objects: what iterates over something else than rows is understood or
refused, never trained on.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pandas
import pyarrow
import pytest

import reinforge
from reinforge.core.errors import InputError
from reinforge.data.objects import rows_of
from reinforge.data.sources import rows_from

ROWS = [{"prompt": "1+1=", "answer": 2}, {"prompt": "2+2=", "answer": 4}]
COLUMNS = {"prompt": ["1+1=", "2+2="], "answer": [2, 4]}


class PolarsLike:
    """A polars DataFrame: it iterates over columns, and `to_dicts` gives the rows."""

    columns = ["prompt", "answer"]

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(COLUMNS.values())

    def to_dicts(self) -> list[dict[str, Any]]:
        return ROWS


class DaskLike:
    """A frame of a library that we do not know: iterating gives the names of its columns."""

    columns = ["prompt", "answer"]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class Endless:
    """A torch Dataset that does not raise IndexError at its end."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index % 2]


def datasets_of() -> Any:
    import datasets

    return datasets.Dataset.from_list(ROWS)


@pytest.mark.parametrize(
    "given",
    [
        pandas.DataFrame(ROWS),
        pandas.DataFrame(ROWS, index=[7, 7]),
        pyarrow.Table.from_pylist(ROWS),
        pyarrow.RecordBatch.from_pylist(ROWS),
        PolarsLike(),
        COLUMNS,
        {"prompt": pandas.Series(COLUMNS["prompt"]), "answer": numpy.array([2, 4])},
        tuple(ROWS),
        csv.DictReader(io.StringIO("prompt,answer\n1+1=,2\n2+2=,4\n")),
        Endless(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tables_are_rows(given: Any) -> None:
    found = [(row.prompt, {"answer": int(row.columns["answer"])}) for row in rows_from(given)]
    assert found == [("1+1=", {"answer": 2}), ("2+2=", {"answer": 4})]


def test_a_datasets_dataset_is_rows_and_a_dict_of_them_is_not() -> None:
    import datasets

    whole = datasets_of()
    assert rows_of(whole, "data") == ROWS and rows_of(whole.to_dict(), "data") == ROWS
    with pytest.raises(
        InputError,
        match=r"data is a DatasetDict, not a list of rows\. Give one split: data\['train'\]",
    ):
        rows_of(datasets.DatasetDict(train=whole, test=whole), "data")


def test_texts_are_prompts_wherever_they_stand() -> None:
    for given in (
        ["a", "b"],
        pandas.Series(["a", "b"]),
        numpy.array(["a", "b"]),
        (text for text in "ab"),
    ):
        assert [row.prompt for row in rows_from(given)] == ["a", "b"]


def test_cells_of_a_frame_are_python_values(tmp_path: Path) -> None:
    """A file of conversations that pandas has read has arrays for lists, its own numbers, and NaN
    for what is missing.
    """
    rows = [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "n": 1,
            "note": None,
        },
        {"messages": [{"role": "user", "content": "c"}], "n": 2, "note": "x"},
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    read = pandas.read_parquet(tmp_path / "rows.parquet")
    assert isinstance(read["messages"][0], numpy.ndarray), "what this is about"
    found = rows_of(read, "data")
    assert found == rows and type(found[0]["n"]) is int
    assert [row.prompt for row in rows_from(read)] == [rows[0]["messages"][:1], rows[1]["messages"]]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("rows", "data is a str, not a list of rows"),
        (b"rows", "data is a bytes, not a list of rows"),
        (io.StringIO('{"prompt": "a"}\n'), r"data is a StringIO.*give its path"),
        ({"a", "b"}, r"data is a set.*has no order"),
        (ROWS[0], r"data is a dict.*For one row, give \[row\]"),
        ({"train": ROWS, "test": ROWS}, r"data is a dict.*Give one split: data\['train'\]"),
        ({"train": pandas.DataFrame(ROWS)}, r"Give one split: data\['train'\]"),
        ({"prompt": ["a", "b"], "answer": [1]}, "different lengths: prompt 2, answer 1"),
        ({}, "data is a dict"),
        (3, "data is a int"),
        (DaskLike(), r"data is a DaskLike.*pandas\.DataFrame"),
        (
            pandas.DataFrame([[1, 2]], columns=["prompt", "prompt"]),
            "have the same name: prompt, prompt",
        ),
        (
            (pair for pair in [("1+1=", 2)]),
            r"data row 0: is tuple, not a dict or a string\. A row is a dict",
        ),
        (pandas.DataFrame(ROWS).itertuples(), "data row 0: is Pandas, not a dict"),
        (numpy.zeros((2, 2)), "data row 0: is ndarray, not a dict"),
        ([ROWS], "data row 0: is list, not a dict"),
    ],
    ids=lambda value: type(value).__name__,  # the same in every process: no addresses
)
def test_what_is_no_list_of_rows_is_refused(given: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        rows_from(given, name="data")


def test_training_on_a_frame_is_training_on_its_rows(tiny_dir: str, tmp_path: Path) -> None:
    """It was training on the names of its columns."""
    seen: list[str] = []

    def reward(prompts: list[str], completions: list[str], answer: list[int]) -> list[float]:
        seen.extend(f"{prompt}{gold}" for prompt, gold in zip(prompts, answer, strict=True))
        return [0.0] * len(completions)

    reinforge.train(
        model=tiny_dir,
        data=pandas.DataFrame(ROWS),
        rewards=reward,
        dir=tmp_path / "run",
        steps=1,
        group_size=2,
        prompts_per_step=2,
        max_new_tokens=2,
        overrides=["rollout.kv_gib=0.01"],
    )
    assert set(seen) == {"1+1=2", "2+2=4"}
