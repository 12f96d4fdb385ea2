"""Whole tiny runs with each way of choosing prompts: they die, resume, and come out as the run that
never died.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_runs import DATA, digest, launch, lines, odd, tensors
from helpers.toys import SilentView
from reinforge.backends.local import LocalBackend
from reinforge.build.algorithm import algorithm_section
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.checkpoint import store
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.plan.checks import run_checks
from reinforge.rewards.builtin import FUNCTIONS

ROWS = [{**row, "level": i % 8} for i, row in enumerate(DATA)]
REPLAY = {"size": 6, "share": 0.5, "max_staleness": 3, "max_uses": 2}
TEACHABLE = {
    "prefer": "teachable",
    "min_attempts": 4,
    "retire_above": 0.6,
    "hopeless_below": 0.3,
    "recheck": 0.2,
}


class Crash(Exception):
    pass


def go(cfg: Config) -> None:
    """The built-in rewards are repeatable and run in place, so what is first does not depend on the
    clock.
    """
    train_config(cfg, CallerObjects(data=ROWS), SilentView())


FEATURES: dict[str, dict[str, Any]] = {
    "pass_rates": {"sampling": {"pass_rates": True}},
    "teachable": {"sampling": TEACHABLE},
    "declared": {"sampling": {"curriculum": {"column": "level", "start": 0.2, "steps": 4}}},
    "learned": {"sampling": {"curriculum": {"start": 0.2, "steps": 4}, "min_attempts": 4}},
    "over_provision": {
        "sampling": {"over_provision": 1.5},
        "rollout": {"max_new_tokens": 8, "kv_gib": 0.01, "stop": list("aeiou0123456789")},
    },
    "replay": {"sampling": {"replay": REPLAY}},
    "all": {
        "sampling": {
            **TEACHABLE,
            "curriculum": {"start": 0.2, "steps": 4},
            "over_provision": 1.5,
            "replay": REPLAY,
        }
    },
}
SEEN = {
    "pass_rates": "sampling/known",
    "teachable": "sampling/skipped",
    "declared": "sampling/skipped",
    "learned": "sampling/quantile",
    "over_provision": "groups/cancelled",
    "replay": "replay/groups",
    "all": "replay/groups",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_run_that_died_ends_as_one_that_did_not(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, feature: str
) -> None:
    """Dies in step 4 of 6 with its last checkpoint at 2: the digest (which covers the parts) and
    every metric are those of the whole run.
    """
    monkeypatch.setitem(FUNCTIONS, "odd", odd)
    many = (
        ("algorithm.dynamic_sampling=true", "algorithm.minibatches=2") if feature == "all" else ()
    )
    settings = ("train.steps=6", "run.checkpoint.every=2", *many)
    sections = {"rewards": [{"name": "odd"}], **FEATURES[feature]}
    whole, cut = (make(name, "grpo", *settings, **sections) for name in ("whole", "cut"))
    go(whole)
    updates = 2 if many else 1
    original = LocalBackend.step

    def dies(self: LocalBackend) -> Any:
        if self.steps == 3 * updates:
            raise Crash
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "step", dies)
        with pytest.raises(Crash):
            go(cut)
    assert store.step_of(store.steps(Path(cut.run.dir))[0]) == 2
    go(cut)
    assert digest(cut) == digest(whole)

    def drop(m: dict[str, Any]) -> dict[str, Any]:
        clock = ("time", "share", "tokens_per_second", "memory", "efficiency")
        return {k: v for k, v in m.items() if not k.startswith(clock)}

    assert [drop(m) for m in lines(cut)] == [drop(m) for m in lines(whole)]
    values = [m.get(SEEN[feature], 0.0) for m in lines(whole)]
    assert any(values), f"{feature} did nothing"
    for m in lines(whole):
        assert (
            m["tokens/sampled"] + m["tokens/replayed"] == m["tokens/trained"] + m["tokens/dropped"]
        )


def test_replayed_groups_have_a_ratio_to_the_policy_that_sampled_them(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step every ratio is 1; from then on half of the groups are old and theirs is
    not. With learning rate 0 all stay 1.
    """
    monkeypatch.setitem(FUNCTIONS, "odd", odd)
    found = {}
    for rate in (0.0, 0.01):
        cfg = make(
            f"rate-{rate}",
            "grpo",
            "train.steps=3",
            f"train.learning_rate={rate}",
            rewards=[{"name": "odd"}],
            sampling={"replay": REPLAY},
        )
        assert algorithm_section(cfg).old == "engine"
        go(cfg)
        found[rate] = lines(cfg)
        assert [m["replay/groups"] for m in found[rate]] == [0, 2, 2] and [
            m["groups/trained"] for m in found[rate]
        ] == [4, 4, 4]
        assert [m.get("replay/staleness") for m in found[rate]] == [
            None,
            1.0,
            pytest.approx(1.5, abs=0.5),
        ]
    assert all(m["policy/ratio/max"] == pytest.approx(1.0, abs=1e-4) for m in found[0.0])
    assert (
        found[0.01][0]["policy/ratio/max"] == pytest.approx(1.0, abs=1e-4)
        and found[0.01][1]["policy/ratio/max"] > 1.01
    )
    assert any(name.startswith("part/replay/") for name in tensors(cfg))


