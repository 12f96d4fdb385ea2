"""Steps of a run are done again, bit for bit, from any step and without touching the run; a branch
goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from helpers import cli_runs
from reinforge.build.branch import make_branch, plan_branch
from reinforge.build.replay import ReplayResult, plan_replay, replay
from reinforge.build.run import train_config
from reinforge.checkpoint import store
from reinforge.config.load import load_config
from reinforge.core.errors import InputError
from reinforge.loops.view import NoView
from reinforge.watch.past import Difference, difference, read_anchors
from reinforge.watch.runs import show_run

STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Begun with 5 steps, continued to 6: a cosine falls to another end from step 5 on. A reward
    of the user's is journalled. Checkpoints 4 and 6 are kept of 2, 4, 5 and 6.
    """
    folder = tmp_path_factory.mktemp("replay")
    model = cli_runs.make_model(folder, width=16)
    config = cli_runs.write_config(
        folder,
        model,
        train={"steps": 5, "prompts_per_step": 2},
        data={"eval": {"size": 0}},
        rollout={"max_new_tokens": 6},
        run={"dir": str(folder / "run"), "checkpoint": {"every": 2, "keep": 2}},
    )
    train_config(load_config(config), view=NoView())
    train_config(load_config(config, [f"train.steps={STEPS}"]), view=NoView())
    return folder / "run"


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def done_again(run: Path, step: int) -> ReplayResult:
    return replay(plan_replay(run, step))


def test_every_step_comes_out_equal_and_the_run_stays_as_it_is(run: Path) -> None:
    before = content(run)
    assert [store.step_of(p) for p in store.steps(run)] == [6, 5]
    for step, begin in ((2, 0), (4, 0), (6, 5)):
        plan = plan_replay(run, step)
        assert (plan.begin, plan.steps, plan.notes) == (begin, step - begin, [])
        assert plan.seconds is not None
        found = replay(plan)
        assert found.equal is True
        assert found.parted is None
        assert found.compared == step - begin
        assert found.asked_again == 0, "the user's reward is read from the journal"
        assert found.anchor["weights"] == read_anchors(run)[step]["weights"]
    assert found.state is not None and found.state[0] == found.state[1], "its checkpoint is kept"
    assert content(run) == before


def test_steps_with_settings_that_changed_on_the_way(run: Path) -> None:
    """From the start through the change after step 5."""
    os.rename(store.steps(run)[1], run / "aside")
    try:
        plan = plan_replay(run, 6)
        assert plan.begin == 0
        until = [(stretch.until, stretch.config.train.steps) for stretch in plan.stretches]
        assert until == [(5, 5), (6, 6)]
        assert replay(plan).equal is True
    finally:
        os.rename(run / "aside", run / "checkpoints" / "step-00000005")


def test_a_step_that_comes_out_differently_is_named(run: Path, tmp_path: Path) -> None:
    plan = plan_replay(run, 2)
    other = json.loads(json.dumps(plan.anchors[2]))
    group = list(other["samples"])[1]
    tokens, logprobs, rewards = other["samples"][group][3].split()
    other["samples"][group][3] = f"{tokens} {logprobs} 00000000"
    plan.anchors[2] = other
    found = replay(plan)
    assert found.equal is False
    assert found.parted == (2, Difference("rewards", group, 3))
    other["samples"][group][3] = f"{tokens} {logprobs} {rewards}"
    assert difference(other, found.anchor) is None
    other["weights"] = "0"
    assert difference(other, found.anchor) == Difference("weights")


def test_what_was_not_in_the_journal_is_told(run: Path) -> None:
    past = run / "journal-past.jsonl"
    kept = past.read_bytes()
    past.unlink()
    try:
        found = done_again(run, 2)
        assert found.equal is True
        assert found.asked_again == 4, "two groups in each of two steps"
    finally:
        past.write_bytes(kept)


def test_what_cannot_be_replayed_is_said(run: Path) -> None:
    with pytest.raises(InputError, match="there is no step 9: the run has done 6"):
        plan_replay(run, 9)
    anchors = run / "anchors.jsonl"
    kept = anchors.read_text()
    try:
        anchors.write_text(kept.replace('"by_caller": []', '"by_caller": ["rewards"]'))
        with pytest.raises(InputError, match=r"a Python program changed step 1 \(rewards\)"):
            plan_replay(run, 3)
        anchors.unlink()
        assert "no anchors" in plan_replay(run, 3).notes[0]
        assert done_again(run, 1).equal is None
    finally:
        anchors.write_text(kept)


@pytest.mark.parametrize("step", [3, 5])
def test_a_branch_without_changes_ends_as_the_run_did(run: Path, tmp_path: Path, step: int) -> None:
    """Made by doing the steps again, and from a checkpoint."""
    plan = plan_branch(run, step, tmp_path / "new", ["train.steps=6"])
    assert (plan.replay is None) == (step == 5)
    make_branch(plan)
    train_config(plan.config, view=NoView())
    assert not list(tmp_path.glob(".*"))
    ours = cli_runs.evidence(tmp_path / "new")
    theirs = cli_runs.evidence(run)
    if step == 5:
        assert ours == theirs
    else:  # it is a run of 6 steps from step 4 on, so the cosine falls later
        assert ours.metrics[:3] == theirs.metrics[:3]
        assert ours.metrics[4]["train/learning_rate"] > theirs.metrics[4]["train/learning_rate"]


def test_a_branch_with_other_settings(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    plan = plan_branch(run, 2, new, ["train.learning_rate=0.01", "rewards.1.weight=0.25"])
    assert plan.changes == {"train.learning_rate": [3e-3, 1e-2], "rewards.1.weight": [0.5, 0.25]}
    make_branch(plan)
    told = json.loads((new / "lineage.json").read_text())
    assert [(p["dir"], p["step"]) for p in told["parents"]] == [(str(run), 2)]
    assert told["changes"] == plan.changes
    assert show_run(new)["branch_of"] == [f"{run} step 2"]
    train_config(load_config(new / "config.json"), view=NoView())
    anchors = (read_anchors(run), read_anchors(new))
    assert [n for n in range(1, 6) if anchors[0][n] == anchors[1][n]] == [1, 2]
    # ... and its own past can be replayed: before and after the branch
    for step in (1, 4):
        assert done_again(new, step).equal is True


def test_what_the_state_belongs_to_stays(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="belong to its adapter.kind, adapter.rank"):
        plan_branch(run, 2, tmp_path / "new", ["adapter.rank=4"])
    with pytest.raises(InputError, match="is not empty"):
        plan_branch(run, 2, run)
