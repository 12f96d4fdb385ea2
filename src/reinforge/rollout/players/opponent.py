"""Single-turn rollouts with an opponent: some answers are the policy's, some another sampler's, and
all are scored together.

Which is whose is the stream `by_reference`. Self-play has only the opponent's answers, beside the
data's own (`Group.given`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reinforge.algorithms.losses.rows import with_stream
from reinforge.algorithms.pairing import OPPONENT
from reinforge.core.engine import Engine
from reinforge.core.env import RolloutContext
from reinforge.core.sample import Group, Row, Sample
from reinforge.core.seeds import seed_of
from reinforge.rollout.first_finished import all_finished
from reinforge.rollout.players.single_turn import SingleTurn


class OpponentRollout:
    """A `Rollout`: half of the n answers of `single` are the opponent's; all of them where the
    data's `answers` (by row id) are given.
    """

    def __init__(
        self, single: SingleTurn, opponent: Engine, answers: Mapping[str, Sample] | None = None
    ):
        assert answers is not None or single.n % 2 == 0
        self.single = single
        self.opponent = opponent
        self.answers = answers

    async def __call__(self, row: Row, context: RolloutContext) -> Group:
        single = self.single
        group = context.group
        prompt = single.encode(row)
        own = 0 if self.answers is not None else single.n // 2
        players = [
            (context.engine or single.engine, single.purpose, own),
            (self.opponent, "opponent", single.n - own),
        ]
        answers = await all_finished(
            [
                engine.generate(
                    prompt, single.sampling, key=seed_of(single.seed, purpose, group), n=n
                )
                for engine, purpose, n in players
                if n
            ]
        )
        context.generated()
        completions = [completion for part in answers for completion in part]
        made = await single.scored(row, group, prompt, completions)
        samples = [with_stream(s, OPPONENT, float(i >= own)) for i, s in enumerate(made.samples)]
        given = None if self.answers is None else self._given(row, group)
        return replace(made, samples=samples, given=given)

    def _given(self, row: Row, group: str) -> Sample:
        """The data's answer as an answer of this group: the prompt is shared with the others."""
        assert self.answers is not None
        uid = f"{group}#given"
        return with_stream(
            self.answers[row.id].with_(uid=uid, group=group, episode=uid, reward=0.0), OPPONENT, 0.0
        )
