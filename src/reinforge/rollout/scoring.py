"""Scores texts of one prompt with all rewards, remembers what cannot be asked again, and adds the
components up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from reinforge.core.errors import InputError
from reinforge.core.faults import Fault
from reinforge.core.sample import Row
from reinforge.core.seeds import answers_hash, tokens_hash
from reinforge.rewards.combine import combined, gates_of
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.normalization import RewardNormalization
from reinforge.rewards.raised import raised_in_words
from reinforge.rollout.baseline import greedy_name
from reinforge.rollout.journal import Journal, Scores

Components = dict[str, float | None]
FAULTS = {
    "timeouts": Fault.REWARD_TIMEOUT,
    "crashes": Fault.REWARD_CRASH,
    "sandbox": Fault.SANDBOX_FAILURE,
    "unsafe": Fault.UNCONTAINED,
}


class RewardScorer:
    """The rewards of a run, asked together. Every rollout has one and shows it its texts.

    `weights`: of components that come from elsewhere (an environment), beside those of the rewards.
    `on_error` is `raise`, or `unscored`: a reward that fails leaves None and a line in `errors`.
    """

    def __init__(
        self,
        rewards: Sequence[FunctionReward],
        *,
        journal: Journal | None = None,
        on_error: str = "raise",
        shape: Callable[[int], float] | None = None,
        weights: Mapping[str, float] | None = None,
    ):
        self.rewards = list(rewards)
        self.weights = {**(weights or {}), **{r.name: r.weight for r in rewards}}
        self.gates = gates_of(rewards)
        self.journal = journal or Journal(None)
        # how components count in the total, where that depends on earlier steps
        self.running: RewardNormalization | None = None
        self.shape = shape  # response length -> extra reward (soft overlong punishment)
        self.on_error = on_error
        self.errors: list[str] = []  # rewards that failed and were tolerated, for the log
        self._faults: dict[str, dict[str, int]] = {}
        self._why: dict[str, dict[str, str]] = {}

    async def score(
        self,
        rows: Sequence[Row],
        group: str,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[str],
        *,
        ids: Sequence[Sequence[int] | memoryview] | None = None,
    ) -> Scores:
        """All texts of a group at once: a reward may compare them.

        `rows` are one row, or the same with columns of their own. `ids`: the tokens once more, as
        they are named fastest. A score that is lost (its reward
        hung, died or raised) is NaN here and in the journal; `total` takes it out.
        """
        bound = self._name(group, tokens if ids is None else ids)
        known = self.journal.find(group, bound) or {}
        faults = self.journal.faults(group, bound)
        why: dict[str, str] = {}
        scores: Scores = {}
        asked: Scores = {}
        for reward in self.rewards:
            if reward.name in known:
                scores[reward.name] = known[reward.name]
                continue
            try:
                outcome = await reward.outcome(rows, texts, tokens)
                scores[reward.name] = outcome.marked
                for name, kind in FAULTS.items():
                    if count := getattr(outcome, name):
                        faults[kind] = faults.get(kind, 0) + count
                        why.setdefault(kind, f"reward {reward.name}, row {rows[0].id}")
            except Exception as error:
                where = f"row {rows[0].id}" if rows else "rewards"
                if self.on_error == "raise":
                    if isinstance(error, InputError):
                        raise
                    raise InputError(
                        f"reward {reward.name} {raised_in_words(error)}.",
                        where=where,
                        fix=(
                            "The run ends here. Fix the function, or set"
                            " rollout.on_reward_error=unscored to go on without these samples."
                        ),
                    ) from error
                self.errors.append(f"{reward.name} on {where} {raised_in_words(error)}")
                faults[Fault.REWARD_ERROR] = faults.get(Fault.REWARD_ERROR, 0) + len(texts)
                why.setdefault(Fault.REWARD_ERROR, self.errors[-1])
                scores[reward.name] = [math.nan] * len(texts)
            if not reward.pure:
                asked[reward.name] = scores[reward.name]
        self.journal.write(group, bound, asked, faults)
        if faults:
            self._faults[group] = faults
            self._why[group] = why
        return scores

    def _name(self, group: str, tokens: Sequence[Sequence[int] | memoryview]) -> str:
        """What the answers are called in the journal: as an earlier version called them, if it
        wrote their scores.
        """
        if self.journal.knows(group):
            old = tokens_hash(tokens)
            if self.journal.find(group, old) is not None:
                return old
        return answers_hash(tokens)

    def by_step(self) -> bool:
        """From now on rewards that judge single steps count as rewards of tokens (`steps`), not in
        the total. Whether there are any.
        """
        found = [r.name for r in self.rewards if r.steps is not None]
        self.weights |= dict.fromkeys(found, 0.0)
        return bool(found)

    def steps(self, rows: Sequence[Row], texts: Sequence[str]) -> list[list[tuple[int, float]]]:
        """For each text where steps end in it, and what they are worth."""
        found: list[list[tuple[int, float]]] = [[] for _ in texts]
        for reward in self.rewards:
            if reward.steps is not None:
                for own, steps in zip(
                    found, reward.steps([row.prompt for row in rows], texts), strict=True
                ):
                    own += [(end, reward.weight * value) for end, value in steps]
        return found

    def faults(self, group: str) -> tuple[dict[str, int], dict[str, str]]:
        """What went wrong with the scores of a group and of its greedy baseline: how often by kind,
        and what was said about the first of each kind. To be asked once.
        """
        greedy = greedy_name(group)
        counts = Counter(self._faults.pop(group, {})) + Counter(self._faults.pop(greedy, {}))
        why = {**self._why.pop(greedy, {}), **self._why.pop(group, {})}
        return dict(counts), why

    def total(
        self, components: Mapping[str, float | None], length: int
    ) -> tuple[Components, float | None]:
        """The components, gated, and their weighted total.

        `length`: sampled tokens that the overlong punishment looks at.
        """
        counted, reward = combined(components, self.gates, self.weights, self.running)
        # there is nothing to score: what is learned comes from elsewhere (a teacher)
        if not self.weights:
            reward = 0.0
        if self.shape is not None and reward is not None:
            counted["overlong"] = self.shape(length)
            reward += counted["overlong"] or 0.0
        return counted, reward
