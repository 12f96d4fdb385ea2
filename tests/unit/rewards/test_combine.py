"""Gates between rewards: the truth table, chains, and what a sample then holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from helpers.fake_engine import FakeEngine
from helpers.toys import run
from reinforge.config.rewards import RewardConfig
from reinforge.core.engine import Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.rewards.build import build_rewards, describe_rewards
from reinforge.rewards.combine import RewardGate, combined, gated, gates_of, total
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.outcome import RewardOutcome, checked
from reinforge.rollout.players.single_turn import SingleTurn

WEIGHTS = {"correct": 2.0, "format": 0.5}


@pytest.mark.parametrize(
    ("correct", "form", "at", "counts", "reward"),
    [
        (1.0, 1.0, None, 1.0, 2.5),
        (1.0, 0.5, None, 1.0, 2.25),
        (1.0, 0.0, None, 0.0, 0.0),
        (1.0, -1.0, None, 0.0, -0.5),
        (0.0, 1.0, None, 0.0, 0.5),
        (1.0, 0.5, 0.5, 1.0, 2.25),
        (1.0, 0.5, 0.6, 0.0, 0.25),
        (1.0, 0.0, 0.0, 1.0, 2.0),
        (1.0, -0.1, 0.0, 0.0, -0.05),
        (-1.0, 0.0, None, 0.0, 0.0),  # a penalty is held back too
        (1.0, None, None, 1.0, 2.0),  # a gate that does not apply holds nothing back
        # what does not apply stays out of the total
        (None, 0.0, None, None, 0.0),
        (None, 1.0, None, None, 0.5),
        (None, None, None, None, None),  # nothing applies: unscored
    ],
)
def test_truth_table(
    correct: float | None,
    form: float | None,
    at: float | None,
    counts: float | None,
    reward: float | None,
) -> None:
    found = gated({"correct": correct, "format": form}, {"correct": RewardGate("format", at)})
    assert found == {"correct": counts, "format": form}
    assert total(found, WEIGHTS) == (None if reward is None else pytest.approx(reward))


def test_a_chain_is_held_back_as_a_whole() -> None:
    gates = {"c": RewardGate("b"), "b": RewardGate("a")}
    assert gated({"c": 1.0, "b": 1.0, "a": 0.0}, gates) == {"c": 0.0, "b": 0.0, "a": 0.0}
    assert gated({"c": 1.0, "b": 1.0, "a": 1.0}, gates) == {"c": 1.0, "b": 1.0, "a": 1.0}
    assert gated({"c": 1.0, "b": None, "a": 0.0}, gates) == {"c": 1.0, "b": None, "a": 0.0}


LOST = math.nan


@pytest.mark.parametrize(
    ("components", "weights", "gates", "counted", "reward"),
    [
        ({"a": 1.0, "b": LOST}, {"a": 1.0, "b": -1.0}, {}, {"a": 1.0, "b": None}, None),
        ({"a": 1.0, "b": LOST}, {"a": 1.0, "b": 1.0}, {}, {"a": 1.0, "b": None}, None),
        ({"a": 1.0, "b": LOST}, {"a": 1.0, "b": 0.0}, {}, {"a": 1.0, "b": None}, 1.0),
        (
            {"a": 1.0, "b": LOST},
            {"a": 1.0, "b": 0.0},
            {"a": RewardGate("b")},
            {"a": None, "b": None},
            None,
        ),
        (
            {"a": 1.0, "b": 1.0, "c": LOST},
            {"a": 1.0, "b": 0.0, "c": 0.0},
            {"a": RewardGate("b"), "b": RewardGate("c")},
            dict.fromkeys("abc"),
            None,
        ),
        ({"a": 1.0, "b": None}, {"a": 1.0, "b": -1.0}, {}, {"a": 1.0, "b": None}, 1.0),
        (
            {"a": 1.0, "b": None},
            {"a": 1.0, "b": 0.0},
            {"a": RewardGate("b")},
            {"a": 1.0, "b": None},
            1.0,
        ),
    ],
    ids=[
        "penalty",
        "reward",
        "counts nothing",
        "gate",
        "gate of a gate",
        "penalty that does not apply",
        "gate that does not apply",
    ],
)
def test_a_lost_score_leaves_the_sample_without_a_total(
    components: Any, weights: Any, gates: Any, counted: Any, reward: Any
) -> None:
    """A reward that hung or died is not one that has nothing to say."""
    assert combined(components, gates, weights) == (counted, reward)


def test_what_is_lost_is_told_from_what_does_not_apply() -> None:
    parts = [
        RewardOutcome([None]),
        RewardOutcome([None], timeouts=1),
        RewardOutcome([1.0]),
        RewardOutcome([None, 0.0], lost=frozenset({0})),
    ]
    joined = RewardOutcome.joined(parts)
    assert joined.scores == [None, None, 1.0, None, 0.0] and joined.timeouts == 1
    assert [s is not None and math.isnan(s) for s in joined.marked] == [
        False,
        True,
        False,
        True,
        False,
    ]
    # a judge that said nothing, and did not hang
    unread = RewardOutcome.joined(
        [RewardOutcome([None], lost=frozenset({0})), RewardOutcome([0.5])]
    )
    assert unread.timeouts == 0 and [s is not None and math.isnan(s) for s in unread.marked] == [
        True,
        False,
    ]
    assert RewardOutcome.joined(
        [RewardOutcome([1.0]), RewardOutcome([None], crashes=1)]
    ) == RewardOutcome([1.0, None], crashes=1)


def test_a_reward_too_large_to_train_on_is_refused() -> None:
    """1e300 squared is no float, and 1e30 squared no float32: told at the reward, not where it
    overflows.
    """
    for value in (1e300, -1e300, 10**400, 2e16):
        with pytest.raises(
            InputError,
            match=r"reward big returned -?(1e\+300|inf|2e\+16): beyond 1e\+16 advantages overflow",
        ):
            checked("big", [value], 1)
    for value in (math.inf, math.nan, "1"):
        with pytest.raises(InputError, match="finite numbers"):
            checked("odd", [value], 1)
    assert checked("fine", [1e16, -1e16, None], 3) == [1e16, -1e16, None]
    with pytest.raises(InputError, match="add up to 1e\\+18"):
        combined({"a": 1e15}, {}, {"a": 1e3})


def test_gates_name_other_rewards() -> None:
    def make(**kw: str | None) -> list[FunctionReward]:
        return [
            FunctionReward(name, lambda completions: [], gate=gate) for name, gate in kw.items()
        ]

    assert gates_of(make(a="b", b=None)) == {"a": RewardGate("b")} and gates_of(
        make(a="rewards.py:b", b=None)
    ) == {"a": RewardGate("b")}
    with pytest.raises(
        InputError, match=r"rewards\.1\.gate: b waits for x, and there is no such reward.*a, b"
    ):
        gates_of(make(a=None, b="x"))
    for cycle in (make(a="a"), make(a="b", b="a")):
        with pytest.raises(InputError, match="could ever pass"):
            gates_of(cycle)


def test_the_config_reaches_the_samples() -> None:
    """Two samples: well formed and right, right but ill formed.

    Components are what counts, so they add up to the reward.
    """
    configs = [
        RewardConfig(name="correct", weight=2.0, gate="format"),
        RewardConfig(name="format", weight=0.5),
    ]
    functions: dict[str, Any] = {
        "correct": lambda completions: [1.0, 1.0],
        "format": lambda completions: [1.0, 0.0],
    }
    rewards = build_rewards(configs, functions)
    assert (rewards[0].gate, rewards[0].gate_at, rewards[1].gate) == ("format", None, None)
    engine = FakeEngine()
    samples = run(
        SingleTurn(engine, lambda row: [5], engine.decode, rewards, Sampling(2), n=2, seed=0)(
            Row("r", "p"), RolloutContext("g")
        )
    ).samples
    assert [s.rewards for s in samples] == [
        {"correct": 1.0, "format": 1.0},
        {"correct": 0.0, "format": 0.0},
    ]
    assert [s.reward for s in samples] == [2.5, 0.0]


def test_a_wrong_gate_is_told_when_rewards_are_built() -> None:
    with pytest.raises(
        InputError,
        match=r"rewards\.0\.gate: exact_number waits for form, and there is no such reward",
    ):
        build_rewards([RewardConfig(name="exact_number", gate="form")])


def test_functions_from_python_keep_the_gate_that_the_config_gives_them() -> None:
    def correct(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    declared = [RewardConfig(name="rewards.py:correct", weight=3.0, gate="format", gate_at=0.5)]
    (described, _), _ = describe_rewards([correct, "exact_number"], declared)
    assert (described.name, described.weight, described.gate, described.gate_at) == (
        "correct",
        3.0,
        "format",
        0.5,
    )
