"""The actors of a run as a whole: who works, and what happened to them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reinforge.cluster.connect import check_resources, gpu_count, ray_connection
from reinforge.cluster.placement import PlacementPlan, plan, ranks_for
from reinforge.cluster.resources import ResourcePool
from reinforge.cluster.worker_group import WorkerGroup
from reinforge.config.cluster import ClusterConfig

TRAINERS = ("policy", "critic")
REPLICATED = ("engine", "reward")  # roles whose actors are no ranks: each is a group of its own


class RayCluster:
    """The worker groups of a run, the resources that they share, and what happened to them."""

    def __init__(self, cfg: ClusterConfig, made: PlacementPlan, modules: Sequence[str] = ()):
        """`modules`: what actors will need, imported while they wait."""
        self.cfg = cfg
        self.plan = made
        self.resources = ResourcePool(cfg, made, modules)
        self.worker_groups: dict[str, WorkerGroup] = {}
        self.events: list[dict[str, Any]] = []
        # where events go, while a run is open
        self.tell: Callable[[dict[str, Any]], None] | None = None

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        cfg: ClusterConfig,
        device: str,
        *,
        ranks: int | None,
        critic: bool,
        rewards: int,
        reference: bool = False,
        teachers: int = 0,
        modules: Sequence[str] = (),
    ) -> Iterator[RayCluster]:
        """`device`: of the models. The roles are those of `placement.plan`.

        `ranks`: None: as many as the GPUs that nobody else needs. All actors end with the block.
        """
        more: dict[str, Any] = {
            "critic": critic,
            "rewards": rewards,
            "reference": reference,
            "teachers": teachers,
        }
        with ray_connection(
            cfg,
            plan(cfg, ranks=ranks or os.cpu_count() or 1, **more, gpu=False).needed.get("CPU", 0),
        ):
            gpu = device != "cpu" and gpu_count() > 0
            made = plan(
                cfg,
                ranks=ranks or ranks_for(cfg, gpu_count() if gpu else 0, **more),
                **more,
                gpu=gpu,
            )
            check_resources(made.needed)
            cluster = cls(cfg, made, modules)
            try:
                yield cluster
            finally:
                cluster.close()

    def workers(self, role: str, replica: int | None = None) -> WorkerGroup:
        """The actors of a role, started where they are not: all ranks of it, or one replica."""
        workers = self._launched(role, replica)
        workers.ready()
        return workers

    def _launched(self, role: str, replica: int | None) -> WorkerGroup:
        name = role if replica is None else f"{role}-{replica}"
        if name not in self.worker_groups:
            places = self.plan.places[role]
            if replica is not None:
                places = [places[replica]]
            self.worker_groups[name] = WorkerGroup(self.resources, name, places)
            self.worker_groups[name].launch()
        return self.worker_groups[name]

    def begin(self) -> None:
        """Starts everybody who is not there, at the same time: importing takes longer than all the
        rest.
        """
        launched = [
            self._launched(role, replica)
            for role, places in self.plan.places.items()
            for replica in (range(len(places)) if role in REPLICATED else [None])
        ]
        for workers in launched:
            workers.ready()

    def reset(self) -> None:
        """Ends every actor that trains; the next `workers` starts it anew, in the same place or, of
        a machine that is gone, in another. Those that keep nothing that counts, engines, reward
        models, references and teachers, stay and forget what they were doing, unless they are
        ranks.
        """
        for name, workers in list(self.worker_groups.items()):
            if name in TRAINERS or len(workers.actors) > 1 or not workers.clear():
                workers.stop()
                del self.worker_groups[name]

    def close(self) -> None:
        for workers in self.worker_groups.values():
            workers.stop(gently=True)
        self.worker_groups = {}
        self.resources.close()

    def note(self, kind: str, **fields: Any) -> None:
        """A typed event of the run's log.

        What happens while no log is open is written when the next one is.
        """
        event = {"kind": kind, "fault": len(self.events), "at": time.time(), **fields}
        self.events.append(event)
        if self.tell is not None:
            self.tell(event)
