"""`reinforge runs replay --change`: a step as it was beside how it would have been, as a page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from reinforge.cli.show import print_table, print_text
from reinforge.core.visible import visible

if TYPE_CHECKING:
    from reinforge.build.counterfactual import Counterfactual, TokenMove

SAMPLES = 8  # lines of the table
ANSWER = 32  # characters of an answer
# of the metrics: what stands on the page, where it differs or matters most
METRICS = (
    "reward/mean",
    "reward/std",
    "groups/zero_variance",
    "train/loss",
    "train/grad_norm",
    "policy/clip_fraction",
    "policy/kl",
    "policy/entropy",
    "train/learning_rate",
)


def print_counterfactual(found: Counterfactual) -> None:
    changed = ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in found.changes.items())
    print_text(f"step {found.step} with {changed}")
    if found.equal is not None:
        print_text(
            "the original came out as it was recorded, bit for bit"
            if found.equal
            else "note: the original itself did not come out as it was recorded"
        )
    print()
    print_table(_numbers(found))
    print()
    print_text(_verdict(found))
    moved = [s for s in found.samples if s.advantages[0] != s.advantages[1]]
    print()
    print_table(
        [
            {
                "sample": visible(s.sample, 24),
                "answer": visible(s.text, ANSWER),
                "reward": _pair(*s.rewards),
                "advantage": _pair(*s.advantages),
            }
            for s in moved[:SAMPLES]
        ],
        empty="no advantage changes",
    )
    if len(moved) > SAMPLES:
        print(f"... and {len(moved) - SAMPLES} more of {len(found.samples)} samples")
    print()
    print_table([_token(move) for move in found.tokens], empty="no token moves differently")


def _numbers(found: Counterfactual) -> list[dict[str, Any]]:
    first, second = found.metrics
    names = [name for name in METRICS if name in first or name in second]
    lines = [{"": name, "original": first.get(name), "changed": second.get(name)} for name in names]
    return [
        *lines,
        {"": "length of the update", "original": found.norms[0], "changed": found.norms[1]},
    ]


def _verdict(found: Counterfactual) -> str:
    if found.cosine is None:
        return "one of the two updates is nothing at all."
    angle = math.degrees(math.acos(max(-1.0, min(1.0, found.cosine))))
    ratio = found.norms[1] / found.norms[0]
    return (
        f"cosine between the updates {found.cosine:.4f} ({angle:.0f} degrees); the changed one is"
        f" {ratio:.3g} times as long."
    )


def _token(move: TokenMove) -> dict[str, Any]:
    return {
        "token": visible(move.token, 12) or "(empty)",
        "after": visible(move.context, 24),
        "in": f"{visible(move.sample, 24)} [{move.position}]",
        "probability": f"{math.exp(move.before):.4g}",
        "original": _change(move.before, move.original),
        "changed": _change(move.before, move.changed),
    }


def _change(before: float, after: float) -> str:
    """How an update changes the probability of a token."""
    return f"{math.expm1(after - before):+.2%}"


def _pair(old: float | None, new: float | None) -> str:
    """
    >>> _pair(1.0, 1.0), _pair(0.5, -0.25), _pair(None, 1.0)
    ('1', '0.5 -> -0.25', '- -> 1')
    """
    first, second = ("-" if value is None else f"{value:.3g}" for value in (old, new))
    return first if first == second else f"{first} -> {second}"
