from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reinforge.core.errors import InputError
from reinforge.data.cursor import Cursor

takes = st.lists(st.integers(0, 25), max_size=12)


def walk(cursor: Cursor, sizes: list[int]) -> list[int]:
    return [row for k in sizes for row in cursor.take(k)]


@given(n=st.integers(1, 17), seed=st.integers(0, 2**40), shuffle=st.booleans(), sizes=takes)
def test_every_row_once_per_epoch_whatever_the_steps(
    n: int, seed: int, shuffle: bool, sizes: list[int]
) -> None:
    cursor = Cursor(n, seed, shuffle)
    rows = walk(cursor, sizes)
    assert len(rows) == sum(sizes) and cursor.epoch == sum(sizes) / n
    for start in range(0, len(rows), n):
        epoch = rows[start : start + n]
        assert len(set(epoch)) == len(epoch)
        if len(epoch) == n:
            assert sorted(epoch) == list(range(n))
    # the cutting into steps does not matter
    assert rows == Cursor(n, seed, shuffle).take(len(rows))


@given(n=st.integers(1, 17), seed=st.integers(0, 99), before=takes, after=takes)
def test_resume_is_exact(n: int, seed: int, before: list[int], after: list[int]) -> None:
    whole = Cursor(n, seed, True)
    cut = Cursor(n, seed, True)
    walk(whole, before), walk(cut, before)
    resumed = Cursor(n, seed, True)
    resumed.load(json.loads(json.dumps(cut.state())))
    assert resumed.epoch == whole.epoch
    assert walk(resumed, after) == walk(whole, after)
    assert resumed.state() == whole.state()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    cursor = Cursor(50, 0, True)
    first = cursor.take(50)
    second = cursor.take(50)
    assert first != second and first != list(range(50))
    assert first != Cursor(50, 1, True).take(50)
    assert Cursor(5, 0, False).take(12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_order_is_pinned() -> None:
    """A changed order would break the resume of every older checkpoint."""
    assert Cursor(8, 7, True).take(16) == [3, 4, 6, 5, 1, 0, 7, 2, 6, 2, 1, 4, 7, 0, 5, 3]


def test_other_data_is_refused() -> None:
    state = Cursor(10, 0, True, fingerprint="a").state()
    with pytest.raises(InputError, match="made with 10 rows, now there are 11"):
        Cursor(11, 0, True).load(state)
    with pytest.raises(InputError, match="other rows"):
        Cursor(10, 0, True, fingerprint="b").load(state)
    with pytest.raises(InputError, match="run.seed 0, now it is 1"):
        Cursor(10, 1, True).load(state)
    with pytest.raises(InputError, match="data.shuffle True, now it is False"):
        Cursor(10, 0, False).load(state)
    with pytest.raises(InputError, match="no rows"):
        Cursor(0, 0, True)
