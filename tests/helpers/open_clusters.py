"""The cluster that a run in this process has open, for those who hurt its actors."""

from __future__ import annotations

from reinforge.cluster.ray_cluster import RayCluster

_open: list[RayCluster] = []
_begin = RayCluster.__init__
_end = RayCluster.close


def _remembered(self: RayCluster, *args: object) -> None:
    _begin(self, *args)  # type: ignore[arg-type]
    _open.append(self)


def _forgotten(self: RayCluster) -> None:
    _end(self)
    if self in _open:
        _open.remove(self)


def watch_clusters() -> None:
    """From now on `open_cluster` knows what is opened. Imported after Ray was told how to
    authenticate, and called before the run.
    """
    RayCluster.__init__ = _remembered  # type: ignore[method-assign]
    RayCluster.close = _forgotten  # type: ignore[method-assign]


def open_cluster() -> RayCluster | None:
    """The newest that is open."""
    return _open[-1] if _open else None
