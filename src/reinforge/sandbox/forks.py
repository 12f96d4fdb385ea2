"""Runs as a script of its own: a launcher that is up already, with our drivers loaded.

It forks boxes.

A box is a process 1 with namespaces and a root of its own, and has one run after the other. Between
two of them it kills whatever is left in there, throws the writable folder away, makes a fresh one
and counts processes from 2 again. Nothing else can stay behind: the rest of the root is read only,
and the system call filter leaves a program no socket with a name, no queue, segment, key or mount.
A box whose run was killed from outside is gone, and the next one is a new one.

As root the launcher also makes, once, what all its boxes share: a root of read-only folders and a
network without interfaces. Making those anew is what many at once would wait for, since the kernel
does it one at a time for the whole machine.
"""

from __future__ import annotations

import gc
import importlib
import json
import marshal
import os
import socket
import sys
import types
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
WORK = "/tmp"


def prepare(launcher: Any, job: dict[str, Any]) -> None:
    """Ends the process if it cannot be done half way: whoever asks then has launchers that share
    nothing.
    """
    if os.getuid() != 0:
        return
    launcher.must("unshare", launcher.CLONE_NEWNS | launcher.CLONE_NEWNET)
    launcher.new_root(job, whole=False)
    launcher.PREPARED.append(True)


def box(launcher: Any, job: dict[str, Any], asked: socket.socket) -> None:
    """Makes the namespaces, hands a handle on process 1 over, and waits for it. Never returns."""
    try:
        launcher.close_all_but(0, 1, 2, asked.fileno())
        launcher.must("prctl", launcher.PR_SET_PDEATHSIG, 9, 0, 0, 0)
        launcher.new_namespaces()
        first = os.fork()
        if first == 0:
            if launcher.PREPARED:
                launcher.finish_root()
            else:
                launcher.new_root(job)
            launcher.first_process()
            asked.send(b"up")
            while one_run(launcher, asked):
                pass
            os._exit(0)
        socket.send_fds(asked, [b"first"], [os.pidfd_open(first)])
        launcher.close_all_but()
        os.waitpid(first, 0)
    except BaseException as error:
        asked.send(f"error {error or type(error).__name__}".encode()[:500])
    os._exit(0)


def one_run(launcher: Any, asked: socket.socket) -> bool:
    """The message has the limits that process 1 needs; its descriptors are stdin, stdout, stderr,
    control, report and the channel. The rest of the job is read by the fork: process 1 has nothing
    of a run that a later fork could find in its memory.
    """
    message, handed, _, _ = socket.recv_fds(asked, 512, 16)
    if not message:
        return False
    limits = marshal.loads(message)
    launcher.mount_work(limits, WORK)
    control, report, *channel = handed[3:]
    main = os.fork()
    if main == 0:
        try:
            for target, fd in enumerate(handed[:3]):
                os.dup2(fd, target)
            launcher.run(handed[3:], boxed=True)
        finally:
            os._exit(127)
    for fd in (*handed[:3], *channel):
        os.close(fd)
    launcher.watch(main, control, report, limits, WORK)
    clean(launcher)
    os.write(report, b"clean\n")
    os.close(control)
    os.close(report)
    return True


def clean(launcher: Any) -> None:
    """Nothing of the run stays."""
    try:
        os.kill(-1, 9)
    except ProcessLookupError:
        pass
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
    launcher.must("umount2", WORK.encode(), launcher.MNT_DETACH)
    try:
        launcher.write_file("/proc/sys/kernel/ns_last_pid", "1")
    except OSError:
        # then processes are counted on, which gives nothing away but how many there were
        pass


def serve(requests: int, job: dict[str, Any]) -> None:
    """Forks a box for each message: its descriptor is the socket that the box is asked by.

    The answer is a handle on the fork. Ends with whoever asks.
    """
    # the drivers, and nothing else of the package
    for name, path in (("reinforge", []), ("reinforge.sandbox", [HERE])):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = path
    launcher = importlib.import_module("reinforge.sandbox.launcher")
    for name in ("solution", "asserts"):
        launcher.DRIVERS[name] = importlib.import_module(f"reinforge.sandbox.{name}")
    asked = socket.socket(fileno=requests)
    if job["prepare"]:
        prepare(launcher, job)
    gc.collect()
    gc.freeze()
    asked.send(b"up")
    while True:
        message, handed, _, _ = socket.recv_fds(asked, 1, 16)
        if not message:
            os._exit(0)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        pid = os.fork()
        if pid == 0:
            os.setsid()
            box(launcher, job, socket.socket(fileno=handed[0]))
        handle = os.pidfd_open(pid)
        socket.send_fds(asked, [str(pid).encode()], [handle])
        for fd in (handle, *handed):
            os.close(fd)


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
