"""Before a large run: are the network's settings sane, and does an all-reduce reach what the
hardware can?

Reads variables and /sys, measures with torch.distributed (nccl on GPUs, gloo on CPUs), and reads
NCCL's own words about which way it took.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SYS = Path("/sys/class")
NET = re.compile(r"NCCL INFO (?:NET/(?P<net>\w+)|Using network (?P<using>\S+))")
SLOW_GBPS = 1.0  # below this between GPUs, the fabric is not in use
WARMUP = 2
ROUNDS = 5


@dataclass
class NetworkFacts:
    """What the machine has: interfaces (up or not) and InfiniBand or RoCE devices with the state of
    their ports. `reinforge launch` looks, and sets the variables of NCCL by it.
    """

    interfaces: dict[str, str] = field(default_factory=dict)
    devices: dict[str, list[str]] = field(default_factory=dict)
    gpus: int = 0
    direct: bool = False  # the kernel module for GPUDirect RDMA is loaded

    @classmethod
    def here(cls, sys_class: Path = SYS) -> NetworkFacts:
        def text(path: Path) -> str:
            return path.read_text().strip() if path.exists() else ""

        interfaces = {
            p.name: text(p / "operstate")
            for p in sorted((sys_class / "net").glob("*"))
            if p.is_dir()
        }
        devices = {
            p.name: [
                text(port / "state").rpartition(": ")[2] for port in sorted((p / "ports").glob("*"))
            ]
            for p in sorted((sys_class / "infiniband").glob("*"))
        }
        modules = sys_class.parent / "module"
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*"))) if sys_class == SYS else 0
        return cls(
            interfaces,
            devices,
            gpus,
            any((modules / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")),
        )

    @property
    def fabric(self) -> bool:
        return any("ACTIVE" in state for ports in self.devices.values() for state in ports)


def chosen(setting: str, names: list[str]) -> list[str]:
    """The names that NCCL takes for a list as in NCCL_SOCKET_IFNAME: prefixes, `=` exact, `^` all
    but those.

    >>> there = ["eth0", "ib0", "lo"]
    >>> chosen("eth", there), chosen("^lo,eth", there), chosen("=eth", ["eth0"])
    (['eth0'], ['ib0'], [])
    """
    without = setting.startswith("^")
    exact = setting.lstrip("^").startswith("=")
    parts = [part for part in setting.lstrip("^").lstrip("=").split(",") if part]
    named = [
        n
        for n in names
        if any(
            n == part.partition(":")[0] if exact else n.startswith(part.partition(":")[0])
            for part in parts
        )
    ]
    return [n for n in names if n not in named] if without else named


def problems(
    env: Mapping[str, str], facts: NetworkFacts, *, several_nodes: bool = False
) -> tuple[list[str], list[str]]:
    """(errors, warnings): settings that cannot work, and those that usually are a mistake."""
    errors = []
    warnings = []
    for key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = env.get(key)
        if value is None:
            usable = [n for n, state in facts.interfaces.items() if n != "lo" and state == "up"]
            if several_nodes and len(usable) > 1:
                warnings.append(
                    f"{key} is not set and there are {len(usable)} interfaces"
                    f" ({', '.join(usable)}): name the one between the nodes."
                )
            continue
        found = (
            chosen(value, list(facts.interfaces))
            if key.startswith("NCCL")
            else [n for n in value.split(",") if n in facts.interfaces]
        )
        if not found:
            errors.append(
                f"{key}={value} names no interface of this machine; there are:"
                f" {', '.join(facts.interfaces) or 'none'}."
            )
        elif several_nodes and all(n == "lo" for n in found):
            errors.append(f"{key}={value} is the loopback, which other machines cannot reach.")
        elif all(facts.interfaces[n] == "down" for n in found):
            errors.append(f"{key}={value}: {', '.join(found)} is down.")
    if env.get("NCCL_IB_DISABLE", "0") not in ("", "0") and facts.fabric:
        warnings.append(
            f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']} while there is an active fabric"
            f" ({', '.join(facts.devices)}): traffic goes over TCP."
        )
    if (
        (wanted := env.get("NCCL_IB_HCA"))
        and facts.devices
        and not chosen(wanted, list(facts.devices))
    ):
        errors.append(
            f"NCCL_IB_HCA={wanted} names no device; there are: {', '.join(facts.devices)}."
        )
    for name, ports in facts.devices.items():
        if ports and not any("ACTIVE" in state for state in ports):
            warnings.append(f"no port of {name} is active ({', '.join(ports)}).")
    if env.get("NCCL_NET_GDR_LEVEL") in ("0", "LOC") and facts.fabric:
        warnings.append(
            f"NCCL_NET_GDR_LEVEL={env['NCCL_NET_GDR_LEVEL']} turns GPUDirect RDMA off: data goes"
            " through host memory."
        )
    if facts.fabric and facts.gpus and not facts.direct:
        warnings.append(
            "there is a fabric and no nvidia_peermem module: without it (or DMA-BUF) there is no"
            " GPUDirect RDMA."
        )
    if env.get("NCCL_P2P_DISABLE", "0") not in ("", "0") and facts.gpus > 1:
        warnings.append(
            f"NCCL_P2P_DISABLE={env['NCCL_P2P_DISABLE']}: GPUs of this machine talk through host"
            " memory."
        )
    if "NCCL_DEBUG" in env and env["NCCL_DEBUG"].upper() == "TRACE":
        warnings.append("NCCL_DEBUG=TRACE slows every collective down.")
    return errors, warnings


def transports(text: str) -> dict[str, Any]:
    """From the output under NCCL_DEBUG=INFO: the network in use, and how many of the channels
    between nodes are GPUDirect ([GDRDMA]).
    """
    nets = [m["net"] or m["using"] for m in NET.finditer(text)]
    channels = [line for line in text.splitlines() if "via NET/" in line]
    direct = [line for line in channels if "GDRDMA" in line]
    kind = next(
        (m[1] for line in channels if (m := re.search(r"via NET/([^/]+?)(?:/|\s*$)", line))), None
    )
    return {
        "network": kind or (nets[-1] if nets else None),
        "channels": len(channels),
        "gdrdma": len(direct),
    }


def all_reduce(megabytes: int, device: str) -> float:
    """Bus bandwidth in GB/s of an all-reduce over the open group, 2 (n-1)/n of the bytes per rank
    (as nccl-tests count it).
    """
    import torch
    import torch.distributed as dist

    n = dist.get_world_size()
    data = torch.ones(megabytes * (1 << 20) // 4, device=device)
    for i in range(WARMUP + ROUNDS):
        if i == WARMUP:
            _wait(device)
            dist.barrier()
            began = time.perf_counter()
        dist.all_reduce(data)
    _wait(device)
    seconds = (time.perf_counter() - began) / ROUNDS
    assert float(data[0]) == float(n) ** (WARMUP + ROUNDS), "an all-reduce gave a wrong sum"
    return 2 * (n - 1) / n * data.numel() * 4 / seconds / 1e9


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def _as_rank() -> None:
    """Slurm's names for what torch.distributed wants, where srun started us."""
    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        first = subprocess.run(
            ["scontrol", "show", "hostnames"], capture_output=True, text=True
        ).stdout.split()
        os.environ |= {
            "RANK": os.environ["SLURM_PROCID"],
            "LOCAL_RANK": os.environ["SLURM_LOCALID"],
            "WORLD_SIZE": os.environ["SLURM_NTASKS"],
        }
        os.environ.setdefault("MASTER_ADDR", first[0] if first else "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ["SLURM_JOB_ID"]) % 20000))


def measure(megabytes: int) -> dict[str, Any]:
    """One rank's part of the test; the variables of torchrun say which."""
    import torch
    import torch.distributed as dist

    # ranks that share a GPU cannot use nccl
    cuda = torch.cuda.device_count() >= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    found = {
        "ranks": dist.get_world_size(),
        "device": "GPU" if cuda else "CPU",
        "bus_gb_per_second": round(all_reduce(megabytes, device), 3),
    }
    dist.destroy_process_group()
    return found


def report(ranks: int | None, megabytes: int) -> dict[str, Any] | None:
    """Everything, for rank 0; None for the others. Starts processes of its own where nobody has."""
    _as_rank()
    facts = NetworkFacts.here()
    env = dict(os.environ)
    several = int(env.get("WORLD_SIZE", "1")) > int(
        env.get("LOCAL_WORLD_SIZE", env.get("SLURM_NTASKS_PER_NODE", "1")).split("(")[0]
    )
    errors, warnings = problems(env, facts, several_nodes="RANK" in env and several)
    found: dict[str, Any] = {"interfaces": facts.interfaces, "fabric": facts.devices or None}
    if not errors and "RANK" in env:
        found |= measure(megabytes)
        if env["RANK"] != "0":
            return None
    elif not errors:
        found |= _started(ranks or max(2, facts.gpus), megabytes)
        errors += [found.pop("failed")] if "failed" in found else []
    if (
        facts.fabric
        and found.get("device") == "GPU"
        and found.get("channels")
        and not found.get("gdrdma")
    ):
        warnings.append("NCCL uses the network without [GDRDMA]: data goes through host memory.")
    if found.get("device") == "GPU" and found["bus_gb_per_second"] < SLOW_GBPS:
        warnings.append(
            f"the all-reduce reached {found['bus_gb_per_second']} GB/s: the fast network is not in"
            " use."
        )
    return {**found, "errors": errors, "warnings": warnings}


def _started(ranks: int, megabytes: int) -> dict[str, Any]:
    """The test in processes of this machine, under torchrun, with NCCL's words read from their
    output.
    """
    code = (  # a line in one write: ranks share their output
        "import json, os; from reinforge.cluster.network import measure; "
        f"os.write(1, ('MEASURED ' + json.dumps(measure({megabytes})) + '\\n').encode())"
    )
    path = os.pathsep.join(
        part
        for part in (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", ""))
        if part
    )
    env = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO", **os.environ, "PYTHONPATH": path}
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--no-python",
        sys.executable,
        "-c",
        code,
    ]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=300)
    line = next((line for line in done.stdout.splitlines() if "MEASURED " in line), None)
    if line is None:
        last = [text for text in done.stderr.splitlines() if text.strip()][-1:]
        return {
            "failed": f"the all-reduce ended with exit code {done.returncode}: {' '.join(last)}"
        }
    said = transports(done.stdout + done.stderr)
    return {**json.loads(line.partition("MEASURED ")[2]), **(said if said["network"] else {})}
