"""A pipeline of real commands: killed in two of its stages it comes out bit-identical; finished
stages are not run again.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import cli_runs
from reinforge.pipelines.run import digest_pipeline

pytestmark = pytest.mark.timeout(300)
STAGES = {"sft": "01-sft", "grpo": "02-grpo", "eval": "03-eval", "export": "04-export"}
STEPS = {"sft": 6, "grpo": 4}


def settings(folder: Path, model: Path) -> dict[str, Any]:
    """SFT, GRPO from it with a reward that always has a signal, evaluation, export."""
    (folder / "parts.py").write_text(cli_runs.PARTS)
    return {
        "defaults": {
            "model": {"path": str(model)},
            "data": {
                "source": "arithmetic:chain",
                "options": {"size": 60, "max_value": 9, "terms": 2},
                "eval": {"size": 4},
            },
            "rewards": [
                {"name": "exact_number"},
                {"name": f"{folder / 'parts.py'}:digits", "weight": 0.5},
            ],
            "rollout": {"max_new_tokens": 12, "kv_gib": 0.002},
            "train": {"prompts_per_step": 4, "learning_rate": 3e-3},
            "run": {"checkpoint": {"every": 2}, "log": {"samples_every": 1}},
        },
        "stages": [
            {"name": "sft", "algorithm": {"name": "sft"}, "train": {"steps": STEPS["sft"]}},
            {
                "name": "grpo",
                "model": {"from": "sft"},
                "algorithm": {"name": "grpo", "group_size": 4, "kl": {"coefficient": 0.05}},
                "train": {"steps": STEPS["grpo"]},
            },
            {"name": "eval", "model": {"from": "grpo"}, "eval": {"samples": 2, "temperature": 1.0}},
            {"name": "export", "model": {"from": "grpo"}},
        ],
        "run": {"dir": "run", "seed": 3},
    }


@dataclass
class Undisturbed:
    config: Path
    folder: Path
    digests: dict[str, str]
    evidence: dict[str, cli_runs.Evidence]
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("pipeline")
    config = folder / "pipeline.yaml"
    config.write_text(yaml.safe_dump(settings(folder, tiny)))
    began = time.monotonic()
    code, said = cli_runs.forked("train", config, cwd=folder)
    assert code == 0, said
    evidence = {name: cli_runs.evidence(folder / "run" / STAGES[name]) for name in STEPS}
    return Undisturbed(
        config, folder, digest_pipeline(folder / "run"), evidence, time.monotonic() - began
    )


def crash(pipeline: Undisturbed, folder: Path, point: str) -> None:
    process = cli_runs.start(
        ["train", str(pipeline.config)], folder, env={"REINFORGE_CRASH_AT": point}, forked=True
    )
    assert process.wait() == -signal.SIGKILL, process.output()


def finish(pipeline: Undisturbed, folder: Path, *more: str) -> str:
    code, said = cli_runs.forked("train", pipeline.config, *more, cwd=folder)
    assert code == 0, said
    return said


def same(pipeline: Undisturbed, folder: Path) -> None:
    assert digest_pipeline(folder / "run") == pipeline.digests
    for name, steps in STEPS.items():
        assert (
            cli_runs.differences(folder / "run" / STAGES[name], pipeline.evidence[name], steps)
            == []
        ), name
    weights = [
        p.relative_to(folder)
        for p in (folder / "run").rglob("model.safetensors")
        if p.parent.name == "model"
    ]
    assert len(weights) == 3  # of sft, grpo and export
    assert all((folder / p).read_bytes() == (pipeline.folder / p).read_bytes() for p in weights)
    assert not [p for p in (folder / "run").rglob(".*.part")]


def test_every_stage_left_its_artefact(undisturbed: Undisturbed) -> None:
    found = {
        name: json.loads((undisturbed.folder / "run" / where / "artefact.json").read_text())
        for name, where in STAGES.items()
    }
    assert {name: made["what"] for name, made in found.items()} == {
        "sft": "model",
        "grpo": "model",
        "eval": "evaluation",
        "export": "model",
    }
    assert found["grpo"]["parents"] == {"sft": found["sft"]["id"]} and found["eval"]["parents"] == {
        "grpo": found["grpo"]["id"]
    }
    assert found["grpo"]["id"] != found["sft"]["id"], "GRPO trained"
    assert found["export"]["hashes"]["weights"] == found["grpo"]["hashes"]["weights"]
    assert all(
        {"started", "finished", "seconds"} <= made["clock"].keys() for made in found.values()
    )
    assert (
        0 < found["eval"]["metrics"]["eval/reward"] < 1 and found["eval"]["metrics"]["eval/n"] == 4
    )
    samples = cli_runs.lines(undisturbed.folder / "run" / STAGES["eval"] / "samples.jsonl")
    assert len(samples) == 8
    assert sum(line["reward"] for line in samples) / 8 == pytest.approx(
        found["eval"]["metrics"]["eval/reward"], abs=1e-9
    )
    seeds = {
        name: json.loads((undisturbed.folder / "run" / STAGES[name] / "config.json").read_text())[
            "run"
        ]["seed"]
        for name in STEPS
    }
    assert len(set(seeds.values())) == 2, "each stage has a seed of its own"
    page = (undisturbed.folder / "run" / "report.html").read_text()
    assert (
        all(f'href="{STAGES[name]}/report.html"' in page for name in STEPS)
        and found["sft"]["id"][:12] in page
    )
    card = (undisturbed.folder / "run" / STAGES["export"] / "model" / "README.md").read_text()
    assert "2. `grpo`: grpo from the stage `sft`" in card and "2402.03300" in card


def test_killed_in_two_stages(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """At the fourth step of SFT; then, after its four remaining steps from the checkpoint of step
    2, at the third step of GRPO.
    """
    crash(undisturbed, tmp_path, "step:end@4")
    assert not (tmp_path / "run" / STAGES["sft"] / "artefact.json").exists()
    crash(undisturbed, tmp_path, "step:end@7")
    assert (tmp_path / "run" / STAGES["sft"] / "artefact.json").exists() and cli_runs.trained_steps(
        tmp_path / "run" / STAGES["grpo"]
    ) == [1, 2]
    said = finish(undisturbed, tmp_path)
    assert "sft (train): finished before, nothing to do" in said and "resumed at step 2" in said
    same(undisturbed, tmp_path)


def test_killed_between_training_and_its_artefact(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Before the exported model of SFT is in place, before the artefact of GRPO, and while the last
    export is put in place.
    """
    for point in ("stage:exported@1", "stage:end@2", "stage:exported@2"):
        crash(undisturbed, tmp_path, point)
    finish(undisturbed, tmp_path)
    same(undisturbed, tmp_path)


