"""A real Slurm on this host: munged, slurmctld and two slurmds in a directory of their own, as root
and without systemd.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
CONF = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=100000
ReturnToService=2
KillWait=5
MinJobAge=300
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing() -> list[str]:
    """What is not installed; with CI=true it is installed first (Debian's packages)."""
    absent = [
        name
        for name in PROGRAMS
        if shutil.which(name) is None and not Path("/usr/sbin", name).exists()
    ]
    if absent and os.environ.get("CI") == "true" and os.geteuid() == 0 and shutil.which("apt-get"):
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = [
            "apt-get",
            "install",
            "-y",
            "-q",
            "--no-install-recommends",
            "slurm-wlm",
            "munge",
        ]
        # the lists may be old, or not there
        for words in (install, ["apt-get", "update", "-q"], install):
            if (
                subprocess.run(
                    words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                ).returncode
                == 0
                and words is install
            ):
                return []
    return absent


def free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Slurm:
    def __init__(self, folder: Path):
        self.folder = folder
        self.processes = list[subprocess.Popen[bytes]]()
        self.env = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.environ["PATH"] + ":/usr/sbin",
        }
        for name in list(self.env):
            if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF":
                del self.env[name]

    def call(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def _start(self, *words: str) -> None:
        log = (self.folder / f"{Path(words[0]).name}.out").open("ab")
        self.processes.append(
            subprocess.Popen(
                words,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )

    def start(self) -> None:
        folder = self.folder
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(
            CONF.format(
                host=socket.gethostname().partition(".")[0], folder=folder, ports=free_ports(3)
            )
        )
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={key}",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        )
        self.until(lambda: (folder / "munge.socket").exists(), 10, "munged")
        self._start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", node)
        self.until(
            lambda: self.call("sinfo", "--noheader", "--format=%T %D", check=False) == "idle 2",
            30,
            "two idle nodes",
        )

    def until(
        self, holds: Callable[[], bool], seconds: float, what: str, told: Callable[[], str] = str
    ) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"no {what} after {seconds:g} s; {told() or self.said()}"
            time.sleep(0.2)

    def said(self) -> str:
        return "\n".join(
            f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}"
            for p in sorted(self.folder.glob("*.log"))
        )

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, ...; empty when Slurm has forgotten it."""
        words = dict(
            w.split("=", 1)
            for w in self.call("scontrol", "show", "job", job, "--oneliner", check=False).split()
            if "=" in w
        )
        return words.get("JobState", "")

    def stop(self) -> None:
        self.call("scancel", "--user=root", "--signal=KILL", check=False)
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """Started, and gone at the end, whatever happens."""
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
