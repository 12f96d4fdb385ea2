"""`reinforge launch`: the same run on a scheduler.

Writes what it submits into the run directory, or prints it and submits nothing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from reinforge.cli.problems import refuse
from reinforge.cluster.launchers import kubernetes, ray_job, slurm
from reinforge.cluster.launchers.job import LaunchJob
from reinforge.config.pipeline import Pipeline, load_any
from reinforge.core.errors import InputError, ReinforgeError
from reinforge.plan.preflight import preflight

TOOLS = {
    "sbatch": (
        "Log in to a machine of the Slurm cluster, or use --dry-run and submit the script there."
    ),
    "kubectl": "Install kubectl, or use --dry-run and apply the manifests elsewhere.",
    "ray": "pip install 'reinforge[ray]', or use --dry-run.",
}


class LaunchTarget(StrEnum):
    local = "local"
    ray = "ray"
    slurm = "slurm"
    kubernetes = "kubernetes"


class ProcessStarter(StrEnum):
    srun = "srun"
    torchrun = "torchrun"


class GangScheduler(StrEnum):
    volcano = "volcano"
    kueue = "kueue"


def launch(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A YAML file, as for `reinforge train`.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that replace those of the file."),
    ] = None,
    on: Annotated[
        LaunchTarget,
        typer.Option(metavar="WHERE", help="Where it runs: local, ray, slurm or kubernetes."),
    ] = LaunchTarget.local,
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="Machines.")] = 1,
    gpus: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="GPUs of each machine; one rank for each. 0: CPUs only."
        ),
    ] = 0,
    time: Annotated[
        str | None, typer.Option(help="The longest it may take: minutes, HH:MM:SS or D-HH:MM:SS.")
    ] = None,
    starter: Annotated[
        ProcessStarter, typer.Option("--with", help="slurm, without Ray: who starts the ranks.")
    ] = ProcessStarter.srun,
    partition: Annotated[str | None, typer.Option(help="slurm: the partition.")] = None,
    account: Annotated[str | None, typer.Option(help="slurm: the account.")] = None,
    image: Annotated[
        str, typer.Option(help="kubernetes: the container image (deploy/Dockerfile makes it).")
    ] = "reinforge:latest",
    namespace: Annotated[str, typer.Option(help="kubernetes: the namespace.")] = "default",
    claim: Annotated[
        str, typer.Option(help="kubernetes: the PersistentVolumeClaim that holds runs.")
    ] = "reinforge-runs",
    cpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=(
                "slurm, kubernetes: CPUs of each machine; default: 8 for each GPU, or all of a"
                " machine that is taken whole."
            ),
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help=(
                "slurm, kubernetes: memory of each machine, as 64Gi; default: 32Gi for each GPU"
                " and at least 64Gi (kubernetes), what the partition gives (slurm), or all of a"
                " machine that is taken whole."
            )
        ),
    ] = None,
    exclusive: Annotated[
        bool | None,
        typer.Option(
            "--exclusive/--shared",
            help="slurm: whether machines are taken whole; default: where there are several.",
        ),
    ] = None,
    shm: Annotated[
        str | None,
        typer.Option(
            help=(
                "kubernetes: size of /dev/shm, beside --memory, as 32Gi; default: half of --memory."
            )
        ),
    ] = None,
    rdma: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=N",
            help="kubernetes: the RDMA devices of each worker, as rdma/hca=8.",
        ),
    ] = None,
    gang: Annotated[
        GangScheduler | None,
        typer.Option(help="kubernetes: who places all pods or none: volcano or kueue."),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="kubernetes: the queue of --gang.")] = None,
    standing: Annotated[
        bool,
        typer.Option(
            "--standing", help="kubernetes: a cluster that stays (RayCluster), without a job."
        ),
    ] = False,
    address: Annotated[str | None, typer.Option(help="ray: of the cluster's dashboard.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A variable of the run; may be given often."),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="slurm, local: the Python of the run; default: this one.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")
    ] = False,
) -> None:
    """Run a configuration on this machine, a Ray cluster, Slurm or Kubernetes.

    Submitting the same again continues the run from its newest checkpoint.
    What was submitted is in RUN/launch, logs are in RUN/logs.

    [bold]Examples[/bold]

      reinforge launch recipe:chain_sum --on slurm --nodes 2 --gpus 8 \\
        --time 4:00:00 train.backend=fsdp

      reinforge launch recipe:chain_sum --on kubernetes --nodes 4 --gpus 8 \\
        --image reinforge:1 --dry-run cluster.kind=ray train.backend=fsdp
    """
    words = _adapted(config, tuple(overrides or ()), on, nodes, gpus)
    loaded = _loaded(config, words, on)
    run_dir = Path(os.path.abspath(loaded.dir if isinstance(loaded, Pipeline) else loaded.run.dir))
    job = LaunchJob(
        Path(os.path.abspath(config)),
        run_dir,
        words,
        nodes=nodes,
        gpus=gpus,
        time=time,
        partition=partition,
        account=account,
        image=image,
        namespace=namespace,
        claim=claim,
        cpus=cpus,
        memory=memory,
        shm=shm,
        exclusive=exclusive,
        rdma=rdma,
        gang=gang.value if gang is not None else None,
        queue=queue,
        env=tuple(_pair(e) for e in env or ()),
        python=python or sys.executable,
    )
    uses_ray = not isinstance(loaded, Pipeline) and loaded.cluster.kind == "ray"
    files, command = _prepared(
        job, on, "ray" if uses_ray else starter.value, standing, uses_ray, address
    )
    if dry_run:
        for path, text in files.items():
            print(
                f"# {path}\n{text}" if len(files) > 1 else text,
                end="" if text.endswith("\n") else "\n",
            )
        print(f"# submitted with: {shlex.join(command)}")
        return
    _submit(job, files, command, on)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r} has no =.", where="--env", fix="Give it as NAME=VALUE.")
    return name, value


def _adapted(
    config: Path, overrides: tuple[str, ...], on: LaunchTarget, nodes: int, gpus: int
) -> tuple[str, ...]:
    """The overrides, with what follows from where the run goes: the cluster's address, the number
    of ranks on this machine.
    """
    loaded = load_any(config, overrides)
    if isinstance(loaded, Pipeline):
        if nodes > 1:
            raise InputError(
                "a pipeline runs on one machine.",
                where="--nodes",
                fix="Launch its stages one by one, or leave it out.",
            )
        return overrides
    world = nodes * max(1, gpus)
    ray = loaded.cluster.kind == "ray"
    if on is LaunchTarget.local and nodes > 1:
        raise InputError(
            "this is one machine.",
            where="--nodes",
            fix="Use --on slurm, ray or kubernetes, or leave it out.",
        )
    if world > 1 and loaded.train.backend == "local" and not ray:
        raise InputError(
            f"train.backend local is one process, and {world} devices are asked for.",
            where="train.backend",
            fix="Add train.backend=fsdp, or cluster.kind=ray.",
        )
    if on in (LaunchTarget.ray, LaunchTarget.kubernetes) and nodes > 1 and not ray:
        raise InputError(
            "several machines are used through Ray there.",
            where="cluster.kind",
            fix="Add cluster.kind=ray, or use one node.",
        )
    if ray and on is not LaunchTarget.local and loaded.cluster.address is None:
        return (*overrides, "cluster.address=auto")  # the one that is launched
    if on is LaunchTarget.local and gpus > 1 and loaded.train.ranks is None and not ray:
        return (*overrides, f"train.ranks={gpus}")
    return overrides


def _loaded(config: Path, overrides: tuple[str, ...], on: LaunchTarget) -> Any:
    """The configuration; what is wrong with it is told here and not by a job that has waited for
    hours. Paths may be of another machine.
    """
    loaded = load_any(config, overrides)
    if isinstance(loaded, Pipeline) or on in (LaunchTarget.ray, LaunchTarget.kubernetes):
        return loaded
    refuse(preflight(loaded).errors)
    return loaded


def _prepared(
    job: LaunchJob,
    on: LaunchTarget,
    starter: Any,
    standing: bool,
    uses_ray: bool,
    address: str | None,
) -> tuple[dict[Path, str], list[str]]:
    """(file: its text) that are written, and the command that submits them."""
    folder: Path = job.folder
    if on is LaunchTarget.slurm:
        return {folder / "job.sh": slurm.script(job, starter)}, slurm.submission(
            job, str(folder / "job.sh")
        )
    if on is LaunchTarget.kubernetes:
        documents = kubernetes.manifests(
            job, kubernetes.read_config(job.config), standing=standing, in_worker=not uses_ray
        )
        return {folder / "manifests.yaml": kubernetes.as_yaml(documents)}, kubernetes.submission(
            job, str(folder / "manifests.yaml")
        )
    if on is LaunchTarget.ray:
        sent = folder / "ray"
        runtime = folder / "runtime-env.yaml"
        files = {
            sent / "config.yaml": kubernetes.read_config(job.config),
            sent / "run.sh": ray_job.script(job),
            runtime: ray_job.runtime(job, str(sent)),
        }
        return files, ray_job.submission(str(runtime), address)
    return {}, job.command()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _submit(job: LaunchJob, files: dict[Path, str], command: list[str], on: LaunchTarget) -> None:
    tool = command[0]
    if on is not LaunchTarget.local and shutil.which(tool) is None:
        raise InputError(f"there is no {tool} here.", where="--on", fix=TOOLS[tool])
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(path, "w", encoding="utf-8", opener=_private) as file:  # --env may hold a secret
            file.write(text)
    if on is LaunchTarget.local:
        os.execvpe(tool, command, {**os.environ, **dict(job.env)})
    # Slurm does not make it, and the job would end without a word
    (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ReinforgeError(
            f"{tool} ended with exit code {done.returncode}: {(done.stderr or done.stdout).strip()}"
        )
    print(f"{done.stdout.strip()}\nlogs: {job.run_dir / 'logs'}")
