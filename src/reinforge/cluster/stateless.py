"""Actors that keep nothing between calls: those that are lost are made again and asked again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from reinforge.cluster.errors import ActorLost
from reinforge.cluster.ray_cluster import RayCluster
from reinforge.cluster.worker_group import WorkerGroup


class StatelessActors:
    """The actors of a reward model, a reference or a teacher, with one object in them: `name`, made
    by `factory(objects, *args)` when it is first wanted. Whoever asks it and hears `ActorLost`
    calls `replace` and asks again. Several threads may.
    """

    def __init__(
        self,
        cluster: RayCluster,
        role: str,
        name: str,
        factory: Callable[..., Any],
        *args: Any,
        replica: int | None = None,
    ):
        self.cluster = cluster
        self.role = role
        self.replica = replica
        self.name = name
        self._factory = factory
        self._args = args
        self._workers: WorkerGroup | None = None
        self._changing = threading.Lock()
        self._failures = 0  # in a row

    def opened(self) -> WorkerGroup:
        """The actors as they are now, with the object made."""
        with self._changing:
            if self._workers is None:
                self._workers = self._open()
            return self._workers

    def answered(self) -> None:
        """They did what they were asked."""
        self._failures = 0

    def replace(self, workers: WorkerGroup, lost: ActorLost) -> None:
        """New actors in the place of those that were lost, unless somebody else has made them."""
        with self._changing:
            if self._workers is not workers:
                return
            began = time.monotonic()
            self.cluster.note("actor_lost", role=lost.role, how=lost.how)
            self._failures += 1
            if self._failures > self.cluster.cfg.restarts:
                raise lost
            self._stop(workers)
            self._workers = self._open()
            self.cluster.note("actor_restored", role=lost.role, seconds=time.monotonic() - began)

    def close(self) -> None:
        """Nobody will ask them any more: the device is free."""
        with self._changing:
            if self._workers is not None:
                self._stop(self._workers)
            self._workers = None

    def _open(self) -> WorkerGroup:
        workers = self.cluster.workers(self.role, self.replica)
        workers.make(self.name, self._factory, *self._args)
        return workers

    def _stop(self, workers: WorkerGroup) -> None:
        workers.stop()
        self.cluster.worker_groups.pop(workers.role, None)
