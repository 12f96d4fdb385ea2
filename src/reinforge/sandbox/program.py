"""The nouns of the sandbox: a program somebody else wrote, what it may use, and what came of it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from reinforge.core.errors import InputError

Status = Literal["ok", "timeout", "memory", "output", "crashed", "killed", "refused"]
WORK = "/tmp"  # the only place a contained program may write to; private, capped, gone with it
LANGUAGES = ("python", "c", "bash", "node")
SYSTEM_TOOLS = ("/usr/bin", "/bin")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Program:
    """A program to be run in the sandbox: code, input and files."""

    code: str
    language: str = "python"
    stdin: str | bytes = b""
    # relative names, put beside the program
    files: Mapping[str, str | bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.files:
            if not name or name.startswith("/") or ".." in Path(name).parts or "\0" in name:
                raise InputError(
                    f"{name!r} is no name for a file of a program.",
                    fix="Use a relative name without '..'.",
                )


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use.

    Beyond `seconds`, `memory_mb` or `output_kb` all its processes are killed.
    """

    seconds: float = 10.0  # wall clock, monotonic, from the moment the program starts
    # of all its processes together; None: `seconds`, rounded down, plus two
    cpu_seconds: int | None = None
    # of all its processes together, files included; also the address space of each (not for node)
    memory_mb: int = 512
    output_kb: int = 1024  # of stdout, and again of stderr
    disk_mb: int = 64
    files: int = 4096  # how many files there may be
    processes: int = 32
    descriptors: int = 256
    descriptors_in_all: int = 512  # pipes and sockets hold memory that is counted nowhere else
    packages: tuple[str, ...] = ()  # folders that Python programs may import from, read only

    def __post_init__(self) -> None:
        for name in (
            "seconds",
            "memory_mb",
            "output_kb",
            "disk_mb",
            "files",
            "processes",
            "descriptors",
            "descriptors_in_all",
        ):
            if not 0 < getattr(self, name) < 1e9:
                raise InputError(
                    f"{name} must be above 0, not {getattr(self, name)}.", where=f"limits.{name}"
                )


@dataclass(frozen=True, slots=True)
class Result:
    """`ok` is exit code 0 and says nothing about correctness: see judge.py."""

    status: Status
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0  # wall clock of the program
    cpu_seconds: float = 0.0  # of all its processes
    memory_mb: float = 0.0  # largest resident size of one process
    reason: str = ""  # in words, where the status does not say it all
    unsafe: bool = False  # ran without containment, because allow_unsafe said so
    # took, or wanted, more than one core for a while: those beside it may have starved
    greedy: bool = False

    @property
    def failed_here(self) -> bool:
        """Ours, not the program's: it was never started, or its sandbox vanished.

        Says nothing about the program.
        """
        return self.status == "refused" or (self.status == "killed" and self.signal is None)


def interpreter() -> str:
    """The Python that programs run in: the one that our environment was made from, without our
    packages.
    """
    return str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())


def package_paths(packages: tuple[str, ...]) -> list[str]:
    """Where a program sees those folders."""
    return [f"/packages/{i}" for i in range(len(packages))]


def command(program: Program, limits: Limits) -> tuple[list[str], dict[str, bytes]]:
    """The argument vector and all files of a program; the vector's first entry is an
    absolute path.
    """
    files = {name: _bytes(text) for name, text in program.files.items()}
    match program.language:
        case "python":
            files["main.py"] = _bytes(program.code)
            if limits.packages:
                start = (
                    f"import sys,runpy; sys.path+={package_paths(limits.packages)!r};"
                    " sys.argv=['main.py']; runpy.run_path('main.py',run_name='__main__')"
                )
                return [interpreter(), "-I", "-B", "-X", "utf8", "-c", start], files
            return [interpreter(), "-I", "-B", "-X", "utf8", "main.py"], files
        case "bash":
            return [_found("bash"), "--noprofile", "--norc", "main.sh"], files | {
                "main.sh": _bytes(program.code)
            }
        case "c":
            build = f"{_found('gcc')} -O2 -std=gnu17 -o main main.c -lm && exec ./main"
            return [_found("bash"), "--noprofile", "--norc", "-c", build], files | {
                "main.c": _bytes(program.code)
            }
        case "node":
            heap = f"--max-old-space-size={limits.memory_mb}"
            return [_found("node"), heap, "main.js"], files | {"main.js": _bytes(program.code)}
    raise InputError(
        f"unknown language {program.language!r}.",
        where="language",
        fix=f"There are: {', '.join(LANGUAGES)}.",
    )


def tools() -> list[str]:
    """Programs of other languages that are installed outside the folders of the system, each a
    single file.
    """
    found = (_tool(name) for name in ("bash", "node"))
    return [path for path in found if path is not None and not path.startswith(SYSTEM_TOOLS)]


def _tool(name: str) -> str | None:
    """Where it is. A compiler is more than one file, so only the system's is used."""
    path = shutil.which(name, path=":".join(SYSTEM_TOOLS)) or (
        shutil.which(name) if name != "gcc" else None
    )
    return None if path is None else str(Path(path).absolute())


def _found(name: str) -> str:
    path = _tool(name)
    if path is None:
        raise InputError(
            f"{name} is not installed here.",
            where="language",
            fix=f"Install {name} (the system's package), or choose another language.",
        )
    return path


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
