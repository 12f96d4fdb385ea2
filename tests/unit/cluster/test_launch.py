"""`reinforge launch`: scripts that survive odd words, signals that requeue, refusals before
anything is submitted.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from helpers.paths import ROOT
from reinforge.cli.main import app
from reinforge.cluster.launchers import ray_job, slurm
from reinforge.cluster.launchers.job import LaunchJob
from reinforge.config.rules import machine
from reinforge.core.errors import InputError
from reinforge.loops.signals import Signals

ODD = (
    'data.options.text=it\'s "odd" $(touch pwned) `touch pwned` ! \\ 100%',
    "rollout.stop=a\nb",
    "é=ß",
    "",
)
FAKE_SRUN = """#!/bin/bash
printf '%s\\0' "$@" >"$FOUND/srun"
printf '%s' "${MASTER_ADDR-} ${MASTER_PORT-} ${ODD-}" >"$FOUND/env"
printf '%s' "${SRUN_CPUS_PER_TASK-} ${OMP_NUM_THREADS-}" >"$FOUND/cores"
for _ in $(seq 100); do [ -e "$FOUND/stop" ] && exit "$(cat "$FOUND/stop")"; sleep 0.05; done
"""
FAKES = {
    "srun": FAKE_SRUN,
    "scontrol": (
        '#!/bin/bash\n[ "$1" = show ] && echo "$(hostname)" || printf "%s " "$@"'
        ' >"$FOUND/requeued"\n'
    ),
    "scancel": '#!/bin/bash\nprintf "%s " "$@" >"$FOUND/cancelled"; echo 143 >"$FOUND/stop"\n',
}


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A directory whose name nobody would choose."""
    folder = tmp_path / "a 'b' \"c\" $(touch pwned) 50%j\nd"
    folder.mkdir()
    return folder


