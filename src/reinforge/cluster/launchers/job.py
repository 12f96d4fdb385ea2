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
    cpus: int = 8  # of each pod
    memory: str = "64Gi"
    env: tuple[tuple[str, str], ...] = ()
    python: str = sys.executable
    chdir: Path = field(default_factory=Path.cwd)

    def __post_init__(self) -> None:
        for key, value, form in (
            ("--partition", self.partition, WORD),
            ("--account", self.account, WORD),
            ("--time", self.time, TIME),
            ("--image", self.image, IMAGE),
        ):
            if value is not None and not form.fullmatch(value):
                raise InputError(
                    f"{value!r} is not one.", where=key, fix="See `reinforge launch --help`."
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
