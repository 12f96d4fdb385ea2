"""What rewards count in a run: every reward's rule (`rewards.rule`), with the statistics so far.

Statistics are those of all earlier steps, and move once per step: every sample of a step is treated
alike, whatever order rollouts end in, and a step that was cut and is done again sees what it saw.
In the first step there are none, and rewards count as they are scored. The components on a sample
(and their metrics) stay as scored; only the total changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reinforge.core.backend import State
from reinforge.core.sample import Sample
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.rule import NormalizationRule, RunningMoments


@dataclass
class RewardNormalization:
    """The rules of the rewards that have one, by name, and what was seen of each.

    A part of the run.
    """

    rules: Mapping[str, NormalizationRule]
    seen: dict[str, RunningMoments] = field(default_factory=dict)

    @classmethod
    def of(cls, rewards: Iterable[FunctionReward]) -> RewardNormalization:
        return cls({r.name: r.rule for r in rewards if r.rule != NormalizationRule()})

    def __call__(self, components: Mapping[str, float | None]) -> dict[str, float | None]:
        """The components as they count in the total."""
        return {
            name: (
                value
                if value is None or name not in self.rules
                else self.rules[name].apply(value, self.seen.get(name, RunningMoments()))
            )
            for name, value in components.items()
        }

    def observe(self, samples: Iterable[Sample]) -> None:
        """The samples of a step that is done, as they were scored."""
        samples = list(samples)
        for name, rule in self.rules.items():
            if rule.center or rule.scale:
                self.seen.setdefault(name, RunningMoments()).add(
                    [v for s in samples if (v := s.rewards.get(name)) is not None]
                )

    def state(self) -> State:
        return State({}, {name: [m.n, m.mean, m.m2] for name, m in self.seen.items()})

    def load(self, state: State) -> None:
        self.seen = {name: RunningMoments(*values) for name, values in state.meta.items()}
