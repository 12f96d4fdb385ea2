"""Evaluation: accuracy and its interval per problem, pass@k, held-out loss, and draws that are the
same every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch

from helpers.fake_engine import FakeEngine
from helpers.toys import (
    ToyTokenizer,
    make_model,
    make_module,
    make_samples,
    run,
    train_config,
    true_logprobs,
)
from reinforge.backends.local import LocalBackend
from reinforge.core.engine import Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.sample import Group, Row, Sample
from reinforge.evals.heldout import HeldOutEvaluation, heldout_loss
from reinforge.evals.statistics import pass_at_k, wilson
from reinforge.rewards.function import FunctionReward
from reinforge.rollout.players.single_turn import SingleTurn


def held_out(rewards: Sequence[Sequence[float | None]], **kw: float) -> HeldOutEvaluation:
    async def rollout(row: Row, context: RolloutContext) -> Group:
        name = context.group
        values = rewards[int(row.id)]
        return Group(
            row,
            [
                Sample.from_tokens(
                    f"{name}#{i}", [1] * (3 + i), [False] + [True] * (2 + i), reward=r
                )
                for i, r in enumerate(values)
            ],
        )

    return HeldOutEvaluation(
        rollout, [Row(str(i), "") for i in range(len(rewards))], len(rewards[0]), **kw
    )


def test_accuracy_is_over_problems() -> None:
    """Two samples each: 1 of 2, 2 of 2, 0 of 2.

    The interval is of three problems, not of six samples.
    """
    out = run(held_out([[1.0, 0.0], [1.0, 1.0], [0.5, 0.0]])())
    assert (
        out["eval/accuracy"] == pytest.approx(0.5)
        and out["eval/n"] == 3
        and out["eval/reward"] == pytest.approx(3.5 / 6)
    )
    assert (out["eval/accuracy_low"], out["eval/accuracy_high"]) == pytest.approx(
        wilson(1.5, 3)
    ) and out["eval/pass@2"] == pytest.approx(2 / 3)
    assert out["eval/length"] == 2.5 and out["eval/unscored"] == 0


def test_unscored_samples_are_counted_and_not_zero() -> None:
    out = run(held_out([[1.0, None], [None, None], [1.0, 1.0]])())
    assert (
        out["eval/accuracy"] == 1.0
        and out["eval/n"] == 2
        and out["eval/unscored"] == 3
        and "eval/pass@2" not in out
    )


def test_an_evaluation_that_could_score_nothing_has_no_accuracy() -> None:
    """0 would say that every answer is wrong, and the next evaluation would look like progress."""
    nothing = run(held_out([[None, None], [None, None]])())
    assert nothing["eval/n"] == 0 and nothing["eval/unscored"] == 4
    told = ("accuracy", "accuracy_low", "accuracy_high", "reward")
    assert all(math.isnan(nothing[f"eval/{name}"]) for name in told)
    assert "eval/pass@2" not in nothing


def test_solved_means_the_best_possible_total() -> None:
    assert run(held_out([[1.0], [1.5], [1.4999]], best=1.5)())["eval/accuracy"] == pytest.approx(
        2 / 3
    )


@pytest.mark.parametrize(("c", "n"), [(0, 10), (1, 10), (5, 10), (10, 10), (81, 263)])
def test_wilson_solves_its_equation(c: int, n: int) -> None:
    """The bounds are where the observed share is 1.96 standard deviations away: (p - c/n)^2 = z^2 p
    (1 - p) / n.
    """
    for bound in wilson(c, n):
        assert (bound - c / n) ** 2 == pytest.approx(
            1.959963984540054**2 * bound * (1 - bound) / n, abs=1e-9
        )
    low, high = wilson(c, n)
    assert 0 <= low <= c / n <= high <= 1 and low < high


def test_wilson_is_exact_where_all_or_none_are_right() -> None:
    for n in range(1, 200):
        assert wilson(0, n)[0] == 0 and wilson(n, n)[1] == 1
        assert 0 < wilson(0, n)[1] < 1 and 0 < wilson(n, n)[0] < 1


def test_pass_at_k_is_the_average_over_subsets() -> None:
    for k in (1, 2, 3, 5):
        want = []
        for correct in (0, 1, 3, 5):
            outcomes = [i < correct for i in range(5)]
            picks = list(combinations(outcomes, k))
            want.append(sum(any(p) for p in picks) / len(picks))
        assert pass_at_k([0, 1, 3, 5], 5, k) == pytest.approx(sum(want) / 4)
    with pytest.raises(ValueError, match="pass@6"):
        pass_at_k([1], 5, 6)


def test_the_same_evaluation_twice_is_the_same() -> None:
    """Keys come from the row and the purpose: neither the number of calls nor the order of rows
    matters.
    """

    def make(rows: list[Row]) -> HeldOutEvaluation:
        decode = ToyTokenizer().decode
        reward = FunctionReward(
            "a", lambda completions: [c.count("a") / 9 for c in completions], pure=True
        )
        rollout = SingleTurn(
            FakeEngine(decode=decode),
            lambda row: [5, int(row.id)],
            decode,
            [reward],
            Sampling(9),
            n=3,
            seed=0,
            purpose="eval",
        )
        return HeldOutEvaluation(rollout, rows, 3)

    evaluation = make([Row(str(i), "") for i in range(6)])
    first = run(evaluation())
    assert run(evaluation()) == first and 0 < first["eval/reward"] < 1


def test_heldout_loss_is_the_mean_over_tokens() -> None:
    samples = make_samples((20, 5, 12, 3))
    module = make_module()
    nll = -torch.cat([true_logprobs(module, s.tokens.tolist())[s.trained[1:]] for s in samples])
    backend = LocalBackend(make_model(), train_config(), total_steps=1)
    for budget in (1, 24, 4096):
        out = heldout_loss(backend, samples, budget)
        assert out["eval/loss"] == pytest.approx(float(nll.mean()), abs=1e-5) and out[
            "eval/tokens"
        ] == len(nll)
