"""The actors of a run as a whole: the placement group they are in, who works, who waits as a spare,
and what happened to them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reinforge.cluster.connect import (
    PlacementGroup,
    RayError,
    connected,
    enough,
    gpus_there,
    placement_group,
    ray,
    remove_placement_group,
)
from reinforge.cluster.placement import ActorPlacement, PlacementPlan, plan, ranks_for
from reinforge.cluster.worker_group import ActorLost, WorkerGroup
from reinforge.config.cluster import ClusterConfig

TRAINERS = ("policy", "critic")


class RayCluster:
    """The placement group, the worker groups in it, and what happened to them."""

    def __init__(self, cfg: ClusterConfig, made: PlacementPlan):
        self.cfg = cfg
        self.plan = made
        self.modules: Sequence[str] = ()  # that actors will need
        self.worker_groups: dict[str, WorkerGroup] = {}
        self.events: list[dict[str, Any]] = []
        # where events go, while a run is open
        self.tell: Callable[[dict[str, Any]], None] | None = None
        self._group: PlacementGroup | None = None
        self._spares: dict[int, list[Any]] = {}  # by bundle

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, cfg: ClusterConfig, device: str, *, ranks: int | None, critic: bool, rewards: int
    ) -> Iterator[RayCluster]:
        """`device`: of the models.

        `ranks`: None: as many as the GPUs that nobody else needs. All actors end with the block.
        """
        more: dict[str, Any] = {"critic": critic, "rewards": rewards}
        with connected(
            cfg,
            plan(cfg, ranks=ranks or os.cpu_count() or 1, **more, gpu=False).needed.get("CPU", 0),
        ):
            gpu = device != "cpu" and gpus_there() > 0
            made = plan(
                cfg,
                ranks=ranks or ranks_for(cfg, gpus_there() if gpu else 0, **more),
                **more,
                gpu=gpu,
            )
            enough(made.needed)
            cluster = cls(cfg, made)
            try:
                yield cluster
            finally:
                cluster.close()

    def workers(self, role: str, replica: int | None = None) -> WorkerGroup:
        """The actors of a role, started where they are not: all ranks of it, or one replica."""
        name = role if replica is None else f"{role}-{replica}"
        if name not in self.worker_groups:
            places = self.plan.places[role]
            self.worker_groups[name] = WorkerGroup(
                self, name, places if replica is None else [places[replica]]
            )
            self.worker_groups[name].start()
        return self.worker_groups[name]

    def begin(self) -> None:
        """Starts everybody who is not there, at the same time: importing takes longer than all the
        rest.
        """
        for role, places in self.plan.places.items():
            for replica in [None] if role in TRAINERS else range(len(places)):
                self.workers(role, replica)

    def group(self) -> PlacementGroup:
        if self._group is None:
            self._group = placement_group(self.plan.bundles, strategy=self.plan.strategy)
            if not self._group.wait(self.cfg.start):
                have = ", ".join(
                    f"{count:g} {name}"
                    for name, count in ray.available_resources().items()
                    if name in ("CPU", "GPU")
                )
                self.close()
                raise ActorLost(
                    "cluster",
                    f"{self.plan.bundles} could not be placed within {self.cfg.start:g} s (free:"
                    f" {have or 'nothing'})",
                )
        return self._group

    def spare(self, place: ActorPlacement) -> Any | None:
        """An actor that waits there with everything imported.

        One with a GPU cannot wait: Ray gives a GPU to who is made for it.
        """
        waiting = self._spares.get(place.bundle, [])
        return waiting.pop() if waiting and not place.gpus else None

    def warm_up(self, make: Callable[[ActorPlacement], Any]) -> None:
        """Others in the places of actors, to be ready when one of those is lost.

        Returns at once.
        """
        for place in (
            place for places in self.plan.places.values() for place in places if not place.gpus
        ):
            waiting = self._spares.setdefault(place.bundle, [])
            while len(waiting) < self.cfg.spares:
                waiting.append(make(ActorPlacement(place.bundle, 0.0, 0.0)))
                waiting[-1].warm.remote(self.modules)

    def reset(self) -> None:
        """Ends every actor that trains; the next `workers` starts it anew, in the same place or, of
        a machine that is gone, in another. Those that keep nothing that counts, engines and reward
        models, stay and forget what they were doing.
        """
        for name, workers in list(self.worker_groups.items()):
            if name in TRAINERS or not workers.cleared():
                workers.stop()
                del self.worker_groups[name]

    def close(self) -> None:
        for workers in self.worker_groups.values():
            workers.stop(gently=True)
        self.worker_groups = {}
        self._spares = {}
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
            self._group = None

    def note(self, kind: str, **fields: Any) -> None:
        """A typed event of the run's log.

        What happens while no log is open is written when the next one is.
        """
        event = {"kind": kind, "fault": len(self.events), "at": time.time(), **fields}
        self.events.append(event)
        if self.tell is not None:
            self.tell(event)
