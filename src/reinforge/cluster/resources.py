"""The machines' share of a run: its placement group, and the spare actors that wait in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from reinforge.cluster.connect import (
    PlacementGroup,
    RayError,
    placement_group,
    placement_group_table,
    ray,
    remove_placement_group,
)
from reinforge.cluster.errors import ActorLost
from reinforge.cluster.placement import ActorPlacement, PlacementPlan
from reinforge.config.cluster import ClusterConfig


class ResourcePool:
    """Where the actors of a run are started. A `RayCluster` has one, and its worker groups ask it
    for the placement group and for spares.
    """

    def __init__(self, cfg: ClusterConfig, made: PlacementPlan, modules: Sequence[str]):
        self.cfg = cfg
        self.plan = made
        self.modules = modules  # that actors will need
        self._group: PlacementGroup | None = None
        self._spares: dict[int, list[Any]] = {}  # by bundle

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

    def shares(self) -> dict[int, tuple[int, int]]:
        """By bundle: how many actors of the run have a bundle before it on the same machine, and
        how many there are on that machine.
        """
        nodes = placement_group_table(self.group())["bundles_to_node_id"]
        taken = sorted(p.bundle for places in self.plan.places.values() for p in places)
        found = {}
        for bundle in taken:
            here = [other for other in taken if nodes.get(other) == nodes.get(bundle)]
            found[bundle] = (here.index(bundle), len(here))
        return found

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

    def close(self) -> None:
        self._spares = {}
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
            self._group = None
