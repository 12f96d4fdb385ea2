"""The other side of `bridge.py`: a program, run by an interpreter that knows neither torch nor this
package.

It imports the environment's library once, then forks a worker for every socket that it is given. It
ends when its own socket closes, and its workers die with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import inspect
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
LINE = 64 << 20


def bring_package(folder: str) -> None:
    """Makes `reinforge` importable without the directory that it stands in: there may be a whole
    other environment.
    """
    spec = importlib.util.spec_from_file_location(
        "reinforge", Path(folder) / "__init__.py", submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["reinforge"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main(control: socket.socket, spec: dict[str, Any]) -> None:
    try:
        make = prepared(spec)
    except Exception as error:
        control.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return
    control.sendall(b"{}\n")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers leave no zombies
    parent = os.getpid()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        [fd] = fds
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() == parent:
                os.setsid()  # whatever it starts goes with it
                control.close()
                # an environment may have processes of its own
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                work(socket.socket(fileno=fd), make)
            os._exit(0)
        os.close(fd)


def prepared(spec: dict[str, Any]) -> Callable[[], Any]:
    """What makes an environment, its library imported."""
    from reinforge.rewards.load import load_function

    target = load_function(spec["target"], "env.name")
    if hasattr(target, "prepare"):
        target.prepare(*spec["given"], **spec["options"])
    return lambda: target(*spec["given"], **spec["options"])


def work(connection: socket.socket, make: Callable[[], Any]) -> None:
    """One episode.

    The loop runs between the turns too: connections that an environment holds stay alive.
    """

    async def serve() -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=LINE)
        writer.write(json.dumps({"pid": os.getpid()}).encode() + b"\n")
        env: Any = None
        while line := await reader.readline():
            asked = json.loads(line)
            try:
                if env is None:
                    env = make()
                answer = {"result": await played(env, asked)}
                text = json.dumps(answer, default=float, allow_nan=False)
            except Exception as error:
                text = json.dumps({"error": f"{type(error).__name__}: {error}"})
            writer.write(text.encode() + b"\n")
            await writer.drain()

    asyncio.run(serve())


async def played(env: Any, asked: dict[str, Any]) -> dict[str, Any] | None:
    from reinforge.core.env import Action, Call
    from reinforge.core.row import Row, Stop

    if asked["op"] == "reset":
        result = env.reset(Row(**asked["row"]), asked["seed"])
    elif asked["op"] == "step":
        given = asked["action"]
        calls = tuple(Call(**call) for call in given["calls"])
        result = env.step(Action(**{**given, "calls": calls, "stop": Stop(given["stop"])}))
    else:
        result = env.close()
    if inspect.isawaitable(result):
        result = await result
    return plain(result)


def plain(result: Any) -> dict[str, Any] | None:
    """An Observation or a Step as JSON can hold it."""
    if result is None:
        return None
    if hasattr(result, "messages"):
        return {"messages": result.messages, "tools": result.tools, "tokens": result.tokens}
    return {
        "observation": plain(result.observation),
        "reward": result.reward,
        "done": result.done,
        "truncated": result.truncated,
        "metrics": dict(result.metrics),
    }


if __name__ == "__main__":
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [
        p for p in sys.path if not p or str(Path(p).resolve()) != here
    ]  # modules there have the names of the libraries they adapt
    described = json.loads(sys.argv[2])
    bring_package(described["package"])
    main(socket.socket(fileno=int(sys.argv[1])), described)
