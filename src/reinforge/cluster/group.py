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
from reinforge.cluster.crew import Crew, Lost
from reinforge.cluster.placement import Place, Plan, plan, ranks_for
from reinforge.config.cluster import ClusterConfig

TRAINERS = ("policy", "critic")

_open: Cluster | None = None


def current() -> Cluster | None:
    """The cluster that is open."""
    return _open


class Cluster:
    """The placement group, the crews in it, and what happened to them."""

    def __init__(self, cfg: ClusterConfig, made: Plan):
        self.cfg = cfg
        self.plan = made
        self.modules: Sequence[str] = ()  # that actors will need
        self.crews: dict[str, Crew] = {}
        self.events: list[dict[str, Any]] = []
        # where events go, while a run is open
        self.tell: Callable[[dict[str, Any]], None] | None = None
        self._group: PlacementGroup | None = None
        self._spares: dict[int, list[Any]] = {}  # by bundle

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, cfg: ClusterConfig, device: str, *, ranks: int | None, critic: bool, rewards: int
    ) -> Iterator[Cluster]:
        """`device`: of the models.

        `ranks`: None: as many as the GPUs that nobody else needs. All actors end with the block.
        """
        global _open
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
            cluster = _open = cls(cfg, made)
            try:
                yield cluster
            finally:
                _open = None
                cluster.close()

    def crew(self, role: str, replica: int | None = None) -> Crew:
        """The actors of a role, started where they are not: all ranks of it, or one replica."""
        name = role if replica is None else f"{role}-{replica}"
        if name not in self.crews:
            places = self.plan.places[role]
            self.crews[name] = Crew(self, name, places if replica is None else [places[replica]])
            self.crews[name].start()
        return self.crews[name]

    def begin(self) -> None:
        """Starts everybody who is not there, at the same time: importing takes longer than all the
        rest.
        """
        for role, places in self.plan.places.items():
            for replica in [None] if role in TRAINERS else range(len(places)):
                self.crew(role, replica)

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
                raise Lost(
                    "cluster",
                    f"{self.plan.bundles} could not be placed within {self.cfg.start:g} s (free:"
                    f" {have or 'nothing'})",
                )
        return self._group

    def spare(self, place: Place) -> Any | None:
        """An actor that waits there with everything imported.

        One with a GPU cannot wait: Ray gives a GPU to who is made for it.
        """
        waiting = self._spares.get(place.bundle, [])
        return waiting.pop() if waiting and not place.gpus else None

    def warm_up(self, make: Callable[[Place], Any]) -> None:
        """Others in the places of actors, to be ready when one of those is lost.

        Returns at once.
        """
        for place in (
            place for places in self.plan.places.values() for place in places if not place.gpus
        ):
            waiting = self._spares.setdefault(place.bundle, [])
            while len(waiting) < self.cfg.spares:
                waiting.append(make(Place(place.bundle, 0.0, 0.0)))
                waiting[-1].warm.remote(self.modules)

    def reset(self) -> None:
        """Ends every actor that trains; the next `crew` starts it anew, in the same place or, of a
        machine that is gone, in another. Those that keep nothing that counts, engines and reward
        models, stay and forget what they were doing.
        """
        for name, crew in list(self.crews.items()):
            if name in TRAINERS or not crew.cleared():
                crew.stop()
                del self.crews[name]

    def close(self) -> None:
        for crew in self.crews.values():
            crew.stop(gently=True)
        self.crews = {}
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
