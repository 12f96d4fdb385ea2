"""Which GPUs each server of a run gets: those that `engine.devices` names, or the trainer's own,
shared out evenly.

Numbers of GPUs are text, as in CUDA_VISIBLE_DEVICES, which also has names like GPU-5f0e.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reinforge.config.engine import SERVERS, EngineConfig, gpus_of, workers_of
from reinforge.config.sections import Sections
from reinforge.core.errors import InputError


@dataclass(frozen=True)
class ServerPlacement:
    """Where the servers of a run are. `place_servers` makes it; `ServerSetup` takes it along, and
    `reinforge plan` tells what is wrong with it.
    """

    devices: tuple[str, ...] = ()  # CUDA_VISIBLE_DEVICES of each; none: what this process sees
    colocated: bool = False  # whether a trainer is on a GPU of theirs

    def on(self, gpu: str) -> int:
        """How many servers are on a GPU."""
        return sum(gpu in gpus_of(devices) for devices in self.devices)


def place_servers(
    engine: EngineConfig, trainers: Sequence[str], others: Sequence[str] = ()
) -> ServerPlacement:
    """`trainers`: the GPUs of this machine that train, that of the process that sends weights
    first. `others`: more of them that servers may have.
    """
    if engine.address:
        return ServerPlacement()
    devices = tuple(engine.devices) or spread(engine, [*trainers, *others])
    placed = ServerPlacement(devices, any(gpu in trainers for d in devices for gpu in gpus_of(d)))
    refuse_shares(engine, devices)
    if placed.colocated:
        _refuse_channel(engine, devices, trainers[0])
    return placed


def spread(engine: EngineConfig, gpus: Sequence[str]) -> tuple[str, ...]:
    """Each server's part of the GPUs: neighbours, and as far from the other servers as can be.
    Where there are more servers than parts, they share.

    >>> spread(EngineConfig(replicas=2), ["0", "1", "2", "3"])
    ('0', '2')
    >>> spread(EngineConfig(replicas=2, args={"tensor-parallel-size": 2}), ["0", "1", "2", "3"])
    ('0,1', '2,3')
    """
    if not gpus:
        return ()
    each = workers_of(engine)
    if each > len(gpus):
        raise InputError(
            f"a server of {each} workers needs as many GPUs, and there are {len(gpus)}.",
            where="engine.args",
            fix="Set fewer workers (tensor-parallel-size), or use more GPUs.",
        )
    parts = len(gpus) // each
    if engine.replicas <= parts:
        starts = [i * len(gpus) // engine.replicas for i in range(engine.replicas)]
    else:
        starts = [i % parts * each for i in range(engine.replicas)]
    return tuple(",".join(gpus[start : start + each]) for start in starts)


def refuse_shares(engine: EngineConfig, devices: Iterable[str]) -> None:
    """Servers on one GPU must fit it together."""
    servers = Counter(gpu for own in devices for gpu in gpus_of(own))
    for gpu, count in servers.items():
        if count * engine.memory > 1:
            raise InputError(
                f"{count} servers are on GPU {gpu}, each with {engine.memory:g} of its memory.",
                where="engine.memory",
                fix=f"Set at most {int(100 / count) / 100:g}, or fewer engine.replicas.",
            )


def _refuse_channel(engine: EngineConfig, devices: Sequence[str], sender: str) -> None:
    """Handles of GPU memory are for one process on the same GPU, and a process group over NCCL has
    no two members on one GPU: between the two, weights of colocated servers go through memory.
    """
    if engine.channel in ("ipc", "api") and any(own != sender for own in devices):
        far = next(own for own in devices if own != sender)
        raise InputError(
            f"weights that GPU {sender} has cannot be opened by a server on GPU {far}, and NCCL"
            " does not connect processes that share a GPU.",
            where="engine.channel",
            fix="Use memory or leave it out, or give the servers GPUs of their own"
            " (engine.devices).",
        )


def stays_awake(config: Sections) -> bool:
    """Whether servers that the run starts have their memory all the time: they do not sleep, or
    generate while the policy trains.
    """
    server = config.rollout.engine
    if server not in SERVERS or config.engine.address:
        return False
    never = config.engine.sleep == "never" or not SERVERS[server].sleeps
    return never or config.rollout.staleness > 0
