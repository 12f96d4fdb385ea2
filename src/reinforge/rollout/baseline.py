"""The greedy baseline: one more answer for each prompt, the likeliest, whose reward is the baseline
of every sample (ReMax).

It is drawn together with the samples and scored by itself, as a group with a name of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reinforge.core.engine import Sampling
from reinforge.core.sample import Sample


def greedy_name(group: str) -> str:
    """Under which the baseline of a group is drawn, scored and journalled."""
    return f"{group}#greedy"


def greedy_sampling(sampling: Sampling) -> Sampling:
    return replace(sampling, temperature=0.0)


def with_baseline(samples: Sequence[Sample], reward: float | None) -> list[Sample]:
    return [sample.with_(baseline=reward) for sample in samples]
