"""One launch: what is run, on how much, and how its names and words survive a shell, Slurm and
Kubernetes.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from reinforge.core.errors import InputError

# of a partition, an account: fit for a line of a script as they are
WORD = re.compile(r"[A-Za-z0-9][\w.:+-]*")
TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
IMAGE = re.compile(r"[a-z0-9][\w./:@-]*", re.IGNORECASE)
# of an extended resource and how many of it a pod gets
RDMA = re.compile(r"[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][\w.-]*=[1-9]\d*")
MEMORY = re.compile(r"[1-9]\d*(Mi|Gi|Ti)")
MIB = {"Mi": 1, "Gi": 1 << 10, "Ti": 1 << 20}
CPUS_PER_GPU = 8  # where nobody says: machines with GPUs have 12 and more
MEMORY_PER_GPU = 32 << 10  # MiB
MEMORY_LEAST = 64 << 10  # MiB
NAME_LIMIT = 40  # KubeRay appends to the names of jobs and wants at most 47


@dataclass(frozen=True)
class LaunchJob:
    """What `reinforge launch` is asked for: `reinforge train CONFIG overrides` on `nodes` machines
    with `gpus` each. A launcher (Slurm, Kubernetes, Ray jobs) writes it down in its own words.
    `run_dir` is absolute, and on a disk that all see.
    """

    config: Path
    run_dir: Path
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    gpus: int = 0  # of each node; 0: CPUs only, one process per node
    time: str | None = None  # Slurm's form: minutes, H:M:S, D-H:M:S
    partition: str | None = None
    account: str | None = None
    image: str = "reinforge:latest"
    namespace: str = "default"
    claim: str = "reinforge-runs"  # PersistentVolumeClaim that holds runs
    cpus: int | None = None  # of each machine; None: by its GPUs, or all of them
    memory: str | None = None  # of each machine, without /dev/shm
    shm: str | None = None  # size of /dev/shm; None: half of the memory
    exclusive: bool | None = None  # machines are taken whole; None: where there are several
    rdma: str | None = None  # e.g. rdma/hca=8: what the network's device plugin offers
    gang: str | None = None  # who places all pods or none: volcano or kueue
    queue: str | None = None  # of it
    env: tuple[tuple[str, str], ...] = ()
    python: str = sys.executable
    chdir: Path = field(default_factory=Path.cwd)

    def __post_init__(self) -> None:
        for key, value, form in (
            ("--partition", self.partition, WORD),
            ("--account", self.account, WORD),
            ("--time", self.time, TIME),
            ("--image", self.image, IMAGE),
            ("--memory", self.memory, MEMORY),
            ("--shm", self.shm, MEMORY),
            ("--rdma", self.rdma, RDMA),
            ("--queue", self.queue, WORD),
        ):
            if value is not None and not form.fullmatch(value):
                raise InputError(
                    f"{value!r} is not one.", where=key, fix="See `reinforge launch --help`."
                )
        if self.gang == "kueue" and self.queue is None:
            raise InputError("Kueue starts what is in a queue.", where="--queue", fix="Name it.")
        if self.queue is not None and self.gang is None:
            raise InputError(
                f"nobody reads the queue {self.queue!r}.",
                where="--queue",
                fix="Add --gang volcano or --gang kueue.",
            )
        for name, _ in self.env:
            if not VARIABLE.fullmatch(name):
                raise InputError(
                    f"{name!r} is no name of a variable.",
                    where="--env",
                    fix="Give it as NAME=VALUE.",
                )
        for word in (
            str(self.config),
            str(self.run_dir),
            *self.overrides,
            *(value for _, value in self.env),
        ):
            if "\0" in word:
                raise InputError(
                    "a word holds a zero byte, which no command line can.", where="launch"
                )

    @property
    def name(self) -> str:
        """Of the run directory, made fit for Kubernetes and Slurm: lower case, digits and dashes.

        >>> Job(Path("c.yaml"), Path("/runs/Chain Sum_2!")).name
        'chain-sum-2'
        """
        plain = (
            re.sub(r"[^a-z0-9]+", "-", self.run_dir.name.lower()).strip("-")[:NAME_LIMIT].strip("-")
        )
        return plain if plain and plain[0].isalpha() else f"run-{plain}".rstrip("-")

    @property
    def whole_machines(self) -> bool:
        return self.nodes > 1 if self.exclusive is None else self.exclusive

    def cpus_of(self, gpus: int) -> int:
        """Of a machine with so many GPUs."""
        return self.cpus or CPUS_PER_GPU * max(1, gpus)

    def memory_of(self, gpus: int) -> int:
        """MiB of such a machine."""
        if self.memory is not None:
            return mebibytes(self.memory)
        return max(MEMORY_LEAST, MEMORY_PER_GPU * gpus)

    @property
    def folder(self) -> Path:
        """Where the launch keeps what it submitted."""
        return self.run_dir / "launch"

    def command(
        self, config: str | None = None, python: str | None = None, run_dir: str | None = None
    ) -> list[str]:
        """The words to run.

        `config`, `python`, `run_dir`: where they are on the other side, if not where they are here.
        """
        moved = [f"run.dir={run_dir}"] if run_dir is not None else []
        return [
            python or self.python,
            "-m",
            "reinforge",
            "train",
            config or str(self.config),
            *self.overrides,
            *moved,
        ]


def mebibytes(size: str) -> int:
    """
    >>> mebibytes("512Mi"), mebibytes("64Gi"), mebibytes("1Ti")
    (512, 65536, 1048576)
    """
    return int(size[:-2]) * MIB[size[-2:]]


def bash_array(name: str, words: list[str]) -> str:
    """
    >>> bash_array("command", ["a b", "it's"])
    'command=(\\'a b\\' \\'it\\'"\\'"\\'s\\')'
    """
    return f"{name}=({' '.join(map(shlex.quote, words))})"


def exports(env: tuple[tuple[str, str], ...]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in env]


def seconds_of(time: str) -> int:
    """Of Slurm's forms of time.

    >>> [seconds_of(t) for t in ("90", "1:30", "2:00:00", "1-12:00:00", "1-12", "1-12:30")]
    [5400, 90, 7200, 129600, 129600, 131400]
    """
    days, dash, rest = time.rpartition("-")
    parts = [int(p) for p in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:  # minutes, minutes:seconds, hours:minutes:seconds
        hours, minutes, seconds = {
            1: (0, parts[0], 0),
            2: (0, parts[0], parts[-1]),
            3: tuple(parts),
        }[len(parts)]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
