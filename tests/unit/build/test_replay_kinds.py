"""A step of every kind of run comes out equal when it is done again; benchmarks/replay.py does a
hundred.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.cli_runs import make_model
from helpers.replayed_runs import KINDS, replayed_config
from reinforge.build.replay import plan_replay, replay
from reinforge.build.run import train_config
from reinforge.loops.view import NoView
from reinforge.watch.past import beginnings, read_anchors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), width=16)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"grpo"}))
def test_a_step_of_each_kind(kind: str, model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = replayed_config(kind, model, run, 3, train={"prompts_per_step": 2})
    train_config(config, view=NoView())
    [begun] = beginnings(run)
    assert begun["begins"]["device"] == "cpu"
    anchors = read_anchors(run)
    assert len({anchors[n]["update"] for n in (1, 2, 3)}) == 3, "every step learns something"
    plan = plan_replay(run, 3)
    assert plan.begin == 0
    found = replay(plan)
    assert found.parted is None
    assert found.compared == 3
    assert found.state is not None, "the run has saved its last step"
    assert found.equal is True
