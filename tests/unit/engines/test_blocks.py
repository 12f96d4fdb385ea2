"""The block pool: nothing is lost, nothing is given twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.engines.native.blocks import BlockPool


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 6)), max_size=40
    )
)
def test_books_balance(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(12, 16)
    held: list[list[int]] = []
    for action, n in actions:
        if action == "take" and n <= pool.free:
            held.append(pool.take(n))
        elif action == "share" and held:
            held.append(pool.share(held[n % len(held)]))
        elif action == "release" and held:
            pool.release(held.pop(n % len(held)))
        in_use = {block for blocks in held for block in blocks}
        assert pool.free + len(in_use) == 12
        fresh = pool.take(pool.free)
        assert len(set(fresh)) == len(fresh) and not in_use & set(fresh)
        pool.release(fresh)
    for blocks in held:
        pool.release(blocks)
    assert sorted(pool.take(12)) == list(range(12))


def test_needed_and_misuse() -> None:
    pool = BlockPool(4, 16)
    assert [pool.needed(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]
    blocks = pool.take(2)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="asked for 5"):
        BlockPool(4, 16).take(5)
