"""Runs as a script of its own: a launcher that is up already. It forks for each run, with our drivers loaded.

As root it also makes, once, what all its runs share: a root of read-only folders and a network without interfaces. Making those anew
for each run is what many runs at once would wait for, since the kernel does it one at a time for the whole machine. A run still has
processes, users, writable files, /proc, ipc and host name of its own, and its system call filter leaves it no socket to use a network with.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import types

HERE = os.path.dirname(os.path.abspath(__file__))


def prepare(launcher: types.ModuleType, job: dict[str, object]) -> None:
    """Ends the process if it cannot be done half way: whoever asks then has launchers that share nothing."""
    if os.getuid() != 0:
        return
    launcher.must("unshare", launcher.CLONE_NEWNS | launcher.CLONE_NEWNET)
    launcher.new_root(job, whole=False)
    launcher.PREPARED.append(True)


def serve(requests: int, job: dict[str, object]) -> None:
    """Forks for each message: its descriptors are stdin, stdout, stderr and those that `run` is handed. The answer is a handle on
    the fork. Ends with whoever asks."""
    for name, path in (("reinforge", []), ("reinforge.sandbox", [HERE])):  # the drivers, and nothing else of the package
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
            for target, fd in enumerate(handed[:3]):
                os.dup2(fd, target)
            launcher.run(handed[3:])
        handle = os.pidfd_open(pid)
        socket.send_fds(asked, [str(pid).encode()], [handle])
        for fd in (handle, *handed):
            os.close(fd)


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
