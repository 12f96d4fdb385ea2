"""Files that `reinforge generate` wrote, as data: answers to one prompt are rows of their own."""

from __future__ import annotations

import pytest

from reinforge.core.errors import InputError
from reinforge.data.sources import REQUEST, rows_from


def test_answers_to_one_prompt_are_rows_of_their_own() -> None:
    lines = [
        {"id": "a", "prompt": "1+1=", "completion": text, REQUEST: "x"} for text in ("2", "3", "4")
    ]
    rows = rows_from([*lines, {"id": "b", "prompt": "2+2=", "completion": "4", REQUEST: "y"}])
    assert [row.id for row in rows] == ["a", "a-1", "a-2", "b"]
    assert [row.columns["completion"] for row in rows] == ["2", "3", "4", "4"]


def test_ids_of_other_files_must_be_unique() -> None:
    with pytest.raises(InputError, match="has the id 'a' that"):
        rows_from([{"id": "a", "prompt": text} for text in ("1+1=", "2+2=")])
