"""`reinforge runs why`: the numbers that training used, from rewards to advantages to loss, and
words about what stands out. A wrong advantage is found.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.tiny_runs import DATA
from helpers.toy_rewards import digits, same, short
from helpers.toys import SilentView
from reinforge.algorithms.parts import advantages
from reinforge.algorithms.parts.statistics import GroupMoments, ScoredEpisodes
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.cli.main import app
from reinforge.config.load import config_from_dict
from reinforge.core.errors import InputError
from reinforge.models.tiny import make_tiny_model
from reinforge.watch.why import (
    explain_group,
    find_group,
    find_sample,
    findings,
    overview,
    read_step,
    verdict,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("why") / "model"
    return str(
        make_tiny_model(
            folder, width=32, layers=1, heads=4, kv_heads=4, context=128, spread=0.3, chat=True
        )
    )


def trained(
    model: str,
    folder: Path,
    name: str,
    *,
    rewards: tuple[Any, ...] = (digits, short),
    algorithm: dict[str, Any] | None = None,
    log: dict[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """A run of two steps that records both."""
    train_config(
        config(model, folder, name, rewards, algorithm=algorithm, log=log, **sections),
        CallerObjects(data=DATA, rewards=list(rewards)),
        SilentView(),
    )
    return folder


def config(
    model: str,
    folder: Path,
    name: str,
    rewards: tuple[Any, ...] = (digits, short),
    *,
    algorithm: dict[str, Any] | None = None,
    log: dict[str, Any] | None = None,
    steps: int = 2,
    **sections: Any,
) -> Any:
    weights = (1.0, 0.5)
    return config_from_dict(
        {
            "model": {"path": model, "device": "cpu"},
            "algorithm": {"name": name, "group_size": 4, **(algorithm or {})},
            "data": {"source": "python"},
            "rewards": [
                {"name": reward.__name__, "weight": weight}
                for reward, weight in zip(rewards, weights, strict=False)
            ],
            "rollout": {"max_new_tokens": 6},
            "train": {"steps": steps, "prompts_per_step": 4, "learning_rate": 1e-2},
            "run": {
                "dir": str(folder),
                "checkpoint": {"every": 0},
                "log": {"samples_every": 1, **(log or {})},
            },
            **sections,
        },
        where="test",
    )


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["runs", "why", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.timeout(300)
def test_grpo_from_rewards_to_loss(model: str, tmp_path: Path) -> None:
    """The shown numbers follow from each other, by hand."""
    run = trained(model, tmp_path / "run", "grpo", algorithm={"minibatches": 2})
    record = read_step(run, 2)
    assert len(record["groups"]) == record["groups_of_step"] == 4
    metrics = {line["step"]: line for line in lines(run, "metrics.jsonl") if "train/loss" in line}
    loss = 0.0
    for place, group in enumerate(record["groups"]):
        told = explain_group(record, group)
        rewards = [s["reward"] for s in group["samples"]]
        mean = sum(rewards) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
        assert told["mean"] == pytest.approx(mean) and told["std"] == pytest.approx(std)
        assert told["checked"] and not told["wrong"]
        totals = record["minibatches"][group["samples"][0]["minibatch"]]
        for sample in group["samples"]:
            parts = sample["components"]
            assert sample["reward"] == pytest.approx(parts["digits"] + 0.5 * parts["short"])
            want = (sample["reward"] - mean) / (std + 1e-4) if std else 0.0
            assert sample["advantage"] == pytest.approx(want, rel=1e-4, abs=1e-6)
            assert sample["versions"] == [2, 2], "two optimizer steps were made before"
            if "loss" in sample:
                assert sample["denominator"] == pytest.approx(
                    sample["tokens"] * totals["sequences"]
                )
                loss += sample["loss"]
                low, high = sample["ratio"]["min"], sample["ratio"]["max"]
                assert low <= sample["ratio"]["mean"] <= high
                assert sample["behaviour"] < 0 and sample["logprob"] < 0
        text = shown(str(run), "--step", "2", "--group", str(place))
        assert "A = (r - mean_G) / (std_G + eps)" in text and "follow from these rewards" in text
        assert "group_relative (reinforge/algorithms/parts/advantages.py)" in text
        assert "combined (reinforge/rewards/combine.py)" in text
        assert "PolicyLoss (reinforge/algorithms/losses/policy.py)" in text
    assert loss / 2 == pytest.approx(metrics[2]["train/loss"], rel=1e-4, abs=1e-6)
    moved = [s for g in record["groups"] for s in g["samples"] if s.get("minibatch") == 1]
    assert any(s["ratio"]["max"] != 1 for s in moved if "ratio" in s), "after the first update"
    sample = lines(run, "samples.jsonl")[-1]
    own = next(s for g in record["groups"] for s in g["samples"] if s["uid"] == sample["uid"])
    assert sample["training"].items() <= own.items() and "advantage" in sample["training"]


@pytest.mark.timeout(300)
def test_a_wrong_advantage_is_found(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sample gets 1 too much: the words say which, and what the formula gives."""
    right = advantages.group_relative

    def wrong(rollouts: Any, options: Any) -> Any:
        values = right(rollouts, options)
        return values + (rollouts.sequence == 2)

    monkeypatch.setitem(advantages.ADVANTAGES, "group_relative", wrong)
    run = trained(model, tmp_path / "run", "grpo")
    text = shown(str(run), "--step", "1")
    assert text.count("recorded advantage differs from grpo's formula on these rewards") == 1
    assert "in 1 of 3 groups that were checked" in text or "in 1 of 4 groups" in text
    assert "wrong (test_why.py)" in text
    assert "ScoredEpisodes.moments (reinforge/algorithms/parts/statistics.py)" in text
    assert "Algorithm.advantages (reinforge/algorithms/algorithm.py)" in text
    told = json.loads(shown(str(run), "--step", "1", "--json"))
    first = told["groups"][0]
    assert first["wrong"] and [g["wrong"] for g in told["groups"]].count(True) == 1
    group = json.loads(shown(str(run), "--step", "1", "--group", first["name"], "--json"))
    (found,) = group["wrong"]
    assert found["recorded"] - found["expected"] == pytest.approx(1, abs=1e-4)
    assert "do NOT follow" in shown(str(run), "--step", "1", "--group", first["name"])


