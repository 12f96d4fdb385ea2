"""Texts that never end, and rewards that are made to fail: what they may cost the trainer, and what
they may earn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helpers.attack_lists import bombs, escapes
from helpers.toys import run
from reinforge.config.rewards import RewardConfig
from reinforge.core.sample import Row
from reinforge.rewards.build import build_rewards
from reinforge.rewards.judge import parse_score, parse_verdict
from reinforge.rewards.math import decided
from reinforge.rollout.scoring import RewardScorer


def short(value: Any) -> str:
    return repr(value)[:40]


def test_a_pattern_that_never_ends_costs_its_own_score_and_nobody_waits() -> None:
    """Each bomb is unscored and counted, its neighbours are scored, and the event loop goes on
    meanwhile."""
    row = Row("r", "?")
    ticks = 0

    async def clock() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.05)
            ticks += 1

    async def tried() -> None:
        ticking = asyncio.ensure_future(clock())
        for pattern, bomb in bombs.REGEX:
            config = RewardConfig(
                name="regex", options={"pattern": pattern}, timeout=2.0, workers=2
            )
            [reward] = build_rewards([config])
            # killable, and what the clock decides is journalled
            assert reward.pool is not None and not reward.pure
            before = ticks
            outcome = await reward.outcome([row] * 3, ["plain", bomb, "plain"])
            assert outcome.scores[1] is None and outcome.timeouts == 1, pattern
            assert outcome.scores.count(None) == 1, pattern
            assert ticks - before > 3, pattern
        ticking.cancel()

    run(tried(), timeout=100)


@pytest.mark.parametrize("reply", bombs.JUDGE, ids=short)
def test_the_judge_is_read_in_one_pass(reply: str) -> None:
    """Quadratic, the longest of these would take hours."""
    assert parse_score(reply) is None and parse_verdict(reply) is None


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7", 7.0),
        ("**Score:** 7.5/10", 7.5),
        ("Score: -3", None),
        ("Score: −3", None),
        ("score:\n\n8", 8.0),
        ("Score: 10.", 10.0),
        ("Score: 4\nScore: 5", 5.0),
        ("Score: 4\nScore: n/a", None),
        ("Scores: 5", None),
        ("Score 5", None),
        ("- Score: 6 / 10", 6.0),
        ("", None),
    ],
)
def test_what_a_judge_says(reply: str, score: float | None) -> None:
    assert parse_score(reply) == score


@pytest.mark.parametrize("text", bombs.TEXTS, ids=short)
def test_a_built_in_reward_reads_any_text(text: str) -> None:
    for name, options, answer in bombs.ASKED:
        [reward] = build_rewards([RewardConfig(name=name, options=options)])
        assert (
            run(reward.outcome([Row("r", "?", {"answer": answer})], [text])).scores[0] is not None
        )
    assert decided(text, "8", "?") is not None


@pytest.mark.parametrize("verb", escapes.VERBS)
@pytest.mark.parametrize("role", escapes.ROLES)
def test_a_completion_that_makes_a_reward_fail_gets_nothing_for_it(role: str, verb: str) -> None:
    """Without the reward that fails, the completion would be worth 1."""
    failing: Any = {
        "name": "helpers.hostile_rewards:obey",
        "timeout": 0.5,
        "workers": 1,
        "memory_gib": 1.0,
        **escapes.ROLES[role],
    }
    base = RewardConfig(name="base", gate="obey" if role == "gate" else None)
    rewards = build_rewards(
        [base, RewardConfig(**failing)], {"base": lambda completions: [1.0] * len(completions)}
    )
    scorer = RewardScorer(rewards, on_error="unscored")
    scores = run(scorer.score([Row("r", "?")], "g", [[1]], [verb]))
    components, reward = scorer.total({name: values[0] for name, values in scores.items()}, 1)
    assert (
        reward is None and components["obey"] is None and sum(scorer.faults("g")[0].values()) == 1
    )