def test_a_redone_step_takes_the_same_groups_when_others_are_first(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge that takes its time, and another time when asked again: the step that was cut is done
    again with the groups it had.
    """
    calls: list[int] = []

    async def slow(completions: list[str]) -> list[float]:
        calls.append(len(calls))
        turn = len(calls) - 1
        # other groups are last in the second run, which asks again for the unscored
        for _ in range(2000 if turn in (0, 2, 8, 9) else 1):
            await asyncio.sleep(0)
        return odd(completions)

    cfg = make(
        "run", "grpo", "train.steps=1", "run.checkpoint.every=1", sampling={"over_provision": 1.5}
    )
    before: list[float] = []

    def dies(self: LocalBackend) -> Any:
        before.append(float(self.optimizer.gradient_norm()))
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "step", dies)
        with pytest.raises(Crash):
            launch(cfg, slow)
    choice = [line for line in lines(cfg, "journal.jsonl") if "submitted" in line]
    assert len(choice) == 1 and len(choice[0]["submitted"]) == 6 and len(choice[0]["first"]) == 4
    assert choice[0]["submitted"][0] not in choice[0]["first"]
    launch(cfg, slow)
    assert lines(cfg)[0]["train/grad_norm"] == before[0] and lines(cfg)[0]["groups/cancelled"] == 2


# what is refused


def raw(**sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "algorithm": {"name": "grpo"},
        "data": {"source": "x.jsonl"},
        "rewards": [{"name": "exact_number"}],
        "train": {"steps": 1, "prompts_per_step": 8},
        "run": {"dir": "r"},
    }
    return {**base, **sections}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"sampling": {"retire_above": 0.2, "hopeless_below": 0.2}}, "no row is teachable"),
        (
            {"sampling": {"curriculum": {"start": 0.5, "end": 0.4, "steps": 3}}},
            "start 0.5 is above end 0.4",
        ),
        ({"sampling": {"over_provision": 0.9}}, "over_provision"),
        ({"sampling": {"replay": {"share": 0.1}}}, "less than one group"),
        (
            {"sampling": {"replay": {}}, "algorithm": {"name": "grpo", "surrogate": "reinforce"}},
            "reinforce has no ratio",
        ),
        (
            {"sampling": {"replay": {}}, "algorithm": {"name": "grpo", "old": "recompute"}},
            "recompute leaves behaviour out",
        ),
        (
            {"sampling": {"prefer": "teachable"}, "algorithm": {"name": "sft"}},
            "sft samples nothing",
        ),
        ({"sampling": {"preferr": "teachable"}}, "prefer"),
    ],
    ids=str,
)
def test_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        config_from_dict(raw(**sections))


def test_replay_with_a_correction_leaves_old_alone() -> None:
    cfg = config_from_dict(
        raw(
            sampling={"replay": {}},
            algorithm={"name": "grpo", "surrogate": "reinforce", "correction": {"name": "tis"}},
        )
    )
    assert algorithm_section(cfg) is cfg.algorithm
    assert (
        not config_from_dict(raw()).sampling.tracks
        and config_from_dict(raw(sampling={"curriculum": {"steps": 2}})).sampling.tracks
    )
    assert not config_from_dict(
        raw(sampling={"curriculum": {"column": "x", "steps": 2}})
    ).sampling.tracks


def test_a_curriculum_column_that_is_not_there(make: Callable[..., Config], tmp_path: Path) -> None:
    """`train` refuses it, and `plan` says so before."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"source": str(tmp_path / "rows.jsonl")}
    cfg = make(
        sampling={"curriculum": {"column": "hardness", "steps": 2}},
        data=data,
        rewards=[{"name": "exact_number"}],
    )
    with pytest.raises(InputError, match=r"sampling\.curriculum\.column.*hardness is missing"):
        train_config(cfg, None, SilentView())
    report = run_checks(cfg)
    assert len(report.errors) == 1 and "hardness is missing" in report.errors[0]
    assert run_checks(
        make(
            sampling={"curriculum": {"column": "level", "steps": 2}},
            data=data,
            rewards=[{"name": "exact_number"}],
        )
    ).ok


def test_epochs_count_trained_prompts(make: Callable[..., Config]) -> None:
    """`train.epochs: 1` is a number of steps.

    Where prompts are replaced the run does as many, and walks on into the next pass.
    """

    def half(prompts: list[str], completions: list[str]) -> list[float]:
        """Every other prompt is solved by everybody."""
        return [1.0] * len(completions) if int(prompts[0].split("+")[0]) % 2 else odd(completions)

    walked = {}
    for dynamic in ("false", "true"):
        train = {"epochs": 1, "prompts_per_step": 4, "learning_rate": 1e-3}
        cfg = make(
            dynamic,
            "grpo",
            f"algorithm.dynamic_sampling={dynamic}",
            "algorithm.max_refills=3",
            train=train,
        )
        assert launch(cfg, half).steps == len(DATA) / 4
        walked[dynamic] = store.load(store.steps(Path(cfg.run.dir))[0])[1]["cursor"]["taken"]
    assert walked["false"] == len(DATA) < walked["true"]
