"""How many cores a process may use, its share of them, and those that are near its device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path("/")


def allowed_cpus(root: Path = ROOT) -> int:
    """Cores that this process may use: those it is bound to, and no more than its cgroup pays for.

    A container on a machine of 128 cores often has 8, and `os.cpu_count` says 128.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _cgroup_cpus(root)
    return max(1, min(bound or 1, int(quota) if quota is not None else bound or 1))


def threads_for(sharing: int) -> int:
    """Threads of one of `sharing` processes on this machine: an equal share of the cores, or what
    OMP_NUM_THREADS says.
    """
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said):
        return int(said)
    return max(1, allowed_cpus() // max(1, sharing))


def numa_cpus(gpus: Sequence[int], local: int, sharing: int, root: Path = ROOT) -> set[int]:
    """Cores of the memory nodes that this process should stay on; none: anywhere.

    With GPUs (their numbers in the order of the bus; -1: not known) the nodes that those hang on.
    Without: process `local` of `sharing` has one of the nodes, if there are enough processes to use
    all of them.
    """
    nodes = _numa_nodes(root)
    if len(nodes) < 2:
        return set()
    if gpus:
        where = _gpu_nodes(root)
        near = {where[i] for i in gpus if 0 <= i < len(where)}
        return set().union(*(nodes.get(node, set()) for node in near))
    if sharing < len(nodes):
        return set()
    return nodes[sorted(nodes)[local * len(nodes) // sharing]]


def visible_gpu(index: int) -> int:
    """The number on this machine of the GPU that this process calls `index`; -1: not known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return index
    names = visible.split(",")
    return int(names[index]) if index < len(names) and names[index].strip().isdigit() else -1


def visible_name(index: int) -> str:
    """What CUDA_VISIBLE_DEVICES of another process here must say for the GPU that this one calls
    `index`.
    """
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[index].strip() if index < len(names) else str(index)


def bind(cpus: set[int]) -> set[int]:
    """Binds every thread of this process to those of the cores that it may use, and what it starts
    later with it. Returns them; none: nothing was changed.

    Memory follows: Linux takes it from the node of the core that touches it first.
    """
    if not hasattr(os, "sched_setaffinity"):
        return set()
    chosen = cpus & os.sched_getaffinity(0)
    if chosen:
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # a thread that ended meanwhile
                os.sched_setaffinity(int(task), chosen)
    return chosen


def _cgroup_cpus(root: Path) -> float | None:
    """What the cgroups of this process allow, the least of its own and those above it."""
    found = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:
                found += _quotas(root / "sys/fs/cgroup", path, _version_2)
            elif "cpu" in kinds.split(","):
                found += _quotas(root / "sys/fs/cgroup/cpu", path, _version_1)
    return min(found, default=None)


def _quotas(top: Path, path: str, read: Callable[[Path], float]) -> list[float]:
    folder = top / path.strip("/")
    folders = [folder, *folder.parents]
    inside = [f for f in folders if f == top or top in f.parents]
    quotas = []
    for each in inside:
        with contextlib.suppress(OSError, ValueError):
            quotas.append(read(each))
    return quotas


def _version_2(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text().split()
    return float(quota) / float(period)  # "max" is no number: no limit


def _version_1(folder: Path) -> float:
    quota = float((folder / "cpu.cfs_quota_us").read_text())
    if quota <= 0:
        raise ValueError("no limit")
    return quota / float((folder / "cpu.cfs_period_us").read_text())


def _numa_nodes(root: Path) -> dict[int, set[int]]:
    """Cores by memory node; nodes without cores are left out."""
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if cpus := cpu_list((folder / "cpulist").read_text()):
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes


def gpus_here(root: Path = ROOT) -> int:
    """NVIDIA GPUs of this machine, seen by this process or not; 0 also where it does not tell."""
    return len(_gpu_nodes(root))


def _gpu_nodes(root: Path) -> list[int]:
    """The memory node of each NVIDIA GPU, in the order of the bus, which is how Ray and
    `nvidia-smi` number them; -1 where the machine does not tell.
    """
    found = []
    for gpu in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        node = root / "sys/bus/pci/devices" / gpu.name.lower() / "numa_node"
        found.append(int(node.read_text()) if node.exists() else -1)
    return found


def cpu_list(text: str) -> set[int]:
    """
    >>> sorted(cpu_list("0-2,8,10-11"))
    [0, 1, 2, 8, 10, 11]
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
