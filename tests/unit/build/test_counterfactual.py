"""A step with other settings on the same answers; runs that train on rollouts that were kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import cli_runs
from reinforge.build.counterfactual import Counterfactual, counterfactual
from reinforge.build.replay import plan_replay
from reinforge.build.run import train_config
from reinforge.cli.counterfactual import print_counterfactual
from reinforge.config.load import load_config
from reinforge.core.errors import InputError
from reinforge.loops.view import NoView
from reinforge.watch.past import read_anchors


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counterfactual")
    model = cli_runs.make_model(folder, width=16)
    return cli_runs.write_config(
        folder,
        model,
        train={"steps": 4, "prompts_per_step": 3},
        data={"eval": {"size": 0}},
        rollout={"max_new_tokens": 6},
        run={
            "dir": str(folder / "run"),
            "checkpoint": {"every": 2, "keep": 4},
            "keep_rollouts": True,
        },
    )


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    train_config(load_config(config), view=NoView())
    return config.parent / "run"


def step_with(run: Path, step: int, *changes: str) -> Counterfactual:
    return counterfactual(plan_replay(run, step), changes)


def test_a_setting_that_means_the_same_changes_nothing(run: Path) -> None:
    """grpo's own clip is 0.2, and the step is on-policy: ratios are 1."""
    found = step_with(run, 4, "algorithm.clip.high=0.4")
    assert found.equal is True
    assert found.changes == {"algorithm.clip.high": [None, 0.4]}
    assert found.cosine == pytest.approx(1.0, abs=1e-9)
    assert found.norms[0] == found.norms[1] > 0
    assert found.tokens == []
    assert all(s.advantages[0] == s.advantages[1] for s in found.samples)


def test_rewards_that_are_turned_round_turn_the_advantages_round(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step from a checkpoint's middle: two steps are done again first."""
    found = step_with(run, 2, "rewards.0.weight=-1", "rewards.1.weight=-0.5")
    assert found.equal is True
    scored = [s for s in found.samples if s.advantages[0]]
    assert scored
    for sample in found.samples:
        old, new = sample.rewards
        assert old is not None and new == -old
        assert sample.advantages[1] == pytest.approx(-(sample.advantages[0] or 0.0), abs=1e-6)
    ours, theirs = (metrics["train/grad_norm"] for metrics in found.metrics)
    assert theirs == pytest.approx(ours, rel=1e-4), "the gradient is turned round"
    assert found.cosine is not None and found.cosine < 0.5, "the moments of step 1 stay as they are"
    moves = [abs(m.changed - m.original) for m in found.tokens]
    assert moves == sorted(moves, reverse=True) and moves[0] > 0
    print_counterfactual(found)
    page = capsys.readouterr().out
    assert "bit for bit" in page
    assert "cosine between the updates" in page
    assert f"{found.metrics[0]['train/grad_norm']:.4g}" in page


def test_a_longer_update_in_the_same_direction(run: Path) -> None:
    found = step_with(run, 3, "train.learning_rate=0.006")
    assert found.cosine == pytest.approx(1.0, abs=1e-6)
    assert found.norms[1] == pytest.approx(2 * found.norms[0], rel=1e-4)


def test_what_cannot_be_asked(run: Path) -> None:
    with pytest.raises(InputError, match="nothing is changed"):
        step_with(run, 2, "train.learning_rate=0.003")
    with pytest.raises(InputError, match="belong to its data"):
        step_with(run, 2, "data.options.size=50")


def test_a_run_on_kept_rollouts_is_the_run_that_kept_them(config: Path, run: Path) -> None:
    """Bit for bit where nothing else changes, with nothing generated."""
    again = run.parent / "again"
    settings = [f"run.dir={again}", f"rollout.kept={run}", "run.keep_rollouts=false"]
    train_config(load_config(config, settings), view=NoView())
    ours, theirs = read_anchors(again), read_anchors(run)
    for step in range(1, 5):
        for name in ("samples", "update", "weights", "cursor"):
            assert ours[step][name] == theirs[step][name]
    assert not (again / "journal-past.jsonl").exists(), "no reward was asked"


def test_kept_rollouts_with_another_reward(config: Path, run: Path) -> None:
    again = run.parent / "rescored"
    settings = [
        f"run.dir={again}",
        f"rollout.kept={run}",
        "train.steps=2",
        'rewards=[{"name": "exact_number"}]',
    ]
    train_config(load_config(config, settings), view=NoView())
    lines = [json.loads(line) for line in (again / "samples.jsonl").read_text().splitlines()]
    before = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    first = [line for line in lines if line["step"] == 1]
    assert [line["completion"] for line in first] == [
        line["completion"] for line in before if line["step"] == 1
    ]
    for line, old in zip(first, before, strict=False):
        assert line["components"] == {"exact_number": old["components"]["exact_number"]}
    settings[2] = "train.steps=5"
    settings[0] = f"run.dir={run.parent / 'longer'}"
    with pytest.raises(InputError, match="the rollouts of step 5 are not kept"):
        train_config(load_config(config, settings), view=NoView())
