# ruff: noqa: E402
"""Prints a markdown table: every supervised, preference, reward and distillation loss, and how far it is from TRL or from its paper's formula.

    PYTHONPATH=src python tools/parity_table.py

TRL's numbers are in tests/parity/trl_preference.json (TRL is not needed); the formulas are those of the unit tests, in plain Python floats.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "parity"), str(TESTS / "unit")]

import preference_parity as parity
import test_distillation
import test_preference
import test_reward_losses
import test_unpaired
import torch

from reinforge.algorithms.preference import PREFERENCE
from reinforge.algorithms.unpaired import UNPAIRED


def against_papers() -> list[tuple[str, float, str]]:
    """Losses that TRL does not have (or has only as a mixture of others), against the unit tests' formulas."""
    t, found = test_preference, []
    known = {case["name"] for kind in ("pairs", "logits") for case in parity.TRL[kind]}
    numbers = tuple(t.f64(x) for x in (t.P_W, t.P_L, t.R_W, t.R_L))
    for name in [n for n in PREFERENCE if n not in known]:
        settings, formula = t.GOLDEN[name]
        ours = t.call(name, numbers, beta=t.B, **settings)[0]
        want = [formula(w - rw, l - rl, w, l, n, g) for w, l, rw, rl, n, g in zip(t.P_W, t.P_L, t.R_W, t.R_L, t.NLL, t.GAP, strict=True)]
        found.append((f"pairs: {name}", float((ours - t.f64(want)).abs().max()), PREFERENCE[name].paper))
    u = test_unpaired
    ours = UNPAIRED["bco"].function(*(u.f64(x) for x in (u.POLICY, u.REFERENCE, u.GOOD)), beta=u.B, delta=0.25, desirable_weight=1.5, undesirable_weight=0.5)[0]  # fmt: skip
    found.append(("unpaired: bco", float((ours - u.f64(u.golden("bco", 0.25))).abs().max()), UNPAIRED["bco"].paper))
    for name in ("scaled", "logexp", "regression", "process"):
        function, given, formula = test_reward_losses.GOLDEN[name]
        want = torch.tensor([formula(*row) for row in zip(*given, strict=True)], dtype=torch.float64)
        ours = function(*(torch.tensor(x, dtype=torch.float64) for x in given))
        found.append((f"reward: {name}", float((ours - want).abs().max()), test_reward_losses.REWARD[name].paper))
    d = test_distillation
    for case in ("skew", "skew reverse", "top-2", "top-2 reverse"):
        name, settings, want = d.GOLDEN[case]
        ours = d.DIVERGENCES[name](d.f64([d.STUDENT]), d.f64([d.TEACHER]), temperature=d.T, **settings)
        found.append((f"divergences: {case}", abs(float(ours) - want), "2402.03898" if "skew" in case else "definition"))
    return found


def main() -> None:
    print("| loss | max abs difference | against |\n|---|---|---|")
    for label, case in parity.CASES.items():
        print(f"| {label} | {max(case()):.1e} | TRL {parity.TRL['trl']}, loss and gradient |")
    for label, difference, paper in against_papers():
        print(f"| {label} | {difference:.1e} | formula{f' ({paper})' if paper else ''} |")


if __name__ == "__main__":
    main()
