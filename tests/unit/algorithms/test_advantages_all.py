"""What holds for every advantage: rows in any order, unscored rows, no signal, options."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from test_advantages import NAN, by_name, rollouts

from reinforge.algorithms import catalogue
from reinforge.algorithms.parts.advantages import ADVANTAGES, AdvantageOptions, Rollouts


def some_batch(
    generator: torch.Generator, *, fork: bool = True, token_rewards: bool = True
) -> Rollouts:
    """Rows of up to 4 groups with ties, unscored rows, rows without tokens, forked episodes,
    truncation.
    """
    n = int(torch.randint(3, 14, (1,), generator=generator))

    def pick(choices: list[float], k: int) -> torch.Tensor:
        return torch.tensor(choices, dtype=torch.float64)[
            torch.randint(len(choices), (k,), generator=generator)
        ]

    def normal(k: int) -> torch.Tensor:
        return torch.randn(k, generator=generator, dtype=torch.float64)

    rewards = pick([0.0, 1.0, 0.1, 0.7, NAN], n)
    group = pick([0, 1, 2, 3], n).long()
    lengths = pick([0, 1, 2, 5], n).long()
    components = {
        name: torch.where(rewards.isnan(), NAN, pick([0.0, 1.0, 0.3, NAN], n))
        for name in ("a", "b")
    }
    baseline = pick([0.0, 0.5], n)
    episode = torch.arange(n)
    truncated = pick([0, 1], n).bool()
    if fork:
        for tensor in (rewards, group, episode, baseline, *components.values()):
            tensor[n - 1] = tensor[0]
    m = int(lengths.sum())
    return Rollouts(
        rewards,
        group,
        episode,
        torch.repeat_interleave(torch.arange(n), lengths),
        lengths,
        {"values": normal(m)},
        normal(m) / 10 if token_rewards else None,
        truncated,
        components,
        baseline,
        normal(n),
    )


def take(r: Rollouts, rows: list[int]) -> tuple[Rollouts, torch.Tensor]:
    """The rollouts with these rows in this order, and where their tokens were."""
    tokens = torch.cat(
        [(r.sequence == i).nonzero()[:, 0] for i in rows] or [torch.zeros(0, dtype=torch.int64)]
    )
    at = torch.tensor(rows, dtype=torch.int64)
    assert r.truncated is not None and r.baseline is not None and r.bootstrap is not None
    return (
        Rollouts(
            r.rewards[at],
            50 - 7 * r.group[at],
            90 - r.episode[at],
            torch.repeat_interleave(torch.arange(len(rows)), r.lengths[at]),
            r.lengths[at],
            {name: x[tokens] for name, x in r.streams.items()},
            None if r.token_rewards is None else r.token_rewards[tokens],
            r.truncated[at],
            {name: x[at] for name, x in r.components.items()},
            r.baseline[at],
            r.bootstrap[at],
        ),
        tokens,
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_neither_order_nor_unscored_rows_matter(name: str) -> None:
    """Rows in any order give the same bits, so packing cannot matter; unscored rows get 0, and
    without them nothing changes.
    """
    generator = torch.Generator().manual_seed(7)
    for _ in range(40):
        r = some_batch(generator, token_rewards=name != "decoupled")
        n = len(r.rewards)
        want = by_name(name, r)
        shuffled, tokens = take(r, torch.randperm(n, generator=generator).tolist())
        assert by_name(name, shuffled) == [want[i] for i in tokens]
        scored = [i for i in range(n) if not r.rewards[i].isnan()]
        fewer, tokens = take(r, scored)
        assert by_name(name, fewer) == [want[i] for i in tokens]
        assert [want[i] for i in range(len(want)) if r.rewards[r.sequence[i]].isnan()] == [0.0] * (
            len(want) - len(tokens)
        )


def test_ties_and_forks_are_summed_in_one_order() -> None:
    """0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1: neither as token rewards of three rows of one
    episode, nor as length times reward.
    """
    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
    fork = replace(
        rollouts([0.0] * 3 + [1.0], [0] * 4, [0, 0, 0, 1]),
        token_rewards=torch.tensor([0.1, 0.2, 0.3, 0.0], dtype=torch.float64),
    )
    ties = rollouts([0.0, 0.1, 0.1, 0.1], [0] * 4, None, [1, 1, 2, 3])
    for r, name in ((fork, "group_relative"), (ties, "optimal_baseline")):
        r = replace(
            r,
            truncated=torch.zeros(4, dtype=torch.bool),
            baseline=torch.zeros(4),
            bootstrap=torch.zeros(4),
        )
        want = by_name(name, r)
        for order in permutations(range(4)):
            shuffled, tokens = take(r, list(order))
            assert by_name(name, shuffled) == [want[i] for i in tokens]
            assert shuffled.totals.tolist() == r.totals[list(order)].tolist()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_batch_of_one_row_and_an_empty_one(name: str) -> None:
    r = replace(
        rollouts([0.7], [0], None, [3]),
        baseline=torch.tensor([0.2]),
        streams={"values": torch.zeros(3)},
    )
    by_name(name, r)
    assert by_name(name, replace(r, rewards=torch.tensor([NAN]))) == [0.0] * 3
    nothing = replace(
        rollouts([0.7, NAN], [0, 1]),
        baseline=torch.zeros(2),
        streams={"values": torch.zeros(0)},
        lengths=torch.zeros(2, dtype=torch.int64),
        sequence=torch.zeros(0, dtype=torch.int64),
    )
    assert by_name(name, nothing) == []


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"greedy_baseline", "gae"}))
def test_no_signal_anywhere_is_exactly_zero(name: str) -> None:
    r = rollouts([0.1] * 6, [0, 0, 0, 1, 1, 1], None, [1, 2, 3, 4, 5, 6])
    assert by_name(name, r) == [0.0] * 21


OTHER = {
    "scale": "batch",
    "std": "population",
    "eps": 0.5,
    "gamma": 0.9,
    "lam": 0.5,
    "lam_critic": 1.0,
    "length_alpha": 0.9,
    "k": 2,
    "weights": {"a": 3.0},
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_reads_says_which_options_count(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    r = some_batch(generator, fork=False, token_rewards=name != "decoupled")
    while int((~r.rewards.isnan()).sum()) < 10 or len(r.sequence) < 20:
        r = some_batch(generator, fork=False, token_rewards=name != "decoupled")
    whitens = name in ("return_to_go", "group_whitened", "decoupled", "gae")
    changed: set[str] = set()
    for base in ({}, {"whiten": True}, {"scale": "batch"}):
        for option, value in {**OTHER, "whiten": not whitens}.items():
            before, after = (
                ADVANTAGES[name](r, AdvantageOptions(**o)) for o in (base, {**base, option: value})
            )
            pairs = (
                [(before, after)]
                if isinstance(before, torch.Tensor)
                else [(before[key], after[key]) for key in before]
            )
            if not all(torch.equal(a, b) for a, b in pairs):
                changed.add(option)
    assert changed == catalogue.ADVANTAGES[name].reads