def start(job: LaunchJob, starter: slurm.Starter, found: Path) -> subprocess.Popen[str]:
    """The script under bash, with programs in the place of Slurm's that note what they
    are asked.
    """
    tools = found / "bin"
    tools.mkdir(parents=True)
    for name, text in FAKES.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (found / "job.sh").write_text(slurm.script(job, starter))
    env = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "FOUND": str(found),
        "SLURM_JOB_ID": "20007",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
    }
    return subprocess.Popen(
        ["bash", str(found / "job.sh")],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def seen(path: Path) -> list[str]:
    until = time.monotonic() + 10
    while not path.exists() or not path.read_bytes().endswith(b"\0"):
        assert time.monotonic() < until, f"no {path.name}"
        time.sleep(0.02)
    return path.read_bytes().decode().split("\0")[:-1]


@pytest.mark.parametrize("starter", ["srun", "torchrun"])
def test_odd_words_arrive_as_they_are(odd: Path, tmp_path: Path, starter: slurm.Starter) -> None:
    job = LaunchJob(
        odd / "c d.yaml",
        odd / "run",
        ODD,
        nodes=2,
        gpus=4,
        env=(("ODD", "x 'y'\nz"),),
        python="/opt/my python",
        chdir=odd,
    )
    found = tmp_path / "found"
    process = start(job, starter, found)
    words = seen(found / "srun")
    (found / "stop").write_text("0")
    assert process.wait(20) == 0, process.stdout and process.stdout.read()
    assert (
        words[-len(job.command()) :]
        == job.command()
        == ["/opt/my python", "-m", "reinforge", "train", str(odd / "c d.yaml"), *ODD]
    )
    (output,) = [w.removeprefix("--output=") for w in words if w.startswith("--output=")]
    assert output.startswith(str(odd / "run" / "logs").replace("%", "%%"))
    host = subprocess.run(["hostname"], capture_output=True, text=True).stdout.strip()
    if starter == "srun":
        assert (found / "env").read_text() == f"{host} {20000 + 20007 % 20000} x 'y'\nz"
    assert (
        (odd / "run" / "logs").is_dir()
        and not list(tmp_path.rglob("pwned"))
        and not Path("pwned").exists()
    )


def test_a_signal_saves_and_requeues_and_a_failure_does_not(tmp_path: Path) -> None:
    job = LaunchJob(tmp_path / "c.yaml", tmp_path / "run", gpus=1)
    process = start(job, "srun", tmp_path / "one")
    seen(tmp_path / "one" / "srun")
    process.send_signal(signal.SIGUSR1)
    process.wait(20)
    assert (tmp_path / "one" / "cancelled").read_text() == "--signal=TERM 20007.0 "
    assert (tmp_path / "one" / "requeued").read_text() == "requeue 20007 "

    process = start(job, "srun", tmp_path / "two")
    seen(tmp_path / "two" / "srun")
    (tmp_path / "two" / "stop").write_text("3")
    assert process.wait(20) == 3 and not (tmp_path / "two" / "requeued").exists()

    # scancel: the run saves and ends with 143, and nobody wants it back
    process = start(job, "srun", tmp_path / "three")
    seen(tmp_path / "three" / "srun")
    (tmp_path / "three" / "stop").write_text("143")
    assert process.wait(20) == 143 and not (tmp_path / "three" / "requeued").exists()


def test_what_slurm_is_asked_for(tmp_path: Path) -> None:
    job = LaunchJob(
        tmp_path / "c.yaml",
        tmp_path / "My Run",
        nodes=3,
        gpus=8,
        time="1-12:00:00",
        partition="gpu",
        account="team_1",
    )
    wanted = {
        line.removeprefix("#SBATCH --")
        for line in slurm.script(job).splitlines()
        if line.startswith("#SBATCH")
    }
    assert wanted == {
        "job-name=my-run",
        "nodes=3",
        "ntasks-per-node=8",
        "gpus-per-node=8",
        "exclusive",
        "mem=0",
        "time=1-12:00:00",
        "partition=gpu",
        "account=team_1",
        "signal=B:USR1@120",
        "open-mode=append",
        "requeue",
    }
    assert "#SBATCH --ntasks-per-node=1\n" in slurm.script(
        job, "torchrun"
    ) and "--nproc-per-node 8" in slurm.script(job, "torchrun")
    assert slurm.submission(job, "job.sh") == [
        "sbatch",
        "--parsable",
        f"--output={tmp_path}/My Run/logs/slurm-%j.log",
        "job.sh",
    ]
    ray = slurm.script(job, "ray")
    assert (
        "start --head" in ray
        and "--dashboard-host=127.0.0.1" in ray
        and "RAY_AUTH_MODE=token" in ray
        and "--nodes=$((SLURM_NNODES - 1))" in ray
    )
    for starter in ("srun", "torchrun", "ray"):
        checked = subprocess.run(
            ["bash", "-n"], input=slurm.script(job, starter), text=True, capture_output=True
        )
        assert checked.returncode == 0, checked.stderr
    for wrong in (
        {"partition": "gpu; rm -rf"},
        {"time": "soon"},
        {"account": "a b"},
        {"image": "x y"},
        {"memory": "64G"},
        {"shm": "half"},
        {"rdma": "rdma/hca"},
        {"queue": "team"},
        {"gang": "kueue"},
        {"env": (("A-B", "1"),)},
    ):
        with pytest.raises(InputError):
            LaunchJob(tmp_path / "c.yaml", tmp_path / "run", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("starter", "changes", "wanted"),
    [
        # several machines are taken whole, unless the user says otherwise
        ("srun", {"nodes": 2}, {"exclusive", "mem=0"}),
        ("srun", {"nodes": 2, "memory": "1Ti"}, {"exclusive", "mem=1048576M"}),
        ("srun", {"nodes": 2, "cpus": 96}, {"exclusive", "mem=0", "cpus-per-task=12"}),
        ("srun", {"nodes": 2, "exclusive": False}, {"cpus-per-task=8"}),
        ("srun", {}, {"cpus-per-task=8"}),
        ("srun", {"cpus": 32, "memory": "200Gi"}, {"cpus-per-task=4", "mem=204800M"}),
        ("torchrun", {}, {"cpus-per-task=64"}),
        ("ray", {"cpus": 40}, {"cpus-per-task=40"}),
        ("srun", {"gpus": 0}, {"cpus-per-task=8"}),
        ("srun", {"exclusive": True}, {"exclusive", "mem=0"}),
    ],
)
def test_cores_and_memory_are_asked_for(
    starter: slurm.Starter, changes: dict[str, Any], wanted: set[str], tmp_path: Path
) -> None:
    job = LaunchJob(tmp_path / "c.yaml", tmp_path / "run", **{"gpus": 8, **changes})
    asked = {
        line.removeprefix("#SBATCH --")
        for line in slurm.script(job, starter).splitlines()
        if line.startswith(("#SBATCH --exclusive", "#SBATCH --cpus", "#SBATCH --mem"))
    }
    assert asked == wanted


@pytest.mark.parametrize(
    ("starter", "given", "cores", "threads"),
    [
        ("srun", {"SLURM_CPUS_PER_TASK": "12"}, "12", "12"),
        ("srun", {"SLURM_CPUS_ON_NODE": "96"}, "24", "24"),  # a whole machine, four tasks
        ("srun", {"SLURM_CPUS_ON_NODE": "96", "OMP_NUM_THREADS": "2"}, "24", "2"),
        ("srun", {}, "1", "1"),
        ("torchrun", {"SLURM_CPUS_ON_NODE": "96"}, "96", "24"),  # one task, four ranks
    ],
)
def test_every_task_has_its_cores(
    starter: slurm.Starter,
    given: dict[str, str],
    cores: str,
    threads: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """srun takes cores from a variable of its own, and torchrun gives a rank one thread."""
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = tmp_path / "found"
    process = start(LaunchJob(tmp_path / "c.yaml", tmp_path / "run", gpus=4), starter, found)
    seen(found / "srun")
    (found / "stop").write_text("0")
    assert process.wait(20) == 0
    assert (found / "cores").read_text() == f"{cores} {threads}"


def test_ray_gets_files_instead_of_quotes(odd: Path) -> None:
    job = LaunchJob(odd / "c.yaml", odd / "run", ODD, env=(("HF_TOKEN", "hf_secret"),))
    assert shlex.split(ray_job.script(job).removeprefix("#!/bin/bash\n")) == [
        "exec",
        "python",
        "-m",
        "reinforge",
        "train",
        "config.yaml",
        *ODD,
        f"run.dir={odd}/run",
    ]
    command = ray_job.submission("env.yaml", "http://head:8265")
    assert command[-5:] == ["--runtime-env", "env.yaml", "--", "bash", "run.sh"]
    sent = yaml.safe_load(ray_job.runtime(job, "there"))
    assert sent == {
        "working_dir": "there",
        "env_vars": {"PYTHONUNBUFFERED": "1", "HF_TOKEN": "hf_secret"},
    }


# ---- the command ----


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    path = tmp_path / "c.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"path": str(model)},
                "algorithm": {"name": "grpo"},
                "data": {"source": "arithmetic:chain"},
                "rewards": [{"name": "exact_number"}],
                "train": {"steps": 1},
                "run": {"dir": "runs/first"},
            }
        )
    )
    return path


