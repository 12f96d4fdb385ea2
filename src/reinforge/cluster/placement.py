"""Which actors a run has and where they go: a plan of bundles, made from the config alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from reinforge.config.cluster import ClusterConfig, RoleConfig
from reinforge.core.errors import InputError

Resources = dict[str, float]


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """Where one actor goes: its bundle of the placement group, and what it takes of it. Made with
    the `PlacementPlan`.
    """

    bundle: int
    cpus: float
    gpus: float


@dataclass(slots=True)
class PlacementPlan:
    """What a run asks Ray for, and which actor goes where: `places` by role, one for each rank or
    replica. Made from the config before anything is started.
    """

    strategy: str
    bundles: list[Resources] = field(default_factory=list)
    places: dict[str, list[ActorPlacement]] = field(default_factory=dict)

    @property
    def needed(self) -> Resources:
        total: Resources = {}
        for bundle in self.bundles:
            for name, count in bundle.items():
                total[name] = total.get(name, 0) + count
        return {name: count for name, count in total.items() if count}


def teacher_role(number: int) -> str:
    """Each teacher with actors of its own is a role: its actors may be ranks."""
    return f"teacher-{number}"


def plan(
    cfg: ClusterConfig,
    *,
    ranks: int,
    critic: bool,
    rewards: int,
    gpu: bool,
    reference: bool = False,
    teachers: int = 0,
) -> PlacementPlan:
    """`gpu`: whether models go to GPUs. `reference` and `teachers`: whether and how many of them
    have actors of their own.

    Colocated: each rank of the trainer has one bundle, and so has every actor of a role that is
    asked to be apart; other reward models share the first, GPU included. Split: a bundle for every
    actor.
    """
    made = PlacementPlan(f"{cfg.strategy.upper()}")

    def bundle(role: RoleConfig, name: str, count: int) -> None:
        gpus = (1.0 if gpu else 0.0) if role.gpus is None else role.gpus
        for _ in range(count):
            made.places.setdefault(name, []).append(
                ActorPlacement(len(made.bundles), role.cpus, gpus)
            )
            made.bundles.append({"CPU": role.cpus, "GPU": gpus})

    bundle(cfg.trainer, "policy", ranks)
    split = cfg.layout == "split"
    if split:
        bundle(cfg.engine, "engine", cfg.engines)
    if critic and (split or cfg.critic.apart):
        bundle(cfg.critic, "critic", ranks)
    if reference:
        bundle(cfg.reference, "reference", cfg.reference.ranks)
    for number in range(teachers):
        bundle(cfg.teacher, teacher_role(number), cfg.teacher.ranks)
    if split or cfg.reward.apart:
        bundle(cfg.reward, "reward", rewards)
    elif rewards:
        share = made.places["policy"][0].gpus / (rewards + 1)  # of the GPU in that bundle
        made.places["policy"][0] = ActorPlacement(0, cfg.trainer.cpus, share)
        made.places["reward"] = [ActorPlacement(0, cfg.reward.cpus, share) for _ in range(rewards)]
        made.bundles[0] = {
            "CPU": cfg.trainer.cpus + rewards * cfg.reward.cpus,
            "GPU": made.bundles[0]["GPU"],
        }
    for item in made.bundles:
        for name in [n for n, count in item.items() if not count]:
            del item[name]
        item.setdefault("CPU", 0.01)  # a bundle cannot be empty
    return made


def rank_order(
    nodes: Sequence[str], ips: Sequence[str], devices: Sequence[Sequence[int]]
) -> list[int]:
    """The actors of a role in the order in which they become ranks: machine by machine, by address,
    and on a machine by device.

    Ranks that are neighbours share tensors and sequences, and the network between machines is the
    slow one. Ray places bundles without an order.

    >>> rank_order(["b", "a", "b", "a"], ["10.0.0.9", "10.0.0.10"] * 2, [[1], [0], [0], [1]])
    [2, 0, 1, 3]
    """

    def key(i: int) -> tuple[bytes, str, tuple[int, ...], int]:
        return ip_address(ips[i]).packed, nodes[i], tuple(devices[i]), i

    return sorted(range(len(nodes)), key=key)


def ranks_for(
    cfg: ClusterConfig,
    gpus: float,
    *,
    critic: bool,
    rewards: int,
    reference: bool = False,
    teachers: int = 0,
) -> int:
    """How many ranks the GPUs of a cluster are enough for, beside everybody else.

    >>> split = ClusterConfig(kind="ray", layout="split", engines=24)
    >>> ranks_for(split, 64, critic=False, rewards=0)
    40
    """
    others, one = (
        plan(
            cfg,
            ranks=n,
            critic=critic,
            rewards=rewards,
            gpu=True,
            reference=reference,
            teachers=teachers,
        ).needed.get("GPU", 0.0)
        for n in (1, 2)
    )
    each = one - others  # of a rank, and of its critic's
    found = int(1 + (gpus - others) / each) if gpus and each else 0
    if found < 1:
        raise InputError(
            "how many actors are to train is not said.",
            where="train.ranks",
            fix="Set it, e.g. train.ranks=2.",
        )
    return found
