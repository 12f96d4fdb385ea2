"""Runs under Ray for tests: one Ray for a module, runs of the tiny model in it, and ways to hurt
their actors.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FAST = ("cluster.kind=ray", "cluster.object_store_gib=0.2")
STARTED_BY = "REINFORGE_TEST_STARTED_BY"  # a variable that every process of our Ray inherits


def need_ray() -> None:
    if find_spec("ray") is None:  # not by importing it: how it authenticates is settled then
        pytest.skip("Ray is not installed: pip install 'reinforge[ray]'", allow_module_level=True)


@contextmanager
def one_ray(cpus: int = 6) -> Iterator[None]:
    from reinforge.cluster.connect import ray_connection
    from reinforge.config.cluster import ClusterConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STARTED_BY, str(os.getpid()))
        with ray_connection(ClusterConfig(kind="ray", object_store_gib=0.3), cpus):
            yield


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(ord(ch) % 2 for ch in c) / max(1, len(c)) for c in completions]


def pid_of(role: str, rank: int = 0) -> int:
    from helpers.open_clusters import open_cluster

    cluster = open_cluster()
    assert cluster is not None
    return cluster.worker_groups[role].where[rank].pid


class Hurting:
    """A reward that does something on its n-th call: it runs in the controller, in the middle of a
    rollout.
    """

    def __init__(self, call: int, action: Callable[[], None], times: int = 1):
        from helpers.open_clusters import watch_clusters

        watch_clusters()
        self.calls = 0
        self.at = call
        self.action = action
        self.times = times
        self.__name__ = "hurting"

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.calls += 1
        if self.calls >= self.at and self.times:
            self.times -= 1
            self.action()
        return letters(completions)


def plain(completions: list[str], **_: Any) -> list[float]:
    return letters(completions)


# the same name in the record of a run that nobody hurts
plain.__name__ = plain.__qualname__ = "hurting"
plain.__module__ = "nowhere"  # in the controller, as the other


def kill(role: str, rank: int = 0, kind: int = signal.SIGKILL) -> Callable[[], None]:
    return lambda: os.kill(pid_of(role, rank), kind)


def later(seconds: float, action: Callable[[], None]) -> None:
    threading.Thread(target=lambda: (time.sleep(seconds), action()), daemon=True).start()


def ray_processes() -> set[int]:
    """Of the Ray that this process started: others may run on the machine."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes()
            inherited = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{STARTED_BY}={os.getpid()}".encode() not in inherited:
            continue
        if b"ray::" in line or b"/raylet" in line or b"gcs_server" in line:
            found.add(int(path.name))
    return found


# ---- toys that live in actors ----


def toy_model(objects: dict[str, Any]) -> Any:
    from helpers.toys import make_model

    return make_model()


def toy_backend(objects: dict[str, Any]) -> Any:
    from helpers.toys import train_config
    from reinforge.backends.local import LocalBackend

    return LocalBackend(objects["model"], train_config(learning_rate=0.1), total_steps=9)


def toy_engine(objects: dict[str, Any]) -> Any:
    from reinforge.engines.native import NativeEngine

    return NativeEngine(objects["model"], kv_gib=0.01)


def slow_passes(engine: Any) -> None:
    """Every pass takes a while, so that a test can act in the middle of answers."""
    hidden = engine.model.hidden

    def slow(*args: Any, **named: Any) -> Any:
        time.sleep(0.02)
        return hidden(*args, **named)

    engine.model.hidden = slow


def slow_ranks(engine: Any) -> None:
    """The same on every rank that generates a share."""
    engine.ranks.call(engine.id, _slow_rank)


def _slow_rank(rank_engine: Any) -> None:
    slow_passes(rank_engine.engine)


def requests_under_way(mailbox: Any) -> int:
    return len(mailbox._running)
