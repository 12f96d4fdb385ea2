from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforge.algorithms import catalogue
from reinforge.algorithms.parts.advantages import Rollouts
from reinforge.algorithms.parts.selections import (
    SELECTIONS,
    clip_cov,
    kl_cov,
    off_policy_mask,
    top_entropy,
)


def rollouts(lengths: list[int], **streams: list[float]) -> Rollouts:
    n = len(lengths)
    return Rollouts(
        rewards=torch.zeros(n),
        group=torch.arange(n),
        episode=torch.arange(n),
        lengths=torch.tensor(lengths),
        sequence=torch.repeat_interleave(torch.arange(n), torch.tensor(lengths, dtype=torch.int64)),
        streams={
            name: torch.tensor(values, dtype=torch.float64) for name, values in streams.items()
        },
    )


def random_streams(lengths: list[int], seed: int) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(seed)

    def noise(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    n = sum(lengths)
    advantages = torch.cat([noise(1).expand(k) for k in lengths])
    old = -3 * noise(n).abs()
    return {
        "old": old.tolist(),
        "behaviour": (old + noise(n)).tolist(),
        "advantages": advantages.tolist(),
        "entropy": noise(n).abs().tolist(),
    }


def covariances(streams: dict[str, list[float]], name: str = "old") -> list[float]:
    logprobs = streams[name]
    advantages = streams["advantages"]
    mean_p = math.fsum(logprobs) / len(logprobs)
    mean_a = math.fsum(advantages) / len(advantages)
    return [(p - mean_p) * (a - mean_a) for p, a in zip(logprobs, advantages, strict=True)]


def test_clip_cov_by_hand() -> None:
    """logp (-1, -1, -5, -5) and A (1, -1, 1, -1): means -3 and 0, covariances 2, -2, -2, 2.

    Good and likely, bad and unlikely.
    """
    batch = rollouts([2, 2], old=[-1.0, -1.0, -5.0, -5.0], advantages=[1.0, -1.0, 1.0, -1.0])
    assert clip_cov(batch).tolist() == [1, 0, 0, 1]  # both are tied for the one place
    assert (
        clip_cov(batch, lower=2.0).tolist() == clip_cov(batch, upper=2.0).tolist() == [0, 0, 0, 0]
    )
    assert kl_cov(batch).tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("share", [2e-4, 0.05, 0.2])
def test_covariance_selections_against_a_plain_loop(share: float) -> None:
    lengths = [20, 0, 35, 50, 1, 94]
    streams = random_streams(lengths, seed=3)
    covariance = covariances(streams)
    n = sum(lengths)
    count = max(int(share * n), 1)

    inside = sorted(
        (t for t in range(n) if 1.0 < covariance[t] < 5.0), key=lambda t: -covariance[t]
    )
    assert len(inside) > 20 and max(covariance) > 5.0, (
        "some should be outside the range on both sides"
    )
    selected = clip_cov(rollouts(lengths, **streams), share=share)
    assert selected.nonzero()[:, 0].tolist() == sorted(inside[:count]) and selected.shape == (n,)

    highest = sorted(range(n), key=lambda t: -covariance[t])
    assert kl_cov(rollouts(lengths, **streams), share=share).nonzero()[:, 0].tolist() == sorted(
        highest[:count]
    )


def test_covariance_reads_old_or_else_behaviour() -> None:
    streams = random_streams([30, 30], seed=1)
    best = {
        name: max(range(60), key=lambda t, name=name: covariances(streams, name)[t])
        for name in ("old", "behaviour")
    }
    assert best["old"] != best["behaviour"]
    assert kl_cov(rollouts([30, 30], **streams)).nonzero()[:, 0].tolist() == [best["old"]]
    del streams["old"]
    assert kl_cov(rollouts([30, 30], **streams)).nonzero()[:, 0].tolist() == [best["behaviour"]]


def test_without_covariance_nothing_is_selected() -> None:
    batch = rollouts([2, 1], old=[-1.0, -2.0, -3.0], advantages=[0.0, 0.0, 0.0])
    assert kl_cov(batch, share=0.9).tolist() == clip_cov(batch, share=0.9).tolist() == [0, 0, 0]


def test_top_entropy_takes_a_share_of_the_batch_not_of_a_row() -> None:
    entropy = [9.0, 8.0, 7.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    batch = rollouts([3, 7], entropy=entropy)
    assert top_entropy(batch).tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]  # both of the first row
    assert top_entropy(batch, share=0.3).tolist() == [1, 1, 1] + [0] * 7
    assert top_entropy(batch, share=0.31).sum() == 4  # rounded up
    assert top_entropy(batch, share=1.0).sum() == 10 and top_entropy(batch, share=0.0).sum() == 0
    # 0.2 * 15 > 3
    assert top_entropy(rollouts([15], entropy=[float(i) for i in range(15)])).nonzero()[
        :, 0
    ].tolist() == [12, 13, 14]
    # ties
    assert top_entropy(rollouts([5], entropy=[2.0, 1.0, 2.0, 2.0, 0.0])).tolist() == [1, 0, 1, 1, 0]


def test_top_entropy_agrees_with_the_quantile() -> None:
    streams = random_streams([100, 57, 40], seed=5)
    entropy = torch.tensor(streams["entropy"], dtype=torch.float64)
    for share in (0.1, 0.2, 0.5):
        expected = (entropy >= torch.quantile(entropy, 1 - share)).double()
        assert (
            top_entropy(rollouts([100, 57, 40], **streams), share=share).tolist()
            == expected.tolist()
        )


def test_off_policy_mask_by_hand() -> None:
    """mean(behaviour - old): 0.6, 0.6, 0.4, -2, and 0.6 with a mean of 0.9 and 0.3.

    Dropped: A < 0 and above 0.5.
    """
    old = [-1.0, -1.0, -2.0, -3.0, -1.0, -1.0]
    drift = [0.6, 0.6, 0.4, -2.0, 0.9, 0.3]
    advantages = [-1.0, 1.0, -1.0, -1.0, -0.5, -0.5]
    streams = {
        "old": old,
        "behaviour": [o + d for o, d in zip(old, drift, strict=True)],
        "advantages": advantages,
    }
    batch = rollouts([1, 1, 1, 1, 0, 2], **streams)
    assert off_policy_mask(batch).tolist() == [1, 0, 0, 0, 1, 1]
    assert off_policy_mask(batch, drift=0.3).tolist() == [1, 0, 1, 0, 1, 1]
    assert off_policy_mask(batch, drift=0.7).tolist() == [0] * 6


def test_off_policy_mask_takes_whole_rows() -> None:
    """A row with one wild token and many fine ones stays; the same token alone goes."""
    streams = {
        "old": [-9.0] + [-1.0] * 9 + [-9.0],
        "behaviour": [-5.0] + [-1.0] * 9 + [-5.0],
        "advantages": [-1.0] * 11,
    }
    assert off_policy_mask(rollouts([10, 1], **streams)).tolist() == [0] * 10 + [1]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(list(SELECTIONS)))
