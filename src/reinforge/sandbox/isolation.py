"""How programs are contained on this machine, and what of it they see.

`namespaces` is our own launcher (launcher.py); `bubblewrap` lets that program make the namespaces
and the root. Both end in the same uid, limits and system call filter. Which of them works here is
found out by detect.py.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from reinforge.core.errors import InputError
from reinforge.sandbox.program import MIB, WORK, Limits, interpreter, package_paths, tools
from reinforge.sandbox.seccomp import bpf_filter

LAUNCHER = Path(__file__).with_name("launcher.py")
FOOTPRINT = Path(__file__).with_name("footprint.py")
SYSTEM = (
    *("/bin", "/lib", "/lib32", "/lib64", "/libx32"),
    *(
        "/usr/bin",
        "/usr/lib",
        "/usr/lib32",
        "/usr/lib64",
        "/usr/libx32",
        "/usr/libexec",
        "/usr/include",
    ),
    *("/usr/share/zoneinfo", "/usr/share/nodejs"),
)
SETTINGS = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
)
# a zero device makes shared memory, which nobody counts, for whoever maps it; the full one gives
# zeros too, and does not
DEVICES = (
    *(("/dev/null", "/dev/null"), ("/dev/full", "/dev/zero"), ("/dev/full", "/dev/full")),
    *(("/dev/random", "/dev/random"), ("/dev/urandom", "/dev/urandom")),
)
TEXTS = (
    ("/etc/passwd", f"sandbox:x:1000:1000::{WORK}:/bin/sh\n"),
    ("/etc/group", "sandbox:x:1000:\n"),
    ("/etc/hosts", "127.0.0.1 localhost\n"),
)
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "TMPDIR": WORK,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "USER": "sandbox",
}


@dataclass(frozen=True, slots=True)
class Isolation:
    """Which containment programs run in. `sandbox/detect.py` finds one that works here."""

    mode: Literal["own", "bwrap", "bare", "remote"]
    url: str | None = None  # of a remote sandbox

    @property
    def unsafe(self) -> bool:
        return self.mode == "bare"


@dataclass(frozen=True, slots=True)
class MachineView:
    """What a program sees of the machine."""

    binds: tuple[tuple[str, str], ...] = ()  # (source, path) of what is shown, read only
    links: tuple[tuple[str, str], ...] = ()  # (target, name) of symbolic links to make
    empty: tuple[str, ...] = ()  # folders inside what is shown that are shown empty


@cache
def layout(packages: tuple[str, ...] = ()) -> MachineView:
    """The folders of the system, what the interpreter needs, and the packages that were asked for.

    No package that was not.
    """
    links = tuple((os.readlink(p), p) for p in SYSTEM if os.path.islink(p))
    folders = [p for p in SYSTEM if os.path.isdir(p) and not os.path.islink(p)]
    needed = footprint()
    for path in (interpreter(), *needed["library"], *needed["libraries"], *tools()):
        if _below(path, [WORK]):
            raise InputError(
                f"{path} is below {WORK}, where a program has its own folder.",
                where="sandbox",
                fix="Use a Python that is installed somewhere else.",
            )
        if not _below(path, folders):
            folders.append(path)
    installed = [
        p
        for pattern in ("/usr/lib*/python*/site-packages", "/usr/lib*/python*/dist-packages")
        for p in glob.glob(pattern)
    ]
    for package in packages:
        if not os.path.isdir(package) or not os.stat(package).st_mode & 0o005:
            raise InputError(
                f"{package} is no folder that everybody may read.",
                where="packages",
                fix="Name folders with Python packages; chmod o+rX them.",
            )
    settings = [(p, p) for p in SETTINGS if os.path.exists(p)]
    devices = [(source, path) for source, path in DEVICES if os.path.exists(source)]
    shown = [
        *((p, p) for p in folders),
        *settings,
        *devices,
        *zip(packages, package_paths(packages), strict=True),
    ]
    return MachineView(
        tuple((os.path.realpath(source), path) for source, path in shown),
        (*links, (WORK, "/dev/shm"), ("/proc/self/fd", "/dev/fd")),
        tuple(sorted({*needed["installed"], *(p for p in installed if os.path.realpath(p) == p)})),
    )


@cache
def footprint() -> dict[str, list[str]]:
    """The files of the interpreter, from itself: `library`, its standard library; `libraries`, the
    shared ones that it is linked to; `installed`, the folders inside the former with packages that
    somebody installed.
    """
    asked = [interpreter(), "-I", "-S", "-B", str(FOOTPRINT)]
    try:
        said = subprocess.run(
            asked, capture_output=True, check=True, env={}, cwd="/", timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(
            f"{interpreter()} does not say what it needs: {error}", where="sandbox"
        ) from error
    found: dict[str, list[str]] = json.loads(said)
    return found


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def job_of(
    isolation: Isolation,
    argv: Sequence[str],
    files: dict[str, bytes],
    limits: Limits,
    work: str,
    node: bool,
    driver: str | None = None,
) -> dict[str, Any]:
    """What the launcher is told.

    Node reserves address space by the gigabyte: there only what it uses is limited.
    """
    seen = MachineView() if isolation.unsafe else layout(limits.packages)
    memory = limits.memory_mb * MIB
    return {
        "mode": isolation.mode,
        "argv": list(argv),
        "driver": driver,  # what the arguments start, for a launcher that has it loaded
        "packages": package_paths(limits.packages),
        # whose it is, for `ps e`
        "env": sorted(
            (
                ENVIRONMENT | {"HOME": work, "TMPDIR": work, "REINFORGE_RUN": str(os.getpid())}
            ).items()
        ),
        "content": sorted(files.items()),
        **root_of(seen),
        "texts": list(TEXTS),
        "work": work,
        "filter": bpf_filter(),
        "limits": {
            "cpu": limits.cpu_seconds or int(limits.seconds) + 2,
            "space": None if node else memory,
            "memory": memory,
            "disk": limits.disk_mb * MIB,
            "files": limits.files,
            "descriptors": limits.descriptors,
            "descriptors_in_all": limits.descriptors_in_all,
            "processes": None if isolation.unsafe else limits.processes,
        },
    }


def root_of(seen: MachineView) -> dict[str, Any]:
    """The same, as the launcher is told."""
    return {"binds": list(seen.binds), "links": list(seen.links), "empty": list(seen.empty)}


def arguments(isolation: Isolation, limits: Limits, info_fd: int, fds: Sequence[int]) -> list[str]:
    """The command that is started outside: our launcher, or bubblewrap with the launcher in it."""
    launch = [interpreter(), "-I", "-S", "-B"]
    if isolation.mode != "bwrap":
        return [*launch, str(LAUNCHER), *map(str, fds)]
    seen = layout(limits.packages)
    flags = [
        "--unshare-net",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--die-with-parent",
        "--as-pid-1",
    ]
    flags += (
        ["--new-session", "--hostname", "sandbox"]
        if os.getuid() == 0
        else ["--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    )
    # for the launcher, which gives them up
    for capability in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
        flags += ["--cap-add", capability]
    for folder in sorted({str(p) for _, path in seen.binds for p in list(Path(path).parents)[:-1]}):
        flags += ["--perms", "0755", "--dir", folder]  # it would make them with 0700
    for source, path in seen.binds:
        flags += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", source, path]
    for path in seen.empty:
        flags += ["--tmpfs", path, "--remount-ro", path]
    flags += ["--ro-bind", str(LAUNCHER), "/launcher.py", "--dir", "/tmp", "--proc", "/proc"]
    for target, name in seen.links:
        flags += ["--symlink", target, name]
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    return [
        bwrap,
        "--info-fd",
        str(info_fd),
        *flags,
        "--remount-ro",
        "/",
        "--",
        *launch,
        "/launcher.py",
        *map(str, fds),
    ]
