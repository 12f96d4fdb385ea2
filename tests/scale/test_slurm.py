"""A real Slurm on this host runs a two-node job of ours; it is preempted, requeues itself, and ends
as if nothing had happened.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from helpers import slurm_cluster
from helpers.paths import SRC
from reinforge.checkpoint import store
from reinforge.cluster.launchers import slurm
from reinforge.cluster.launchers.job import LaunchJob
from reinforge.models.tiny import make_tiny_model

STEPS = 6
ON_RAY = ("cluster.kind=ray", "cluster.address=auto")
REWARD = '''"""Counts digits.

Waits in the fourth step of the first start, so that a signal finds the run in the middle.
"""

import os
import time
from pathlib import Path


def digits(completions, **columns):
    asked = Path(os.environ["PAUSE_IN"]) if "PAUSE_IN" in os.environ else None
    if asked is not None:
        log = asked / "metrics.jsonl"
        steps = len(log.read_text().splitlines()) if log.exists() else 0
        if steps >= 3 and not (asked / "paused").exists():
            (asked / "paused").touch()
            time.sleep(60)
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
'''


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Slurm]:
    if os.geteuid() != 0:
        pytest.skip("starting munged and slurmctld needs root")
    if absent := slurm_cluster.missing():
        pytest.skip(
            f"not installed: {', '.join(absent)} (Debian: slurm-wlm and munge; CI=true installs"
            " them)"
        )
    with slurm_cluster.running(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config of a run")
    (folder / "reward.py").write_text(REWARD)
    path = folder / "it's a run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {
                    "path": str(make_tiny_model(folder / "tiny", width=48, layers=2, heads=4))
                },
                "algorithm": {"name": "grpo", "group_size": 4},
                "data": {
                    "source": "arithmetic:chain",
                    "options": {"size": 60, "max_value": 9, "terms": 2},
                },
                "rewards": [{"name": f"{folder / 'reward.py'}:digits"}],
                "rollout": {"max_new_tokens": 8, "kv_gib": 0.002},
                "eval": {"every": 0},
                "train": {
                    "steps": STEPS,
                    "prompts_per_step": 4,
                    "learning_rate": 3e-3,
                    "backend": "fsdp",
                },
                "run": {"dir": "unused", "checkpoint": {"every": 50}},
            }
        )
    )
    return path


def job(config: Path, run: Path, *env: tuple[str, str]) -> LaunchJob:
    quiet = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SRC),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return LaunchJob(
        config,
        run,
        (f"run.dir={run}",),
        nodes=2,
        time="10",
        env=(*quiet.items(), *env),
        python=sys.executable,
        chdir=run.parent,
    )


def submit(here: slurm_cluster.Slurm, wanted: LaunchJob, starter: slurm.Starter) -> str:
    wanted.folder.mkdir(parents=True)
    (wanted.run_dir / "logs").mkdir()
    path = wanted.folder / "job.sh"
    path.write_text(slurm.script(wanted, starter))
    return here.call(*slurm.submission(wanted, str(path)))


def logs(run: Path) -> str:
    return "\n".join(
        f"--- {p.name}\n{p.read_text(errors='replace')}"
        for p in sorted((run / "logs").glob("*.log"))
    )


@pytest.mark.timeout(800)
def test_two_nodes_are_preempted_and_resume_exactly(
    here: slurm_cluster.Slurm, config: Path, tmp_path: Path
) -> None:
    """Undisturbed under torchrun; signalled and requeued under srun's own ranks: the same weights,
    optimizer and cursor.
    """
    whole = tmp_path / "whole"
    cut = tmp_path / "100% cut"
    first = submit(here, job(config, whole), "torchrun")
    here.until(
        lambda: here.state(first) not in ("PENDING", "RUNNING", "COMPLETING"),
        240,
        "end of the whole run",
        lambda: logs(whole),
    )
    assert here.state(first) == "COMPLETED", logs(whole)

    second = submit(here, job(config, cut, ("PAUSE_IN", str(cut))), "srun")
    here.until(lambda: (cut / "paused").exists(), 200, "step 4", lambda: logs(cut))
    here.call("scancel", "--batch", "--signal=USR1", second)
    here.until(
        lambda: here.state(second) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"),
        240,
        "end",
        lambda: logs(cut),
    )
    assert here.state(second) == "COMPLETED", logs(cut)
    said = (cut / "logs" / f"slurm-{second}.log").read_text()
    # 143, or that of a rank that lost the other first
    back = re.search(r"exit code [1-9]\d* after the signal: back into the queue", said)
    assert "started 1 times before" in said and back and "ended with exit code 0" in said, said
    assert "resumed at step 3" in logs(cut) and {
        p.name.rpartition("-")[0] for p in (cut / "logs").glob("rank-*")
    } == {"rank-0", "rank-1"}
    steps = [json.loads(line)["step"] for line in (cut / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    assert store.digest_run(cut) == store.digest_run(whole)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_ray_is_started_on_all_nodes(
    here: slurm_cluster.Slurm, config: Path, tmp_path: Path
) -> None:
    """Head on the first node, a worker on the other, one driver beside the head; nothing of it is
    left afterwards.
    """
    pytest.importorskip("ray")
    wanted = replace(
        job(config, tmp_path / "run"),
        overrides=(f"run.dir={tmp_path / 'run'}", "train.backend=local", "train.steps=1", *ON_RAY),
    )
    number = submit(here, wanted, "ray")
    here.until(
        lambda: here.state(number) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"),
        400,
        "end",
        lambda: logs(wanted.run_dir),
    )
    assert here.state(number) == "COMPLETED", logs(wanted.run_dir)
    said = (wanted.run_dir / "logs" / f"slurm-{number}.log").read_text()
    assert "2 of 2 nodes of Ray are there" in said and "ended with exit code 0" in said
    assert {p.name.rpartition("-")[0] for p in (wanted.run_dir / "logs").glob("ray-*")} == {
        "ray-head",
        "ray-worker-0",
    }
    token = wanted.folder / "ray-token"
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 64
    assert (
        len((wanted.run_dir / "metrics.jsonl").read_text().splitlines()) == 1
        and (wanted.run_dir / "logs" / "driver.log").read_text()
    )