def launch(*words: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["launch", *map(str, words)])
    return done.exit_code, done.output + (str(done.exception) if done.exception else "")


def test_a_dry_run_leaves_nothing(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (
        ["slurm", "--nodes", 2, "--gpus", 8, "train.backend=fsdp"],
        ["kubernetes", "--gpus", 1],
        ["ray"],
        ["local"],
    ):
        code, said = launch(config, "--on", words[0], *words[1:], "--dry-run")
        assert code == 0 and "# submitted with: " in said, said
    assert not (tmp_path / "runs").exists()
    words = ["slurm", "--nodes", 2, "--gpus", 8, "train.backend=fsdp", "cluster.kind=ray"]
    found: list[object | None] = [None, "somewhere"]
    monkeypatch.setattr(machine, "find_spec", lambda name: found.pop(0))
    code, said = launch(config, "--on", *words, "--dry-run")
    assert code and "Ray is not installed" in said  # a job has the Python of who submits it
    code, said = launch(config, "--on", *words, "--dry-run")
    assert code == 0 and "start --head" in said and "cluster.address=auto" in said, said


def test_a_pipeline_runs_on_one_machine(config: Path) -> None:
    recipe = ROOT / "recipes" / "pipeline.yaml"
    code, said = launch(recipe, "--on", "slurm", "--gpus", 1, "--dry-run")
    assert code == 0 and "#SBATCH --job-name=pipeline" in said and str(recipe) in said, said
    code, said = launch(recipe, "--on", "slurm", "--nodes", 2, "--dry-run")
    assert code != 0 and "a pipeline runs on one machine" in said


def test_refusals(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for words, told in (
        (
            ["--on", "slurm", "--gpus", 8],
            (
                "train.backend local is one process, and 8 devices are asked for. Add"
                " train.backend=fsdp"
            ),
        ),
        (
            ["--on", "kubernetes", "--nodes", 2, "train.backend=fsdp"],
            "cluster.kind: several machines are used through Ray there.",
        ),
        (["--on", "local", "--nodes", 2], "--nodes: this is one machine."),
        (["--on", "slurm"], "there is no sbatch here."),
        (["--on", "kubernetes"], "there is no kubectl here."),
        (["--on", "slurm", "--env", "NAME"], "'NAME' has no =."),
        (["--on", "slurm", "algorithm.name=grpoo"], "there is no algorithm 'grpoo'"),
    ):
        code, said = launch(config, *words)
        assert code != 0 and told in said, (words, said)
    assert not (tmp_path / "runs").exists()


def test_submission(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text(
        '#!/bin/sh\n[ -d "$(dirname "${2#--output=}")" ] && [ -f "$3" ] && echo "4711"\n'
    )
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    code, said = launch(config, "--on", "slurm", "--gpus", 1, "run.seed=5")
    assert code == 0 and "4711" in said, said
    assert "run.seed=5" in (tmp_path / "runs" / "first" / "launch" / "job.sh").read_text()


def test_secrets_of_a_launch_are_for_its_user_alone(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the arguments of what is started, nor in files that others can read."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sbatch", "ray"):
        (tools / name).write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" >"{tmp_path}/{name}-arguments"\n'
        )
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    folder = tmp_path / "runs" / "first" / "launch"
    for on, name, held in (("slurm", "sbatch", "job.sh"), ("ray", "ray", "runtime-env.yaml")):
        (folder / held).parent.mkdir(parents=True, exist_ok=True)
        (folder / held).touch(0o644)  # of an earlier launch
        code, said = launch(config, "--on", on, "--gpus", 1, "--env", "HF_TOKEN=hf_secret")
        assert (
            code == 0 and "hf_secret" not in said + (tmp_path / f"{name}-arguments").read_text()
        ), said
        assert "hf_secret" in (folder / held).read_text()
    assert [
        path.name for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077
    ] == []


def test_torchrun_passes_a_signal_on_and_it_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system signals every process, torchrun's agent signals its ranks again: the second
    one must not end the save.
    """
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    for elastic, want in ((True, []), (False, [143])):
        ended.clear()
        (
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
            if elastic
            else monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        )
        signals = Signals(tell=lambda text: None, hung_up=lambda: None)
        signals.handle(signal.SIGTERM, None)
        assert signals.received is signal.SIGTERM
        signals.handle(signal.SIGTERM, None)
        assert ended == want
