"""Ten steps of a small run come out as they did when they were recorded: on the same CPU kind bit
for bit, elsewhere within a tolerance. Where that is meant to change, tools/record_trajectory.py
--new records it anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.trajectory import DIGESTS, NUMBERS, STEPS, STORED, cpu_kind, run_trajectory, stored

# on given answers, where another CPU rounds differently: relative, and absolute beside numbers
# that are nearly 0
RELATIVE = 2e-3
ABSOLUTE = 2e-5


def test_the_training_half_within_a_tolerance(tmp_path: Path) -> None:
    """On the answers that were recorded, so that no rounding changes what is sampled."""
    expected = stored()["numbers"]
    found = run_trajectory(tmp_path, kept=STORED)
    assert len(found) == len(expected) == STEPS
    assert len({line["train/grad_norm"] for line in expected}) == STEPS
    for ours, theirs in zip(found, expected, strict=True):
        for name in NUMBERS:
            wanted = pytest.approx(theirs[name], rel=RELATIVE, abs=ABSOLUTE)
            assert ours[name] == wanted, (theirs["step"], name)


def test_every_bit_on_a_cpu_that_is_recorded(tmp_path: Path) -> None:
    digests = stored()["digests"].get(cpu_kind())
    if digests is None:
        pytest.skip(f"not recorded on {cpu_kind()}: tools/record_trajectory.py")
    for ours, theirs in zip(run_trajectory(tmp_path), digests, strict=True):
        for name in DIGESTS:
            assert ours[name] == theirs[name], (ours["step"], name)
