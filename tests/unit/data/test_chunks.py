"""Chunks of documents: everything is in one, and one ends where the text does."""

from __future__ import annotations

import doctest
import json
import random
from pathlib import Path

import pytest

from reinforge.config.data import DataConfig
from reinforge.core.errors import InputError
from reinforge.data import chunks as module
from reinforge.data.chunks import chunks
from reinforge.data.documents import chunk_rows, load_documents


def test_examples() -> None:
    assert doctest.testmod(module).failed == 0


def test_nothing_is_lost_and_nothing_too_long() -> None:
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choice("ab .\n\n  c") for _ in range(draw.randrange(200)))
        size = draw.randrange(2, 60)
        found = list(chunks(text, size, draw.randrange(size // 2 + 1)))
        covered: set[int] = set()
        for start, chunk in found:
            assert 0 < len(chunk) <= size and text[start : start + len(chunk)] == chunk
            covered.update(range(start, start + len(chunk)))
        assert all(c.isspace() for i, c in enumerate(text) if i not in covered)
        assert [start for start, _ in found] == sorted({start for start, _ in found})


def test_a_chunk_ends_with_a_paragraph_and_overlaps_by_whole_words() -> None:
    text = "One first. Two here.\n\nThree goes on and on and on."
    first, second, *_ = chunks(text, 30, 6)
    assert first == (0, "One first. Two here.")
    assert second[1].startswith("here.\n\nThree"), "the last six characters, from their word on"
    (_, whole), *rest = chunks("x" * 25, 10, 3)
    assert whole == "x" * 10 and [start for start, _ in rest] == [7, 14, 21]


def test_documents_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("A page.")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("Another page.")
    for name in ("c", "d"):
        row = {"id": "1", "text": f"Row of {name}."}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "e.log").write_text("no document")
    rows = chunk_rows(load_documents(DataConfig(source=str(tmp_path))), 100, 0)
    assert [row.columns["text"] for row in rows] == [
        "A page.",
        "Another page.",
        "Row of c.",
        "Row of d.",
    ]
    assert len({row.id for row in rows}) == 4
    assert rows[1].columns["document"] == str(tmp_path / "deep" / "b.txt")
    limited = load_documents(DataConfig(source=str(tmp_path), limit=3))
    assert len(limited) == 3


def test_rows_that_are_no_documents(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "hi", "body": "A text."}\n')
    with pytest.raises(InputError, match=r"rows.jsonl:1\): is no document.*data.columns"):
        chunk_rows(load_documents(DataConfig(source=str(file))), 100, 0)
    named = DataConfig(source=str(file), columns={"text": "body"})
    assert chunk_rows(load_documents(named), 100, 0)[0].columns["text"] == "A text."
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no documents"):
        load_documents(DataConfig(source=str(tmp_path / "empty")))
