"""Cores of a process: what its cgroup pays for, its share, and those near its GPU. The machines are
folders that look like /proc and /sys.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

import pytest

from reinforge.core import cpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def two_nodes(root: Path) -> Path:
    """Two memory nodes of 8 cores with 4 GPUs each; the bus has them in turn."""
    gpus = {f"0000:{bus:02x}:00.0": node for bus, node in ((0x1A, 0), (0x3B, 1), (0x5E, 0))}
    return write(
        root,
        {
            "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
            "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
            "sys/devices/system/node/node2/cpulist": "\n",  # memory without cores
            **{f"proc/driver/nvidia/gpus/{name.upper()}/information": "" for name in gpus},
            **{f"sys/bus/pci/devices/{name}/numa_node": f"{n}\n" for name, n in gpus.items()},
        },
    )


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ({}, 128),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 128),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "800000 100000\n"}, 8),
        (
            {  # the least of a group and those above it
                "proc/self/cgroup": "0::/pods/one\n",
                "sys/fs/cgroup/pods/one/cpu.max": "1600000 100000\n",
                "sys/fs/cgroup/pods/cpu.max": "1250000 100000\n",
            },
            12,
        ),
        (
            {  # the first version
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n1:name=systemd:/x\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            },
            4,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    ],
)
def test_a_container_has_the_cores_that_its_cgroup_pays_for(
    files: dict[str, str], allowed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)))
    assert cpus.allowed_cpus(write(tmp_path, files)) == allowed


def test_processes_share_the_cores_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpus, "allowed_cpus", lambda: 96)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [cpus.threads_for(n) for n in (1, 8, 100)] == [96, 12, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert cpus.threads_for(8) == 5


def test_a_process_stays_near_its_gpu(tmp_path: Path) -> None:
    root = two_nodes(tmp_path)
    node_0 = {0, 1, 2, 3, 8, 9, 10, 11}
    node_1 = {4, 5, 6, 7, 12, 13, 14, 15}
    assert [cpus.numa_cpus([i], 0, 3, root) for i in range(3)] == [node_0, node_1, node_0]
    assert cpus.numa_cpus([0, 1], 0, 2, root) == node_0 | node_1
    # not known: anywhere
    assert cpus.numa_cpus([7], 0, 8, root) == cpus.numa_cpus([-1], 0, 8, root) == set()
    assert cpus.gpus_here(root) == 3 and cpus.gpus_here(tmp_path / "other") == 0


def test_which_gpu_a_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [cpus.visible_gpu(i) for i in range(2)] == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,GPU-12ab")
    assert [cpus.visible_gpu(i) for i in range(4)] == [4, 6, -1, -1]
    # for another process of the machine
    assert [cpus.visible_name(i) for i in range(3)] == ["4", "6", "GPU-12ab"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [cpus.visible_name(i) for i in range(2)] == ["0", "1"]


def test_without_gpus_processes_are_spread_over_the_memory(tmp_path: Path) -> None:
    root = two_nodes(tmp_path)
    first = [min(cpus.numa_cpus([], i, 4, root)) for i in range(4)]
    assert first == [0, 0, 4, 4]
    assert cpus.numa_cpus([], 0, 1, root) == set()  # one process uses the whole machine
    assert cpus.numa_cpus([], 0, 4, tmp_path / "other") == set()


def test_all_threads_are_bound_and_only_to_what_is_allowed() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    seen: list[set[int]] = []
    go = threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), seen.append(os.sched_getaffinity(0))))
    thread.start()
    try:
        assert cpus.bind({one, 100_000}) == {one} and os.sched_getaffinity(0) == {one}
        go.set()
        thread.join()
        assert seen == [{one}]
        assert cpus.bind({100_000}) == set() and os.sched_getaffinity(0) == {one}
    finally:
        go.set()
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread, which is ending
                os.sched_setaffinity(int(task), before)