@pytest.mark.timeout(300)
def test_a_wrong_divisor_is_found(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advantage divides by the population's standard deviation where the sample's is asked
    for."""
    right = advantages.group_relative

    def wrong(rollouts: Any, options: Any) -> Any:
        return right(rollouts, replace(options, std="population"))

    monkeypatch.setitem(advantages.ADVANTAGES, "group_relative", wrong)
    run = trained(model, tmp_path / "run", "grpo")
    record = read_step(run, 1)
    teaching = [g for g in record["groups"] if not all(s["no_signal"] for s in g["samples"])]
    assert teaching
    for group in teaching:
        said = findings(record, group)
        assert "differs from grpo's formula" in said[0]
        if len({s["advantage"] for s in group["samples"]}) > 1:
            fits = "the recorded advantages are those of group_relative with scale group, std"
            assert f"{fits} population" in said


@pytest.mark.timeout(300)
def test_what_was_taken_for_the_mean_is_found(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long answers count more in the baseline than they should: the words say by how much."""
    right = ScoredEpisodes.moments

    def wrong(self: ScoredEpisodes, std: str) -> GroupMoments:
        moments = right(self, std)
        weighted = self.sums(self.value * self.length) / self.sums(self.length).clamp(min=1)
        return replace(moments, mean=weighted)

    monkeypatch.setattr(ScoredEpisodes, "moments", wrong)
    run = trained(model, tmp_path / "run", "grpo", rewards=(short,))
    record = read_step(run)
    assert record["step"] == 2 and record["steps_recorded"] == "1, 2"
    said = [text for group in record["groups"] for text in findings(record, group)]
    found = [text for text in said if text.startswith("these advantages are (r - ")]
    assert found and all(text.endswith("is their mean weighted by tokens") for text in found)
    wrong_groups = [g for g in overview(record) if g["wrong"]]
    assert len(wrong_groups) == len(found) and f"in {len(found)} of" in verdict(record)
    text = shown(str(run), "--group", str(wrong_groups[0]["group"]))
    assert "by the formula" in text and "computed here from" in text


@pytest.mark.timeout(300)
def test_a_critic_shows_values_and_returns(model: str, tmp_path: Path) -> None:
    run = trained(
        model,
        tmp_path / "run",
        "ppo",
        algorithm={"epochs": 2},
        critic={},
        log={"tokens": "all", "groups": 2},
    )
    record = read_step(run, 2)
    assert len(record["groups"]) == 2 and record["groups_of_step"] == 4
    assert "2 of them recorded" in shown(str(run), "--step", "2")
    for sample in (s for g in record["groups"] for s in g["samples"]):
        tokens = sample["by_token"]
        assert {len(column) for column in tokens.values()} == {sample["tokens"]}
        assert {"values", "returns", "advantages", "old", "ratio", "loss"} <= tokens.keys()
        assert sample["values"]["first"] == tokens["values"][0]
        assert sum(tokens["loss"]) == pytest.approx(sample["loss"], abs=1e-6)
        for now, old, ratio in zip(tokens["logprob"], tokens["old"], tokens["ratio"], strict=True):
            assert ratio == pytest.approx(math.exp(now - old), rel=1e-4)
    text = shown(str(run), "--step", "2", "--group", "0")
    assert "gae: " in text and "returns" in text and "not checked" in text
    assert "clip_fraction" in shown(str(run), "--step", "2", "--group", "0", "--sample", "0")


@pytest.mark.timeout(300)
def test_pairs_of_an_online_preference_method(model: str, tmp_path: Path) -> None:
    run = trained(model, tmp_path / "run", "online_dpo")
    record = read_step(run, 2)
    loss = 0.0
    for group in record["groups"]:
        sides = {s["pair"]["side"]: s for s in group["samples"] if "pair" in s}
        loss += sum(s["loss"] for s in sides.values())
        if not sides:
            continue
        assert sides["chosen"]["reward"] == max(s["reward"] for s in group["samples"])
        assert sides["rejected"]["reward"] == min(s["reward"] for s in group["samples"])
        assert sides["chosen"]["pair"]["with"] == sides["rejected"]["uid"]
        margin = sides["chosen"]["implicit_reward"] - sides["rejected"]["implicit_reward"]
        pairs = record["minibatches"][0]["rows"] / 2
        assert sides["chosen"]["loss"] == pytest.approx(
            math.log1p(math.exp(-margin)) / pairs / 2, rel=1e-3
        )
        assert all(s["no_signal"] == "not_picked" for s in group["samples"] if "pair" not in s)
    assert loss == pytest.approx(record["loss"], rel=1e-4)
    assert "implicit reward" in shown(str(run), "--step", "2", "--group", "0")


@pytest.mark.timeout(300)
def test_groups_without_signal_say_why(model: str, tmp_path: Path) -> None:
    """All rewards equal; and dynamic sampling, which replaces such groups."""
    run = trained(model, tmp_path / "equal", "grpo", rewards=(same,))
    text = shown(str(run), "--step", "1")
    assert "all 4 rewards are equal: this group teaches nothing" in text
    assert "4 of the 4 without signal: all rewards of the group are equal" in text
    dropped = trained(
        model,
        tmp_path / "dropped",
        "grpo",
        rewards=(same,),
        algorithm={"dynamic_sampling": True, "max_refills": 1},
    )
    record = read_step(dropped, 1)
    assert record["idle_groups"] == {"dropped": 8} and not record["minibatches"]
    assert {g["status"] for g in record["groups"]} == {"dropped"}
    assert "dynamic sampling dropped this group" in shown(str(dropped), "--step", "1")


@pytest.mark.timeout(300)
def test_masked_answers_say_why(model: str, tmp_path: Path) -> None:
    run = trained(model, tmp_path / "run", "grpo", algorithm={"overlong": "mask"})
    record = read_step(run, 1)
    cut = [s for g in record["groups"] for s in g["samples"] if s["stop"] == "length"]
    assert cut and all(s["no_signal"] == "overlong" and s["tokens"] == 0 for s in cut)
    assert "cut off by the token limit and masked" in shown(str(run), "--step", "1")


@pytest.mark.timeout(300)
def test_episodes_of_several_turns(model: str, tmp_path: Path) -> None:
    cfg = config_from_dict(
        {
            "model": {"path": model, "device": "cpu"},
            "algorithm": {"name": "grpo", "group_size": 3},
            "data": {"source": "python"},
            "env": {"name": "guess_number", "max_turns": 2, "max_tokens": 120},
            "rollout": {"max_new_tokens": 4},
            "train": {"steps": 1, "prompts_per_step": 2, "learning_rate": 1e-4},
            "run": {
                "dir": str(tmp_path / "run"),
                "checkpoint": {"every": 0},
                "log": {"samples_every": 1},
            },
        },
        where="test",
    )
    train_config(cfg, CallerObjects(data=DATA), SilentView())
    record = read_step(tmp_path / "run", 1)
    for group in record["groups"]:
        assert len({s["episode"] for s in group["samples"]}) == 3
        assert explain_group(record, group)["n"] == 3
        assert not explain_group(record, group)["wrong"]
    assert shown(str(tmp_path / "run"), "--step", "1", "--group", "0")


@pytest.mark.timeout(300)
def test_a_resumed_run_has_the_same_lines(model: str, tmp_path: Path) -> None:
    whole = trained(model, tmp_path / "whole", "grpo", steps=3)
    parts = trained(model, tmp_path / "parts", "grpo", steps=2)
    trained(model, tmp_path / "parts", "grpo", steps=3)
    for name in ("groups.jsonl", "samples.jsonl"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    assert [line["step"] for line in lines(parts, "groups.jsonl")] == [1, 2, 3]


@pytest.mark.timeout(300)
def test_what_is_logged_does_not_change_what_is_learned(model: str, tmp_path: Path) -> None:
    from reinforge.checkpoint.store import digest_run

    traced = trained(model, tmp_path / "traced", "grpo", log={"tokens": "all"})
    plain = trained(model, tmp_path / "plain", "grpo", log={"groups": 0})
    assert digest_run(traced) == digest_run(plain)
    assert (plain / "groups.jsonl").read_bytes() == b""
    assert "training" not in lines(plain, "samples.jsonl")[0]
    with pytest.raises(InputError, match="run.log.groups above 0"):
        read_step(plain, 1)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run directory"):
        read_step(tmp_path, 1)
    record = {
        "step": 3,
        "algorithm": {"name": "x", "parts": {}, "equations": {}},
        "weights": {},
        "batch": {},
        "minibatches": [],
        "groups_of_step": 1,
        "idle_groups": {},
        "groups": [{"group": "7:r", "row": "r", "status": "trained", "prompt": "", "samples": []}],
    }
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "groups.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(InputError, match=r"step 4 was not recorded\. There are: 3"):
        read_step(tmp_path, 4)
    with pytest.raises(InputError, match=r"no group '9'\. There are: 0 \(7:r\)"):
        find_group(record, "9")
    with pytest.raises(InputError, match="has no sample '1'"):
        find_sample(find_group(record, "r"), "1")
    assert overview(record)[0]["advantages"] is None
