"""What the answers of a step have in common: by these numbers the doctor (`watch/doctor`) tells a
policy that found a way around the task from one that learned it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from reinforge.core.sample import Group, Stop

FEWEST_PROMPTS = 4  # from which on one answer to most of them says something


def answer_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Each is there only where the answers decide it."""
    found = {
        "response/repeated": repeated(groups),
        "response/truncated_reward": truncated_reward(groups),
        "response/length_correlation": length_correlation(groups),
    }
    return {name: value for name, value in found.items() if value is not None}


def repeated(groups: Sequence[Group]) -> float | None:
    """The share of all answers that the most frequent one has, whatever it was asked; None where
    there are few different prompts, or no texts.
    """
    texts = [text for group in groups for text in group.texts]
    prompts = {str(group.row.prompt) for group in groups if group.texts}
    if len(prompts) < FEWEST_PROMPTS:
        return None
    [(_, most)] = Counter(texts).most_common(1)
    return most / len(texts)


def truncated_reward(groups: Sequence[Group]) -> float | None:
    """The mean reward of answers that the token limit cut off."""
    cut = [
        s.reward
        for group in groups
        for s in group.episodes
        if s.stop is Stop.LENGTH and s.reward is not None
    ]
    return sum(cut) / len(cut) if cut else None


def length_correlation(groups: Sequence[Group]) -> float | None:
    """Pearson's correlation of length and reward between answers to the same prompt; None where
    either is the same for all answers to each prompt.
    """
    lengths: list[float] = []
    rewards: list[float] = []
    for group in groups:
        tokens: dict[str, int] = defaultdict(int)
        for s in group.samples:
            tokens[s.episode] += s.n_trained
        scored = [(float(tokens[s.episode]), s.reward) for s in group.episodes]
        known = [(length, reward) for length, reward in scored if reward is not None]
        if known:
            lengths += _centred([length for length, _ in known])
            rewards += _centred([reward for _, reward in known])
    spread = math.sqrt(math.fsum(x * x for x in lengths) * math.fsum(y * y for y in rewards))
    if spread < 1e-12:
        return None
    return math.fsum(x * y for x, y in zip(lengths, rewards, strict=True)) / spread


def _centred(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]
