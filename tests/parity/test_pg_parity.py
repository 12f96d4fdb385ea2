"""The policy gradient against TRL 1.16.0 and veRL 0.9.1, from numbers that their own code made
(pg_reference.py). Neither is needed here.

Every case of theirs has a call of ours (pg_parity.py), and every conversion a sentence that says
why (pg_differences.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pg_differences import DIFFERENCES, LOOSER
from pg_ours import GIVEN, PEERS, Ours, advantage, policy, stream
from pg_parity import CONVERTED, HIGH, LIMITS, METHODS, TRAINED, _difference, differences, ours

from helpers.paths import ROOT
from reinforge.algorithms.catalogue import TABLE
from reinforge.algorithms.parts.advantages import ADVANTAGES
from reinforge.algorithms.parts.ratios import safe_ratio, sequence_log_ratio
from reinforge.algorithms.parts.surrogates import SURROGATES

CASES = [(peer, method) for peer in PEERS for method in PEERS[peer]["cases"]]


def test_versions_and_inputs() -> None:
    assert [PEERS[peer]["version"] for peer in ("TRL", "veRL")] == ["1.16.0", "0.9.1"]
    assert PEERS["TRL"]["inputs"] == PEERS["veRL"]["inputs"]


def test_the_inputs_reach_both_sides_of_every_clip() -> None:
    now, old, behaviour = (stream(name, torch.float64) for name in ("logprobs", "old", "behaviour"))
    sequence = torch.repeat_interleave(torch.arange(12), torch.tensor(GIVEN["lengths"]))
    positive = stream("advantages", torch.float64) > 0
    for ratio, low, high in (
        (safe_ratio(now, old), 0.8, 1.28),
        (sequence_log_ratio(now, old, sequence, mean=True).exp(), 0.95, 1.1),
        (sequence_log_ratio(now, old, sequence).exp(), 0.8, 1.28),
    ):
        for side in (positive, ~positive):
            assert bool(
                (ratio[side] < low).any()
                and (ratio[side] > high).any()
                and ((ratio[side] > low) & (ratio[side] < high)).any()
            )
    for ratio in (safe_ratio(old, behaviour), sequence_log_ratio(old, behaviour, sequence).exp()):
        assert bool(
            (ratio < 0.5).any() and (ratio > 1.5).any() and ((ratio > 0.5) & (ratio < 1.5)).any()
        )


@pytest.mark.parametrize(("peer", "method"), CASES, ids=[f"{p}-{m}" for p, m in CASES])
def test_same_numbers(peer: str, method: str) -> None:
    for precision, difference in differences(peer, method).items():
        limit = (
            LOOSER.get((peer, method), LIMITS[precision])
            if precision == "float64"
            else LIMITS[precision]
        )
        assert difference < limit, (precision, difference)


def test_every_difference_belongs_to_a_case_and_every_conversion_is_explained() -> None:
    assert (
        set(DIFFERENCES) <= set(CASES)
        and set(CONVERTED) <= set(CASES)
        and set(LOOSER) <= set(DIFFERENCES)
    )
    same = {
        "ppo_clip, corrected by tis",
        "tis",
        "seq_tis",
        "icepop",
        "seq_mask",
        "entropy bonus, token_mean",
    }  # only inputs differ: no float32
    assert {key for key in CONVERTED if key not in DIFFERENCES} == {("veRL", name) for name in same}
    assert all(method in METHODS for peer, method in CASES if (peer, method) not in CONVERTED)


UNCONVERTED: dict[tuple[str, str], Ours] = {
    ("TRL", "truncated rows left out, sequence_mean"): METHODS[
        "truncated rows left out, sequence_mean"
    ],
    ("TRL", "truncated rows left out, fixed_length"): METHODS[
        "truncated rows left out, fixed_length"
    ],
    ("TRL", "leave_one_out, whiten"): advantage("leave_one_out", whiten=True),
    ("TRL", "entropy bonus, sequence_mean"): policy("grpo", entropy=0.1, bonus=True, **HIGH),
    ("TRL", "vespo, old engine and a cap"): METHODS["vespo, old engine"],
    ("TRL", "gspo, kl in the loss, weighted"): METHODS["gspo, kl k3 in the loss"],
    ("TRL", "sapo"): policy("sapo", settings={"tau_negative": 1.25}),
    ("veRL", "group_relative"): METHODS["group_relative"],
    ("veRL", "leave_one_out, a group of one"): METHODS["leave_one_out, vectorised, a group of one"],
    ("veRL", "gpg"): advantage("gpg"),
    ("veRL", "pass_at_k, divided by the std"): METHODS["pass_at_k"],
    ("veRL", "cispo, with a lower bound"): METHODS["cispo"],
    ("veRL", "group_whitened"): advantage("group_whitened"),
    ("veRL", "dppo_tv"): policy("dppo_tv", old="auto", settings={"threshold": 0.1}),
}


@pytest.mark.parametrize("key", UNCONVERTED, ids=["-".join(key) for key in UNCONVERTED])
def test_the_difference_is_there(key: tuple[str, str]) -> None:
    """Without the conversion the numbers are not the same: the sentence is about something.

    The day a peer changes, this fails.
    """
    peer, method = key
    theirs = PEERS[peer]["cases"][method]["outputs"]["float32"]
    found = UNCONVERTED[key].run(torch.float32)
    assert (
        max(_difference(found[name], value) for name, value in theirs.items())
        > 3 * LIMITS["float32"]
    )


def test_groups_without_signal_are_exactly_zero() -> None:
    for method in ("group_relative", "leave_one_out", "optimal_baseline"):
        # the third group: 8 + 3 + 5 + 1 tokens
        assert not ours("veRL", method).run(torch.float32)["advantages"][-17:].any()
    assert TRAINED.sum() == 53 - 16


def test_every_part_of_the_catalogue_is_compared_or_said_to_be_ours_alone() -> None:
    from pg_differences import ONLY_HERE

    compared = {name.split(",")[0].split(" ")[0] for _, name in CASES}
    alone = {name.split(" ")[0] for name in ONLY_HERE}
    assert set(ADVANTAGES) <= compared | alone and set(SURROGATES) <= compared
    assert {
        row.parts["surrogate"] for row in TABLE.values() if row.family == "policy_gradient"
    } <= compared


def test_the_page_is_what_the_script_writes(tmp_path: Path) -> None:
    page = tmp_path / "parity.md"
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "pg_parity_table.py"), str(page)], check=True
    )
    assert page.read_text() == (ROOT / "docs" / "algorithms" / "parity.md").read_text(), (
        "run tools/pg_parity_table.py"
    )
