"""The replay buffer: what it keeps, for how long, and that a checkpoint holds all of it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from reinforge.core.backend import State
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row, Sample, Stop
from reinforge.rollout.rows.replay import ReplayBuffer, informative
from reinforge.rollout.staleness import oldest_version

ROWS = [Row(f"r{i}", f"p{i}") for i in range(20)]


def make_group(row: int, rewards: Sequence[float | None], version: int = 0) -> Group:
    name = f"{row}:r{row}"
    samples = []
    for i, reward in enumerate(rewards):
        n = 3 + i  # one prompt token, then 2 + i sampled ones
        versions = torch.full((n,), version, dtype=torch.int32)
        versions[0] = -1
        samples.append(
            Sample(
                f"{name}#{i}",
                name,
                f"{name}#{i}",
                torch.arange(n) + row,
                torch.arange(n) >= 1,
                -torch.rand(n, generator=torch.Generator().manual_seed(row)),
                versions,
                {"a": reward, "b": None},
                reward,
                stop=Stop.LENGTH if i else Stop.EOS,
            )
        )
    return Group(ROWS[row], samples, [f"text é {i}" for i in range(len(rewards))])


def buffer(**kw: float) -> ReplayBuffer:
    return ReplayBuffer(ROWS, **{"size": 8, "share": 0.5, "max_staleness": 3, "max_uses": 1, **kw})  # type: ignore[arg-type]


def names(kept: Sequence) -> list[str]:
    return [k.group.row.id for k in kept]


def test_information_is_the_variance_of_the_rewards() -> None:
    assert (
        informative(make_group(0, [1, 0, 0, 0])) == 3 / 16
        and informative(make_group(0, [1, 1, 0, 0])) == 1 / 4
    )
    assert (
        informative(make_group(0, [1, None, 0])) == 1 / 4
        and informative(make_group(0, [None])) == informative(make_group(0, [1, 1])) == 0
    )


def test_the_most_informative_come_first_and_groups_without_signal_never() -> None:
    replay = buffer()
    replay.commit(
        [],
        [
            make_group(0, [1, 0, 0, 0]),
            make_group(1, [1, 1]),
            make_group(2, [1, 0]),
            make_group(3, [None, 1]),
        ],
        0,
    )
    assert names(replay.kept) == ["r2", "r0"]
    replay.commit([], [make_group(4, [0, 1], 1), make_group(5, [0, 2], 1)], 1)
    assert names(replay.kept) == ["r5", "r4", "r2", "r0"]  # variances 1, 1/4, 1/4 (older), 3/16
    assert [names(replay.pick(n, 1)) for n in (1, 2, 5, 100)] == [
        [],
        ["r5"],
        ["r5", "r4"],
        ["r5", "r4", "r2", "r0"],
    ]
    assert replay.pick(100, 1) == replay.pick(100, 1)  # picking changes nothing


def test_a_share_of_a_tenth_of_ten_is_one() -> None:
    replay = buffer(share=0.1)
    replay.commit([], [make_group(0, [0, 1]), make_group(1, [0, 1])], 0)
    assert len(replay.pick(10, 0)) == 1 and len(replay.pick(9, 0)) == 0


def test_size_uses_and_staleness_are_bounded() -> None:
    replay = buffer(size=2, max_uses=2, share=1.0)
    replay.commit([], [make_group(i, [0, 1]) for i in range(3)], 0)
    assert names(replay.kept) == ["r0", "r1"]
    for version, want in ((1, ["r0", "r1"]), (2, ["r0", "r1"]), (3, [])):  # two uses each
        used = replay.pick(4, version)
        assert names(used) == want
        replay.commit(used, [], version)
    replay = buffer(max_uses=99)
    replay.commit([], [make_group(0, [0, 1], version=5)], 5)
    # three versions later still, four not
    assert [len(replay.pick(4, v)) for v in (5, 8, 9)] == [1, 1, 0]
    replay.commit([], [], 8)
    assert len(replay.kept) == 1
    replay.commit([], [], 9)
    assert replay.kept == []


def test_staleness_counts_from_the_oldest_token() -> None:
    group = make_group(0, [0, 1], version=7)
    group.samples[1].versions[2] = 4
    assert oldest_version(group) == 4


def test_the_state_is_exact() -> None:
    """Through JSON and copies of the tensors: every field of every sample, and the future, are the
    same.
    """
    replay = buffer(max_uses=3)
    odd = make_group(2, [0.1, 0.7, None], 2)
    odd.samples[1] = odd.samples[1].with_(
        token_rewards=torch.tensor([0.0, 0.5, 0.25, 0.0]),
        extras={"image": torch.ones(2, 2)},
        baseline=0.3,
    )
    replay.commit([], [make_group(0, [0, 1, 1]), make_group(1, [0.25, 0.5]), odd], 2)
    replay.commit(replay.pick(2, 2), [], 2)
    saved = replay.state()
    other = buffer(max_uses=3)
    other.commit([], [make_group(9, [0, 1])], 0)  # what it held before is gone
    other.load(
        State(
            {name: t.clone() for name, t in saved.tensors.items()},
            json.loads(json.dumps(saved.meta)),
        )
    )
    assert [(k.version, k.score, k.uses, k.name) for k in other.kept] == [
        (k.version, k.score, k.uses, k.name) for k in replay.kept
    ]
    for mine, its in zip(replay.kept, other.kept, strict=True):
        assert mine.group.row == its.group.row and mine.group.texts == its.group.texts
        for a, b in zip(mine.group.samples, its.group.samples, strict=True):
            for name in ("tokens", "trained", "logprobs", "versions"):
                assert (
                    torch.equal(getattr(a, name), getattr(b, name))
                    and getattr(a, name).dtype is getattr(b, name).dtype
                )
            plain = ("uid", "group", "episode", "rewards", "reward", "baseline", "stop")
            assert [getattr(a, name) for name in plain] == [
                getattr(b, name) for name in plain
            ] and isinstance(b.stop, Stop)
            assert a.extras.keys() == b.extras.keys() and (a.token_rewards is None) == (
                b.token_rewards is None
            )
    special = next(k for k in other.kept if k.group.row.id == "r2").group.samples[1]
    assert (
        special.token_rewards is not None
        and special.token_rewards.tolist() == [0.0, 0.5, 0.25, 0.0]
        and special.extras["image"].sum() == 4
    )
    again = other.state()
    assert (
        again.meta == json.loads(json.dumps(saved.meta))
        and again.tensors.keys() == saved.tensors.keys()
    )
    for version in (3, 4, 5, 6):
        first = replay.pick(4, version)
        second = other.pick(4, version)
        assert names(first) == names(second)
        replay.commit(first, [], version)
        other.commit(second, [], version)


def test_an_empty_buffer_and_a_row_that_is_gone() -> None:
    empty = buffer().state()
    assert empty.tensors == {} and empty.meta == {"groups": [], "samples": []}
    replay = buffer()
    replay.commit([], [make_group(3, [0, 1])], 0)
    saved = replay.state()
    replay.load(empty)
    assert replay.kept == []
    with pytest.raises(InputError, match="holds row r3, which the data no longer has"):
        ReplayBuffer(ROWS[:3], size=8, share=0.5, max_staleness=3, max_uses=1).load(saved)
