"""The tables of docs/hardware.md are what `plan` says."""

from __future__ import annotations

import sys

import pytest

from helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import gen_hardware

from reinforge.models.meta_model import count_on_meta


def test_the_page_is_fresh() -> None:
    text = gen_hardware.PAGE.read_text(encoding="utf-8")
    assert text == gen_hardware.with_tables(text), "run tools/gen_hardware.py"


@pytest.mark.parametrize("rank", [0, 16])
def test_weights_are_counted_as_plan_counts_them(rank: int) -> None:
    cfg = gen_hardware.config(
        {"algorithm": {"name": "sft"}, **({"adapter": {"rank": rank}} if rank else {})}
    )
    whole = count_on_meta(gen_hardware.shape("0.5B"), cfg.train, cfg.adapter)
    assert gen_hardware.counts("0.5B", rank) == whole


def test_predictions_are_near_what_was_measured() -> None:
    """The errors that the page tells: none is above the tenth by which it calls a cell tight."""
    errors = [
        int(row.split("|")[-2].strip().removesuffix("%"))
        for row in gen_hardware.measured().splitlines()[2:]
    ]
    assert len(errors) == 7
    assert max(map(abs, errors)) <= 10