def test_the_order_of_rows_does_not_matter(data: st.DataObject, name: str) -> None:
    lengths = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=6).filter(any))
    order = data.draw(st.permutations(range(len(lengths))))
    streams = random_streams(lengths, seed=data.draw(st.integers(0, 99)))
    if data.draw(st.booleans()):  # ties
        streams = {name: [round(v) * 1.0 for v in values] for name, values in streams.items()}
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    place = [t for i in order for t in range(starts[i], starts[i] + lengths[i])]
    shuffled = rollouts(
        [lengths[i] for i in order], **{n: [v[t] for t in place] for n, v in streams.items()}
    )
    select = SELECTIONS[name] if name == "off_policy_mask" else partial(SELECTIONS[name], share=0.3)
    assert select(shuffled).tolist() == select(rollouts(lengths, **streams))[place].tolist()


@pytest.mark.parametrize("name", list(SELECTIONS))
def test_no_tokens(name: str) -> None:
    batch = rollouts([0, 0], old=[], behaviour=[], advantages=[], entropy=[])
    assert SELECTIONS[name](batch).tolist() == []


def test_what_becomes_of_the_selected() -> None:
    assert {name: spec.selected for name, spec in catalogue.SELECTIONS.items()} == {
        "clip_cov": "drop",
        "kl_cov": "penalise",
        "top_entropy": "keep",
        "off_policy_mask": "drop",
    }
    assert {name: spec.needs for name, spec in catalogue.SELECTIONS.items() if spec.needs} == {
        "top_entropy": {"entropy"},
        "off_policy_mask": {"old"},
    }
    with pytest.raises(AssertionError, match="entropy"):
        top_entropy(rollouts([1], old=[-1.0]))
