"""The other side of `pool.py`: a process that imports a reward once, and forks a worker whenever it
is given a socket.

A message on the control socket is either a socket for a new worker, or the number of a worker that
must go. Workers speak JSON with a length before it, over their own socket; nothing is pickled. What
a reward prints goes to standard error, up to a limit. The parent's end of the control socket is the
life line: when it closes, everything here dies.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import io
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from reinforge.core.errors import InputError
from reinforge.core.frames import frame, read_frame
from reinforge.rewards.adapt import adapt
from reinforge.rewards.load import load_function
from reinforge.rewards.outcome import checked
from reinforge.rewards.raised import place_of
from reinforge.rewards.wire import decode

PRINTED = 20_000  # characters that one call may print
DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def packed(message: Any) -> bytes:
    return frame(json.dumps(message).encode())


class PrintLimit(io.TextIOBase):
    """Standard output of a reward: goes to the real standard error until a call has printed too
    much.
    """

    def __init__(self, fd: int):
        self.fd = fd
        self.left = PRINTED

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        shown = text[: max(0, self.left)]
        self.left = self.left - len(text)
        if shown:
            note = "" if self.left >= 0 else "\n(what else this call prints is dropped)\n"
            os.write(self.fd, (shown + note).encode("utf-8", "replace"))
        return len(text)


def main(control: socket.socket, spec: dict[str, Any]) -> None:
    printed = PrintLimit(os.dup(2))
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # C code writes here, and nobody reads
        os.dup2(nothing, fd)
    sys.stdout = sys.stderr = printed
    function: Callable[..., Any] | str
    try:
        for module in spec["preload"]:
            importlib.import_module(module)
        function = adapt(load_function(spec["target"], "rewards"), spec["kind"])
    except BaseException as error:
        function = f"{type(error).__name__}: {error}"
    children: set[int] = set()
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 64, 1)
        if sockets:
            pid = os.fork()
            if pid == 0:
                control.close()
                serve(socket.socket(fileno=sockets[0]), function, spec, printed)
            children.add(pid)
            os.close(sockets[0])
        elif message:
            end(int(message), children)
        else:
            for pid in list(children):
                end(pid, children)
            return


def end(pid: int, children: set[int]) -> None:
    """Kills a worker with all it started.

    It is our child and not yet waited for, so the number is still its own.
    """
    if pid in children:
        children.discard(pid)
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os.waitpid(pid, 0)


def serve(
    channel: socket.socket,
    function: Callable[..., Any] | str,
    spec: dict[str, Any],
    printed: PrintLimit,
) -> NoReturn:
    """A worker: says hello, then answers calls until its socket closes."""
    problem = function if isinstance(function, str) else None
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if spec["memory"] is not None:
            limit_memory(int(spec["memory"]))
    except (OSError, ValueError, MemoryError) as error:
        problem = problem or f"its limits cannot be set ({type(error).__name__}: {error})"
    try:
        channel.sendall(packed({"pid": os.getpid(), "problem": problem}))
        while problem is None and not isinstance(function, str):
            request = receive(channel)
            printed.left = PRINTED
            channel.sendall(packed({**answer(function, request), "nonce": request["nonce"]}))
    except BaseException:  # the other end is gone, or memory is: nobody to tell
        pass
    os._exit(0)


def limit_memory(most: int) -> None:
    """`most` bytes beside what is there now, and never more than this process was allowed already
    (`ulimit -v`).
    """
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    allowed = [
        limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY
    ]
    limit = min([now + most, *allowed])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def receive(channel: socket.socket) -> dict[str, Any]:
    return json.loads(read_frame(channel))


def answer(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        result = function(**decode(request["given"]))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return {"scores": checked(request["name"], result, request["count"])}
    except InputError as error:
        return {"input_error": [error.what, error.where, error.fix]}
    except BaseException as error:
        place, line = place_of(error)
        return {
            "raised": type(error).__name__,
            "said": str(error)[:2000],
            "trace": traceback.format_exc()[-4000:],
            "place": place,
            "line": line,
        }


async def _awaited(result: Any) -> Any:
    return await result


def run() -> None:
    """Started by `pool.py` with the number of the control socket and the reward's description as
    arguments.
    """
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
