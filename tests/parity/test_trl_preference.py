"""Preference, unpaired, reward, distillation and DFT losses against TRL 1.16: the same loss and
gradient on the same numbers.

The numbers are in trl_preference.json, which trl_preference_reference.py makes; TRL itself is not
needed here.
"""

from __future__ import annotations

import pytest
from preference_parity import CASES, TRL, from_logits, pair, reward, sft, unpaired

CUT = {pair: (2, 8), from_logits: (2, 8), reward: (2, 8), unpaired: (1, 8), sft: (1, 8)}


def test_the_file_is_of_the_version_we_name() -> None:
    assert TRL["trl"] == "1.16.0"
    assert {case["name"] for case in TRL["pairs"]} >= {
        "sigmoid",
        "hinge",
        "ipo",
        "robust",
        "exo_pair",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "aot",
        "aot_unpaired",
        "apo_zero",
        "apo_down",
        "discopop",
        "sft",
        "sigmoid_norm",
    }


@pytest.mark.parametrize("label", CASES)
def test_loss_and_gradient(label: str) -> None:
    # TRL computes these two in float32
    limit = 1e-5 if "alpha_divergence" in label or "chunked" in label else 1e-6
    found = [CASES[label]()]
    found += [CASES[label](rows_per_pack=n) for n in CUT.get(CASES[label].func, ())]
    assert max(max(difference) for difference in found) < limit, found
