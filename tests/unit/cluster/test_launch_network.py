"""The network's preflight: settings that cannot work, NCCL's own words, and a real all-reduce
between two processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from reinforge.cluster import network
from reinforge.cluster.network import NetworkFacts, problems, transports

NODE = NetworkFacts(
    {"lo": "unknown", "eth0": "up", "ib0": "up", "eth1": "down"},
    {"mlx5_0": ["ACTIVE"], "mlx5_1": ["DOWN"]},
    gpus=8,
    direct=True,
)
DIRECT = """\
node1:511:702 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
node1:511:702 [0] NCCL INFO Using network IB
node1:511:702 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
node1:511:702 [0] NCCL INFO Channel 01/0 : 8[0] -> 0[0] [receive] via NET/IB/1/GDRDMA
node1:511:702 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""
SOCKETS = """\
node1:90:95 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
node1:90:95 [0] NCCL INFO Using network Socket
node1:90:95 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""


def test_what_nccl_says() -> None:
    assert transports(DIRECT) == {"network": "IB", "channels": 2, "gdrdma": 2}
    assert transports(SOCKETS) == {"network": "Socket", "channels": 1, "gdrdma": 0}
    assert transports(DIRECT.replace("/GDRDMA", "")) == {
        "network": "IB",
        "channels": 2,
        "gdrdma": 0,
    }
    assert transports("... Channel 00/0 : 8[0] -> 0[0] [send] via NET/AWS Libfabric/0/GDRDMA") == {
        "network": "AWS Libfabric",
        "channels": 1,
        "gdrdma": 1,
    }
    assert transports("nothing of it") == {"network": None, "channels": 0, "gdrdma": 0}


@pytest.mark.parametrize(
    ("env", "kind", "told"),
    [
        (
            {"NCCL_SOCKET_IFNAME": "bond0"},
            0,
            (
                "NCCL_SOCKET_IFNAME=bond0 names no interface of this machine; there are: lo, eth0,"
                " ib0, eth1."
            ),
        ),
        (
            {"NCCL_SOCKET_IFNAME": "lo"},
            0,
            "NCCL_SOCKET_IFNAME=lo is the loopback, which other machines cannot reach.",
        ),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, 0, "GLOO_SOCKET_IFNAME=eth1: eth1 is down."),
        (
            {"NCCL_IB_HCA": "mlx4"},
            0,
            "NCCL_IB_HCA=mlx4 names no device; there are: mlx5_0, mlx5_1.",
        ),
        (
            {},
            1,
            (
                "NCCL_SOCKET_IFNAME is not set and there are 2 interfaces (eth0, ib0): name the one"
                " between the nodes."
            ),
        ),
        (
            {"NCCL_IB_DISABLE": "1"},
            1,
            (
                "NCCL_IB_DISABLE=1 while there is an active fabric (mlx5_0, mlx5_1): traffic goes"
                " over TCP."
            ),
        ),
        (
            {"NCCL_NET_GDR_LEVEL": "LOC"},
            1,
            "NCCL_NET_GDR_LEVEL=LOC turns GPUDirect RDMA off: data goes through host memory.",
        ),
        (
            {"NCCL_P2P_DISABLE": "1"},
            1,
            "NCCL_P2P_DISABLE=1: GPUs of this machine talk through host memory.",
        ),
        ({}, 1, "no port of mlx5_1 is active (DOWN)."),
    ],
)
def test_usual_mistakes(env: dict[str, str], kind: int, told: str) -> None:
    assert told in problems(env, NODE, several_nodes=True)[kind]


def test_a_sane_node_is_left_alone() -> None:
    sane = {
        "NCCL_SOCKET_IFNAME": "^lo,docker",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "=mlx5_0",
        "NCCL_IB_DISABLE": "0",
    }
    healthy = NetworkFacts(NODE.interfaces, {"mlx5_0": ["ACTIVE"]}, 8, True)
    assert problems(sane, healthy, several_nodes=True) == ([], [])
    assert problems({}, NetworkFacts({"lo": "unknown", "eth0": "up"}), several_nodes=False) == (
        [],
        [],
    )
    assert (
        "no nvidia_peermem"
        in problems(sane, NetworkFacts(NODE.interfaces, {"mlx5_0": ["ACTIVE"]}, 8, False))[1][0]
    )


def test_facts_are_read_from_sys(tmp_path: Path) -> None:
    for name, text in {
        "class/net/eth0/operstate": "up\n",
        "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "module/nvidia_peermem/x": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert NetworkFacts.here(tmp_path / "class") == NetworkFacts(
        {"eth0": "up"}, {"mlx5_0": ["ACTIVE"]}, 0, True
    )


def test_two_processes_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = network.report(2, 4)
    assert (
        found is not None
        and found["errors"] == []
        and found["ranks"] == 2
        and found["device"] == "CPU"
    )
    assert 0.005 < found["bus_gb_per_second"] < 500


def test_a_setting_that_cannot_work_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nowhere9")
    found = network.report(2, 1)
    assert (
        found is not None
        and "bus_gb_per_second" not in found
        and "nowhere9 names no interface" in found["errors"][0]
    )
