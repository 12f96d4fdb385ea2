"""Which way to contain programs works on this machine, and what to say where none does.

It is tried, once per process, by running a program.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from typing import Literal

from reinforge.core.errors import InputError
from reinforge.sandbox.isolation import Isolation
from reinforge.sandbox.process import Process
from reinforge.sandbox.program import Limits, interpreter
from reinforge.sandbox.seccomp import bpf_filter

Backend = Literal["auto", "bubblewrap", "namespaces"]
FIX = (
    "Install bubblewrap, or allow unprivileged user namespaces (sysctl"
    " kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a"
    " container: --security-opt seccomp=unconfined, or --cap-add SYS_ADMIN), or use a remote"
    " sandbox (url), or accept the risk with allow_unsafe: true."
)


@cache
def missing(mode: Literal["own", "bwrap"]) -> str | None:
    """Why this way does not work here, in words; None if it does."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    if bpf_filter() is None:
        return f"no system call filter for {os.uname().machine} (seccomp)"
    if mode == "bwrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        with Process(
            Isolation(mode),
            [interpreter(), "-I", "-S", "-B", "-c", "print(1+1)"],
            {},
            Limits(seconds=20),
        ) as process:
            result = process.finish()
    except InputError as error:  # what the interpreter needs cannot be shown
        return str(error)
    return (
        None
        if result.status == "ok" and result.stdout == b"2\n"
        else result.reason or f"a trial run ended with {result.status}"
    )


def choose(backend: Backend = "auto", allow_unsafe: bool = False) -> Isolation:
    """The way to contain programs here.

    Raises InputError, which names what is missing, unless that was accepted beforehand.
    """
    modes: dict[str, Sequence[Literal["own", "bwrap"]]] = {
        "auto": ("bwrap", "own"),
        "bubblewrap": ("bwrap",),
        "namespaces": ("own",),
    }
    if backend not in modes:
        raise InputError(
            f"unknown sandbox {backend!r}.", where="backend", fix=f"There are: {', '.join(modes)}."
        )
    reasons = []
    for mode in modes[backend]:
        reason = missing(mode)
        if reason is None:
            return Isolation(mode)
        reasons.append(f"{'bubblewrap' if mode == 'bwrap' else 'namespaces'}: {reason}")
    if allow_unsafe:
        return Isolation("bare")
    raise InputError(
        f"code cannot be contained here ({'; '.join(reasons)}).", where="sandbox", fix=FIX
    )
