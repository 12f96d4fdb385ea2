"""Faults: typed, counted in the metrics, told in events.jsonl with a reason, shown in the report;
and the stamp on a run that was not contained.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.dialogues import FORGETFUL, Echo, Misbehaving, Saying, make_episodes, make_renderer
from helpers.tiny_runs import lines
from helpers.toys import SilentView, run
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.checkpoint import store
from reinforge.config.schema import Config
from reinforge.core.env import RolloutContext
from reinforge.core.faults import EPISODE, Fault, fault_events, fault_metrics
from reinforge.core.sample import Group, Row
from reinforge.envs.shipped import PythonTool
from reinforge.envs.toolbox import ToolEnv
from reinforge.envs.tools import tool
from reinforge.offline.card import card
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.outcome import RewardOutcome
from reinforge.rollout.dialogue.episode import EpisodeLimits
from reinforge.rollout.journal import Journal
from reinforge.rollout.scoring import FAULTS, RewardScorer
from reinforge.sandbox import detect
from reinforge.watch.report import write_report
from reinforge.watch.runs import show_run, uncontained
from reinforge.watch.troubles import banner, fault_rows, fault_table

ROW = Row("r0", "?", {})


def episode_faults(
    make: Callable[[Row], Any],
    lines: list[str] | None = None,
    template: str | None = None,
    limits: EpisodeLimits | None = None,
) -> Group:
    renderer = make_renderer(template) if template else make_renderer()
    group: Group = run(
        make_episodes(Saying(renderer, lines or ["hm"]), renderer, make, limits=limits)(
            ROW, RolloutContext("g")
        )
    )
    return group


# ---- every kind, where it happens ----


def test_episodes_that_fail_are_faults_by_kind_with_a_reason() -> None:
    late = episode_faults(
        lambda row: Misbehaving("sleeps"), limits=EpisodeLimits(4000, 8, turn_seconds=0.2)
    )
    assert (
        dict(late.faults) == {Fault.EPISODE_TIMEOUT: 1}
        and "took more than 0.2 s" in late.why[Fault.EPISODE_TIMEOUT]
    )
    broken = episode_faults(lambda row: Misbehaving("raises"))
    assert (
        dict(broken.faults) == {"episode_error": 1}
        and "ZeroDivisionError: oh" in broken.why["episode_error"]
    )
    assert dict(episode_faults(lambda row: Echo(), limits=EpisodeLimits(3)).faults) == {
        "episode_full": 1
    }
    assert dict(episode_faults(lambda row: Echo()).faults) == {}
    assert set(EPISODE.values()) <= set(Fault)


def test_a_template_that_rewrites_history_is_counted_by_rows() -> None:
    forked = episode_faults(
        lambda row: Echo(3), ["<think>a</think>b", "<think>c</think>d", "e"], FORGETFUL
    )
    assert (
        dict(forked.faults) == {Fault.TEMPLATE_FORKED: len(forked.samples) - 1}
        and len(forked.samples) > 1
    )


def test_a_tool_whose_sandbox_fails_is_a_fault_of_the_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detect, "missing", lambda mode: "user namespaces are off")
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>'
    group = episode_faults(lambda row: ToolEnv([tool(PythonTool(), name="python")]), [call])
    assert dict(group.faults) == {Fault.SANDBOX_FAILURE: 1} and group.samples[0].reward is None
    assert "the sandbox did not run the program" in group.why[Fault.SANDBOX_FAILURE]


def test_rewards_tell_what_went_wrong_and_a_redone_step_counts_the_same(tmp_path: Path) -> None:
    def asked(**counts: int) -> Any:
        async def function(completions: list[str]) -> RewardOutcome:
            return RewardOutcome([None] * len(completions), **counts)

        return FunctionReward("odd", function)

    def raises(completions: list[str]) -> list[float]:
        raise KeyError("gone")

    assert list(FAULTS) == ["timeouts", "crashes", "sandbox", "unsafe"]
    for attempt in range(2):
        scorer = RewardScorer(
            [asked(timeouts=1, crashes=2, sandbox=3, unsafe=4)],
            journal=Journal(tmp_path / "journal.jsonl"),
        )
        run(scorer.score([ROW] * 4, "g", [[1]] * 4, ["a"] * 4))
        faults, why = scorer.faults("g")
        assert faults == {
            "reward_timeout": 1,
            "reward_crash": 2,
            "sandbox_failure": 3,
            "uncontained": 4,
        }
        assert scorer.faults("g") == ({}, {}), "told once"
        assert why.get("reward_crash") == ("reward odd, row r0" if attempt == 0 else None), (
            "nobody was asked again"
        )
    tolerant = RewardScorer([FunctionReward("bad", raises)], on_error="unscored")
    run(tolerant.score([ROW] * 2, "g", [[1], [2]], ["a", "b"]))
    faults, why = tolerant.faults("g")
    assert faults == {Fault.REWARD_ERROR: 2} and "KeyError: 'gone'" in why[Fault.REWARD_ERROR]
    joined = RewardOutcome.joined(
        [RewardOutcome([1.0], timeouts=1, sandbox=2), RewardOutcome([None], crashes=3, unsafe=4)]
    )
    assert joined == RewardOutcome([1.0, None], 1, 3, 2, 4)


# ---- counted, told, shown ----


def test_metrics_and_events() -> None:
    groups = [
        Group(ROW, [], faults={"reward_crash": 2}, why={"reward_crash": "first"}),
        Group(
            ROW, [], faults={"reward_crash": 1, "episode_error": 1}, why={"reward_crash": "second"}
        ),
    ]
    metrics = fault_metrics(groups)
    assert (
        metrics == {"faults/episode_error": 1.0, "faults/reward_crash": 3.0}
        and fault_metrics([Group(ROW, [])]) == {}
    )
    events = fault_events({**metrics, "reward/mean": 1.0}, 7, groups)
    assert [(e.fault, e.step, e.count, e.why, e.during) for e in events] == [
        ("episode_error", 7, 1, "", "training"),
        ("reward_crash", 7, 3, "first", "training"),
    ]
    [event] = fault_events(fault_metrics(groups[:1], "eval/"), 0, prefix="eval/")
    assert (event.during, event.count) == ("evaluation", 2)


def test_the_report_has_a_line_for_each_kind() -> None:
    seen = [
        {
            "kind": "fault",
            "fault": "reward_crash",
            "during": "training",
            "step": s,
            "count": s,
            "why": w,
        }
        for s, w in ((2, ""), (5, "<b>x</b>"), (9, "later"))
    ]
    rows = fault_rows(
        [
            *seen,
            {"kind": "checkpoint"},
            {
                "kind": "fault",
                "fault": "episode_error",
                "during": "evaluation",
                "step": 0,
                "count": 99,
                "why": "y",
            },
        ]
    )
    assert [
        (r["fault"], r["count"], r["steps"], r["first"], r["last"], r["why"]) for r in rows
    ] == [("episode_error", 99, 1, 0, 0, "y"), ("reward_crash", 16, 3, 2, 9, "<b>x</b>")]
    page = fault_table(seen)
    assert "&lt;b&gt;x&lt;/b&gt;" in page and "<b>x" not in page and ">16<" in page
    assert (
        fault_table([{"kind": "checkpoint"}]) == ""
        and banner([]) == ""
        and "&lt;i&gt; ran what" in banner(["<i>"])
    )


class Flaky:
    """Fails in the rows whose number is odd."""

    pure = True

    async def reset(self, row: Row, seed: int) -> Any:
        if int(row.columns["n"]) % 2:
            raise ConnectionError("the game server is down")
        return await Echo(1, [1.0]).reset(row, seed)

    async def step(self, action: Any) -> Any:
        return await Echo(1, [1.0]).step(action)

    async def close(self) -> None: ...


@pytest.mark.timeout(120)
def test_a_run_counts_its_faults_tells_them_and_shows_them(
    make: Callable[..., Config], tmp_path: Path
) -> None:
    cfg = make(
        "flaky",
        "grpo",
        "algorithm.group_size=2",
        "train.steps=1",
        "train.prompts_per_step=4",
        "data.source=python",
        f"env.name={Path(__file__)}:Flaky",
        rewards=[],
    )
    train_config(
        cfg, CallerObjects(data=[{"prompt": f"p{i}", "n": i} for i in range(4)]), SilentView()
    )
    [line] = [m for m in lines(cfg) if "reward/mean" in m]
    assert (
        line["faults/episode_error"] == 4.0
        and line["env/failed"] == 0.5
        and "sandbox/uncontained" not in line
    )
    [event] = [e for e in lines(cfg, "events.jsonl") if e["kind"] == "fault"]
    assert (event["fault"], event["count"], event["step"], event["during"]) == (
        "episode_error",
        4,
        1,
        "training",
    )
    assert "ConnectionError: the game server is down" in event["why"]
    page = write_report(Path(cfg.run.dir)).read_text()
    assert "<table id=faults>" in page and page.count("the game server is down") == 1, (
        "in the table, and not among the events again"
    )
    assert uncontained(Path(cfg.run.dir)) == [] and "Uncontained" not in page
    assert 'data-kind="unscored"' in page, "half of the answers got no reward"


# ---- uncontained ----


@pytest.mark.timeout(120)
def test_a_run_that_was_not_contained_says_so_everywhere_and_for_ever(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "missing", lambda mode: "user namespaces are off")
    rows = [{"prompt": f"p{i}", "tests": [{"input": "", "output": "1"}]} for i in range(4)]

    def config(steps: int, **options: Any) -> Config:
        return make(
            "bare",
            "grpo",
            "algorithm.group_size=2",
            f"train.steps={steps}",
            "train.prompts_per_step=2",
            "data.source=python",
            "rollout.max_new_tokens=4",
            "run.checkpoint.every=1",
            rewards=[{"name": "code", "options": {"timeout": 5.0, **options}}],
        )

    cfg = config(1, allow_unsafe=True)
    train_config(cfg, CallerObjects(data=rows), SilentView())
    folder = Path(cfg.run.dir)
    [line] = [m for m in lines(cfg) if "reward/mean" in m]
    assert line["sandbox/uncontained"] == 1.0 and line["faults/uncontained"] == 4.0
    assert [e["rewards"] for e in lines(cfg, "events.jsonl") if e["kind"] == "uncontained"] == [
        ["code"]
    ]
    assert json.loads((folder / "summary.json").read_text())["uncontained"] == [
        "code"
    ] and show_run(folder)["uncontained"] == ["code"]
    assert "<b>Uncontained.</b> code ran what the model wrote" in write_report(folder).read_text()
    assert store.load(store.steps(folder)[0])[1]["uncontained"] == ["code"]
    assert "**uncontained**: code ran the model's programs without a sandbox" in card(
        folder, cfg, "model", "step-1"
    )

    # the run goes on where programs are contained: what was done before is still in its weights
    monkeypatch.undo()
    train_config(config(2, allow_unsafe=True), CallerObjects(data=rows), SilentView())
    later = [m for m in lines(cfg) if "reward/mean" in m]
    assert [m["sandbox/uncontained"] for m in later] == [1.0, 1.0]
    assert store.load(store.steps(folder)[0])[1]["uncontained"] == ["code"] and uncontained(
        folder
    ) == ["code"]
