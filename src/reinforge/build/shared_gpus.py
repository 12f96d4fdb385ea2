"""GPUs that trainers and servers share: which they are, and who has their memory when.

While servers are awake, trainers keep what they train with (weights, optimizer) and nothing else;
while trainers train, servers sleep. Servers that do not sleep have their share all the time.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.backends.distributed.ranks import RankMember, Ranks
from reinforge.build.ranks import ON_RANKS, ranks_here, ranks_of
from reinforge.config.schema import Config
from reinforge.config.server_devices import ServerPlacement, place_servers, stays_awake
from reinforge.core.cpus import visible_name
from reinforge.core.gpu_room import GpuRoom
from reinforge.models.load import pick_device


class TrainerGpu:
    """The GPU of one process that trains. `SharedGpus` makes one on every rank."""

    def __init__(self, device: torch.device, rank: int = 0):
        self.device = device
        self.rank = rank
        self._held: Tensor | None = None

    @property
    def name(self) -> str:
        """For CUDA_VISIBLE_DEVICES of servers; empty on a CPU."""
        return visible_name(self.device.index or 0) if self.device.type == "cuda" else ""

    def where(self) -> tuple[str, str]:
        return socket.gethostname(), self.name

    def release(self) -> GpuRoom:
        """Gives back what torch's allocator only keeps."""
        if self.device.type != "cuda":
            return GpuRoom(self.rank, self.name, 0)
        torch.cuda.set_device(self.device)  # rank 0 does this in a thread of its own
        torch.cuda.empty_cache()
        return GpuRoom(self.rank, self.name, torch.cuda.mem_get_info(self.device)[0])

    def hold(self, share: float, size: int = 0) -> None:
        """Takes a share of the GPU and `size` bytes, or what there is of it; 0 gives it back."""
        self._held = None
        if self.device.type != "cuda":
            return
        torch.cuda.empty_cache()
        if share or size:
            free, whole = torch.cuda.mem_get_info(self.device)
            taken = min(int(free * 0.9), int(whole * share) + size)
            self._held = torch.empty(taken, dtype=torch.uint8, device=self.device)


def gpu_of_rank(member: RankMember) -> TrainerGpu:
    return TrainerGpu(member.device, member.rank)


class SharedGpus:
    """The GPUs of all processes that train, seen from the one that starts servers. `engine_of`
    makes it for a served engine, which asks it to `release` memory before servers wake.
    """

    def __init__(self, cfg: Config, ranks: Ranks | None):
        self.ranks = ranks
        if ranks is None:
            self.own = TrainerGpu(pick_device(cfg.model.device))
        else:
            self.id = ranks.make(gpu_of_rank, [()] * ranks.size)
            self.own = ranks.own.objects[self.id]
        self.places = self._call("where")

    @property
    def trainers(self) -> list[str]:
        """Those of this machine, that of this process first."""
        host, _ = self.own.where()
        return [name for machine, name in self.places if machine == host and name]

    def placement(self, cfg: Config) -> ServerPlacement:
        """Of the run's servers."""
        return _placement(cfg, self.trainers, alone=self.ranks is None)

    def release(self) -> list[GpuRoom]:
        found: list[GpuRoom] = self._call("release")
        return found

    def hold(self, shares: Sequence[float], size: int = 0) -> None:
        self._call("hold", [(share, size) for share in shares])

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.drop(self.id)

    def _call(self, method: str, args: Sequence[tuple[float, ...]] | None = None) -> list[Any]:
        if self.ranks is not None:
            return self.ranks.call(self.id, method, args)
        [own] = args or [()]
        return [getattr(self.own, method)(*own)]


def visible() -> list[str]:
    """The GPUs that this process sees, as others must call them."""
    return [visible_name(i) for i in range(torch.cuda.device_count())]


def trainer_gpus(cfg: Config) -> list[str]:
    """The GPUs of this machine that a run would train on, before it starts."""
    device = pick_device(cfg.model.device)
    if device.type != "cuda":
        return []
    gpus = visible()
    if cfg.train.backend in ON_RANKS:
        return gpus[: ranks_here(cfg)]
    return [gpus[device.index or 0]]


def planned_placement(cfg: Config) -> ServerPlacement:
    """Of the servers of a run on this machine, before it starts."""
    return _placement(cfg, trainer_gpus(cfg), alone=cfg.train.backend not in ON_RANKS)


def _placement(cfg: Config, trainers: Sequence[str], alone: bool) -> ServerPlacement:
    """A process that trains alone lets the servers have the other GPUs that it sees."""
    others = [gpu for gpu in visible() if gpu not in trainers] if alone and trainers else ()
    return place_servers(cfg.engine, trainers, others)


@contextmanager
def room_for_copies(cfg: Config, ranks: Ranks, model: nn.Module) -> Iterator[None]:
    """Inside, as much of every rank's GPU is taken as the copy of the model will take that the rank
    generates with: it is there once the backend has sized its packs.
    """
    elsewhere = cfg.rollout.engine != "native" or cfg.cluster.layout == "split"
    if elsewhere or not cfg.algorithm.rl:
        yield
        return
    gpus = SharedGpus(cfg, ranks)
    nothing = [0.0] * ranks.size
    try:
        gpus.hold(nothing, sum(p.numel() * p.element_size() for p in model.parameters()))
        yield
    finally:
        gpus.hold(nothing)
        gpus.close()


@contextmanager
def room_for_servers(cfg: Config) -> Iterator[None]:
    """Inside, the share of every GPU that colocated servers will hold all the time is taken:
    whoever looks at what is free finds the rest.
    """
    if cfg.cluster.layout == "split" or not stays_awake(cfg):
        yield
        return
    gpus = SharedGpus(cfg, ranks_of(cfg))
    host = gpus.own.where()[0]
    placed = gpus.placement(cfg)
    try:
        gpus.hold(
            [
                cfg.engine.memory * placed.on(name) if machine == host else 0.0
                for machine, name in gpus.places
            ]
        )
        yield
    finally:
        gpus.hold([0.0] * len(gpus.places))
        gpus.close()
