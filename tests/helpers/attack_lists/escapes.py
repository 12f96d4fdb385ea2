"""Completions that make a reward hang, die or lie, where that reward is a gate or a penalty: none
may get away with it.

The verbs are those of tests/helpers/hostile_rewards.py. Without the reward that fails, every one of
these completions would get 1.
"""

from __future__ import annotations

VERBS: list[str] = ["hang", "sleep 60", "exit", "segfault", "allocate", "quit", "raise no"]
ROLES: dict[str, dict[str, object]] = {
    "gate": {"weight": 0.0},  # the reward `base` waits for it
    "penalty": {"weight": -1.0},
    "counts": {"weight": 1.0},
}