@pytest.mark.long
def test_killed_at_random(undisturbed: Undisturbed, tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(2):
        process = cli_runs.start(["train", str(undisturbed.config)], tmp_path, forked=True)
        process.until(lambda: (tmp_path / "run").exists())
        time.sleep(rng.uniform(0.1, 0.8) * undisturbed.seconds)
        process.kill()
    finish(undisturbed, tmp_path)
    same(undisturbed, tmp_path)


def copied(pipeline: Undisturbed, folder: Path) -> Path:
    shutil.copytree(pipeline.folder / "run", folder / "run")
    return folder


def test_finished_stages_are_not_run_again(undisturbed: Undisturbed, tmp_path: Path) -> None:
    copied(undisturbed, tmp_path)
    files = {
        p: p.stat().st_mtime_ns
        for p in (tmp_path / "run").rglob("*")
        if p.is_file() and p.parent != tmp_path / "run"
    }
    said = finish(undisturbed, tmp_path)
    assert said.count("finished before, nothing to do") == 4
    assert {p: p.stat().st_mtime_ns for p in files} == files
    code, printed = cli_runs.forked("runs", "digest", "run", cwd=tmp_path)
    assert (
        code == 0
        and printed.splitlines()[0] == f"{undisturbed.digests['sft']}  sft"
        and len(printed.splitlines()) == 5
    )
    code, shown = cli_runs.forked("runs", "show", "run", cwd=tmp_path)
    assert code == 0 and shown.count("finished") == 4


def test_changed_inputs_are_an_error_before_anything_runs(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    copied(undisturbed, tmp_path)
    code, said = cli_runs.forked(
        "train", undisturbed.config, "stages.sft.train.learning_rate=0.001", cwd=tmp_path
    )
    assert (
        code == 2
        and "train.learning_rate was 0.003 and is 0.001" in said
        and "--force-stage sft" in said
    )
    code, said = cli_runs.forked(
        "train", undisturbed.config, "stages.eval.eval.samples=3", cwd=tmp_path
    )
    assert code == 2 and "eval.samples was 2 and is 3" in said and "--force-stage eval" in said
    assert digest_pipeline(tmp_path / "run") == undisturbed.digests
    # says how the run is watched, not what it learns
    finish(undisturbed, tmp_path, "stages.sft.run.log.samples=1")


def test_a_forced_stage_and_what_it_changes(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Forced without a change it comes out the same, so the others stay; with a change they are
    made again.
    """
    copied(undisturbed, tmp_path)
    said = finish(undisturbed, tmp_path, "--force-stage", "sft")
    assert (
        said.count("finished before, nothing to do") == 3
        and (tmp_path / "run" / "previous" / "01-sft-1" / "artefact.json").exists()
    )
    same_stages = digest_pipeline(tmp_path / "run")
    assert same_stages == undisturbed.digests
    said = finish(
        undisturbed, tmp_path, "stages.sft.train.learning_rate=0.001", "--force-stage", "sft"
    )
    assert "finished before" not in said and sorted(
        p.name for p in (tmp_path / "run" / "previous").iterdir()
    ) == [
        "01-sft-1",
        "01-sft-2",
        "02-grpo-1",
        "03-eval-1",
        "04-export-1",
    ]
    assert not set(digest_pipeline(tmp_path / "run").values()) & set(undisturbed.digests.values())


def test_a_parent_that_was_touched_is_noticed(undisturbed: Undisturbed, tmp_path: Path) -> None:
    copied(undisturbed, tmp_path)
    shutil.rmtree(tmp_path / "run" / STAGES["export"])
    shutil.rmtree(tmp_path / "run" / STAGES["eval"])
    weights = tmp_path / "run" / STAGES["grpo"] / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, said = cli_runs.forked("train", undisturbed.config, cwd=tmp_path)
    assert code == 2 and "is not what the stage grpo made" in said


def test_plan_checks_all_stages(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The models of later stages do not exist yet; everything else about them is checked, and named
    by stage.
    """
    done = cli_runs.cli("plan", undisturbed.config, "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], done.stdout + done.stderr
    assert [(s["stage"], s["state"]) for s in report["summary"]["stages"]] == [
        (name, "missing") for name in STAGES
    ]
    assert (
        report["summary"]["stages"][1]["rows"] == {"train": 60, "eval": 4}
        and not (tmp_path / "run").exists()
    )
    wrong = (
        "stages.grpo.rewards=[{name: exact_numbr}]",
        "stages.eval.data.columns={answer: anser}",
        "stages.sft.algorithm.name=sftt",
    )
    code, said = cli_runs.forked("plan", undisturbed.config, *wrong, cwd=tmp_path)
    assert (
        code == 2
        and "stage grpo: rewards.0.name: there is no reward 'exact_numbr'" in said
        and "stage sft: algorithm.name" in said
    )
    code, said = cli_runs.forked("plan", undisturbed.config, wrong[1], cwd=tmp_path)
    assert code == 2 and "error: stage eval: " in said and "anser" in said
