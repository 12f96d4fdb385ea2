"""The index of samples: the newest ones are there before it is, with the same numbers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.web_app import AppClient, web_app
from reinforge.ui import sample_index
from reinforge.ui.sample_index import SampleFilter, SampleIndex

BROKEN = 120  # the line that is no JSON


def line(number: int) -> str:
    sample = {
        "step": 1 + number // 10,
        "row": f"row-{number % 7}",
        "uid": f"{number}#0",
        "prompt": "p",
        "completion": f"answer {number}",
        "reward": number / 100,
        "components": {"format": 1.0},
        "stop": "eos",
        "length": number,
    }
    return json.dumps(sample) + "\n"


def write(path: Path, count: int, rest: str = "") -> None:
    lines = [line(number) for number in range(count)]
    lines[BROKEN] = '{"step": 13, "ro\n'
    path.write_text("".join(lines) + rest)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """samples.jsonl of a run that nobody waits for, read from its end in small pieces."""
    monkeypatch.setattr(sample_index, "SOON", 100)
    monkeypatch.setattr(sample_index, "PIECE", 500)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text("")
    return run / "samples.jsonl"


def numbers(page: dict[str, Any]) -> list[tuple[int, str]]:
    return [(row["line"], row["completion"]) for row in page["rows"]]


def indexed(app: AppClient) -> dict[str, Any]:
    """The first page once the index is there."""
    until = time.monotonic() + 30
    while (page := app.get("samples", run="run"))["facets"] is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return dict(page)


def test_the_newest_samples_do_not_wait_for_the_index(log: Path) -> None:
    write(log, 300, rest='{"step": 31, "row')
    with web_app(log.parent.parent) as app:
        first = app.get("samples", run="run")
        assert first["facets"] is None and first["total"] == 300
        want = [(n, f"answer {n}") for n in range(299, 249, -1)]
        assert numbers(first) == want
        then = indexed(app)
        assert numbers(then) == want
        assert then["total"] == 299, "a line that is no sample is not counted"
        assert then["facets"]["steps"] == list(range(1, 31))
        assert then["facets"]["stops"] == {"eos": 299}


def test_a_line_that_is_no_sample_is_left_out_and_keeps_its_number(log: Path) -> None:
    write(log, 130)
    index = SampleIndex(log.parent)
    count, found = index.newest(15)
    assert count == 130
    assert [number for number, _ in found] == [n for n in range(129, 114, -1) if n != BROKEN]
    index.refresh()
    assert index.select(SampleFilter(step=13), "oldest").tolist() == [
        n for n in range(120, 130) if n != BROKEN
    ]
    assert index.read(125)["completion"] == "answer 125"


def test_the_newest_samples_follow_a_file_that_grows_and_is_cut_back(log: Path) -> None:
    index = SampleIndex(log.parent)
    assert index.newest(3) == (0, []) and index.is_near()
    for count in (200, 260, 150, 500):
        write(log, count)
        total, found = index.newest(3)
        assert total == count
        assert [(n, sample["length"]) for n, sample in found] == [
            (n, n) for n in range(count - 1, count - 4, -1)
        ]
        assert not index.is_near()
    with log.open("a") as file:
        file.write(line(500))
    assert index.newest(1)[1][0][0] == 500
    write(log, 130)
    everything = index.newest(1000)[1]
    assert [n for n, _ in everything] == [n for n in range(129, -1, -1) if n != BROKEN]
    log.write_text("")
    assert index.newest(3) == (0, [])
