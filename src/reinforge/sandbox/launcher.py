"""Runs as a script of its own, between us and a program: makes the namespaces, the root and the
limits, starts it, waits for it.

Two processes. The outer one stays outside and waits. The inner one is process 1 of the new pid
namespace: when it ends, for whatever reason, the kernel kills everything else in there, so nothing
outlives a run. It cannot be reached from the program: signals to process 1 from inside are dropped
by the kernel, it is not dumpable, and what it holds is no secret (the program, its limits).

Only the standard library and no package around it: it starts once per run, or once for many
(forks.py): then our drivers need not be started either. A fork holds nothing of other runs: jobs
are read after it. The job comes by `marshal` from our own process, over the pipe `control`, whose
end of file means that nobody waits any more. Lines on the pipe `report`: `pid N` (process 1, as
seen from outside), `started`, `exit STATUS CPU RSS`, `over WHAT` (memory, cpu, descriptors),
`greedy`, or `error WORDS`. A `go` byte is waited for after `pid`, so that whoever is to kill
process 1 holds a handle on it before anything foreign runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import marshal
import os
import resource
import select
import sys
import time
from typing import Any

# mnt cgroup uts ipc user pid net
CLONE_ALL = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR = 442
AT_RECURSIVE = 0x8000
AT_FDCWD = -100
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
SIGINT = 2
SIGPIPE = 13
SIGXFSZ = 25
INSIDE = 1000  # uid and gid of the program, as it sees them
OUTSIDE = 65534  # what they are outside when we are root
TICK_MS = 40  # how often memory and processor time are looked at
SPARE_CPU = 0.5  # seconds: a process that is alone over its limit gets the kernel's SIGXCPU first
# seconds of processor that a run wanted or had beyond one core's: those beside it may have starved
GREEDY = 0.5
COUNTED = (b"RssAnon:", b"RssShmem:", b"VmSwap:", b"VmPTE:")  # lines of /proc/PID/status
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

libc = ctypes.CDLL(None, use_errno=True)
DRIVERS: dict[str, Any] = {}  # loaded by forks.py
PREPARED: list[bool] = []  # whether the root and an empty network are there already (forks.py)
# the /proc of outside, open in process 1 where the run can have none of its own
HOST_PROC: list[int] = []


class ContainmentFailure(Exception):
    """A primitive of the containment is missing; the text names it."""


def must(name: str, *arguments: Any) -> int:
    value = getattr(libc, name)(*arguments)
    if value < 0:
        raise ContainmentFailure(
            f"{'user namespaces (unshare)' if name == 'unshare' else name}:"
            f" {os.strerror(ctypes.get_errno())}"
        )
    return value


def read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            os._exit(1)
        data += piece
    return data


def close_all_but(*keep: int) -> None:
    low = 0
    for fd in sorted(keep):
        if low < fd:  # an empty range from 0 would close everything
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1 << 20)


def write_file(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def new_namespaces() -> None:
    """As root the program gets a uid that is not root's outside either (its number of processes
    could not be limited otherwise); a second process, which stayed where root is root, has to write
    that map.
    """
    uid = os.getuid()
    gid = os.getgid()
    flags = CLONE_ALL & ~CLONE_NEWNET if PREPARED else CLONE_ALL
    if uid == 0:
        r, w = os.pipe()
        me = os.getpid()
        writer = os.fork()
        if writer == 0:
            os.read(r, 1)
            for kind in ("uid", "gid"):
                write_file(f"/proc/{me}/{kind}_map", f"0 0 1\n{INSIDE} {OUTSIDE} 1\n")
            os._exit(0)
        try:
            must("unshare", flags)
        finally:
            os.write(w, b"1")
            status = os.waitpid(writer, 0)[1]
        os.close(r)
        os.close(w)
        if status:
            raise ContainmentFailure("cannot map uids (uid_map)")
    else:
        must("unshare", flags)
        write_file("/proc/self/setgroups", "deny")
        write_file("/proc/self/uid_map", f"{INSIDE} {uid} 1\n")
        write_file("/proc/self/gid_map", f"{INSIDE} {gid} 1\n")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = (
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    if libc.mount(*encoded) < 0:
        raise ContainmentFailure(f"mount {target}: {os.strerror(ctypes.get_errno())}")


def read_only(path: str, nodev: int = MS_NODEV) -> None:
    """Everything mounted at and below `path`; flags are added to what is there, never
    taken away.
    """
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | nodev, 0, 0, 0)
    number = ctypes.c_long(SYS_MOUNT_SETATTR)
    where = path.encode()
    if (
        libc.syscall(
            number, AT_FDCWD, where, AT_RECURSIVE, ctypes.byref(attributes), ctypes.c_size_t(32)
        )
        < 0
    ):
        raise ContainmentFailure(f"mount_setattr (Linux 5.12): {os.strerror(ctypes.get_errno())}")


def pivot_root(new: str, old: str) -> None:
    if (
        libc.syscall(ctypes.c_long(SYS_PIVOT_ROOT[os.uname().machine]), new.encode(), old.encode())
        < 0
    ):
        raise ContainmentFailure(f"pivot_root: {os.strerror(ctypes.get_errno())}")


def mount_work(limits: dict[str, Any], target: str, owner: int = INSIDE) -> None:
    size = f"size={limits['disk']},nr_inodes={limits['files']},mode=0700,uid={owner},gid={owner}"
    mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, size)


def new_root(job: dict[str, Any], whole: bool = True) -> None:
    """A root of its own: system folders read only, five devices, a fresh /proc, one writable folder
    (for a job that says how large), nothing else of the host. Not `whole`: without the last two,
    and with the host's /proc, to be covered (`finish_root`).
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
    for source, path in job["binds"]:
        target = "/new" + path
        if os.path.isdir("/old" + source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        mount("/old" + source, target, None, MS_BIND | MS_REC)
        read_only(target, 0 if path.startswith("/dev/") else MS_NODEV)
    for path in job["empty"]:
        mount(
            "tmpfs", "/new" + path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k,mode=0755"
        )
    for path, text in job["texts"]:
        os.makedirs(os.path.dirname("/new" + path), exist_ok=True)
        with open("/new" + path, "w") as file:
            file.write(text)
    for target, name in job["links"]:
        os.symlink(target, "/new" + name)
    for folder in ("/new/proc", "/new/tmp"):
        os.mkdir(folder)
    if whole:
        try:
            mount("proc", "/new/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2")
        except ContainmentFailure as error:
            # the host's is masked, as in most containers: the run has none, and is measured from
            # outside
            HOST_PROC.append(host_proc(error))
        if "limits" in job:
            mount_work(job["limits"], "/new/tmp")
    else:
        mount("/old/proc", "/new/proc", None, MS_BIND | MS_REC)
    mount("none", "/new", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/new")
    pivot_root(".", ".")
    must("umount2", b".", MNT_DETACH)
    os.chdir("/")
    if whole:
        must("sethostname", b"sandbox", 7)


def host_proc(error: ContainmentFailure) -> int:
    """A descriptor of the host's /proc, for process 1 alone.

    Without any /proc there would be no limit on memory: then there is no run.
    """
    try:
        proc = os.open("/old/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.readlink("self", dir_fd=proc)
    except OSError:
        raise ContainmentFailure(f"{error}, and no other /proc to measure memory by") from None
    return proc


def finish_root() -> None:
    """What is added to a root that was made for many.

    The host's /proc must be covered, or there is no run.
    """
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2")
    must("sethostname", b"sandbox", 7)


def own_user_namespace() -> None:
    """Bubblewrap started as root leaves us root: change to an ordinary uid, whose processes are
    counted for this run alone.
    """
    os.setgroups([])
    os.setresgid(OUTSIDE, OUTSIDE, OUTSIDE)
    os.setresuid(OUTSIDE, OUTSIDE, OUTSIDE)
    must("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # our own /proc entries belong to root otherwise
    must("unshare", CLONE_NEWUSER)
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{INSIDE} {OUTSIDE} 1\n")
    write_file("/proc/self/gid_map", f"{INSIDE} {OUTSIDE} 1\n")


def drop(job: dict[str, Any]) -> None:
    """Become an ordinary user for good: no capability now, none after exec, none by a
    set-uid file.
    """
    if job["mode"] != "bare":
        for capability in range(64):
            if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
                break
        libc.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0)
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(INSIDE, INSIDE, INSIDE)
            os.setresuid(INSIDE, INSIDE, INSIDE)
        must(
            "capset",
            ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)),
            ctypes.byref((ctypes.c_uint32 * 6)()),
        )
    limits = job["limits"]
    r = resource
    for kind, value in (
        (r.RLIMIT_CPU, limits["cpu"]),
        (r.RLIMIT_AS, limits["space"]),
        (r.RLIMIT_FSIZE, limits["disk"]),
        (r.RLIMIT_NOFILE, limits["descriptors"]),
        (r.RLIMIT_NPROC, limits["processes"]),
        (r.RLIMIT_MEMLOCK, 1 << 16),
        (r.RLIMIT_CORE, 1),
        (r.RLIMIT_MSGQUEUE, 0),
        (r.RLIMIT_RTPRIO, 0),
        (r.RLIMIT_NICE, 0),
        (r.RLIMIT_SIGPENDING, 1024),
    ):
        # a core size of 1, unlike 0, also keeps a core handler of the host from being started
        if value is not None:
            hard = r.getrlimit(kind)[1]
            value = value if hard == r.RLIM_INFINITY else min(value, hard)
            # a second between SIGXCPU and SIGKILL
            later = value + 1 if kind == r.RLIMIT_CPU and hard == r.RLIM_INFINITY else value
            r.setrlimit(kind, (value, later))
    # as after exec: its own /proc entries are its own, and process 1 may read them
    must("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
    must("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if job["filter"]:
        code = ctypes.create_string_buffer(job["filter"], len(job["filter"]))
        program = (ctypes.c_uint64 * 2)(len(job["filter"]) // 8, ctypes.addressof(code))
        must("prctl", PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)


def become(job: dict[str, Any]) -> None:
    """What the program would be after exec, without the exec: one of our drivers, loaded before the
    fork.
    """
    os.environ.clear()
    os.environ.update(job["env"])
    sys.path[:0] = job["packages"]
    code = 0
    try:
        DRIVERS[job["driver"]].main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass
    os._exit(code & 255)


def start(job: dict[str, Any], report: int, channel: list[int]) -> None:
    """In the child: put its files down, give up everything, become the program."""
    stage = "files"
    try:
        if job["mode"] != "bare":
            os.setsid()
        os.chdir(job["work"])
        os.umask(0o022)
        for name, data in job["content"]:
            if job["driver"] in DRIVERS and name.startswith("reinforge/"):
                continue  # it is loaded
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "wb") as file:
                file.write(data)
        os.umask(0o077)
        for number in (SIGPIPE, SIGXFSZ):  # Python ignores these, and exec keeps that
            libc.signal(number, None)
        for target, fd in enumerate(channel, 3):
            os.dup2(fd, target)
        close_all_but(*range(3 + len(channel)), report)
        stage = "privileges"
        drop(job)
        stage = "exec"
        os.write(report, b"started\n")
        if job["driver"] in DRIVERS:
            os.close(report)
            become(job)
        os.execve(job["argv"][0], job["argv"], dict(job["env"]))
    except BaseException as error:
        os.write(report, f"error {stage}: {error}\n".encode()[:500])
    os._exit(127)


def holds_memory(status: bytes) -> bool:
    """Whether a task of that /proc/PID/status has memory: one that has ended, or is about to, has
    none.
    """
    return b"\n" + COUNTED[0] in status  # its name, which it chooses, cannot have a line of its own


class ProcessMeter:
    """What all processes of a run have and use together, as process 1 sees it.

    Look at it from time to time.
    """

    def __init__(self, work: str):
        self.work = work
        # bytes that are no file's, shared or not, in memory or swapped out, and the files; mapped
        # files count twice
        self.memory = 0
        self.cpu = 0.0  # seconds, those of processes that have ended included
        # whether it ever had, or would have had, more than one core for a while
        self.greedy = False
        self._started = self._looked = time.monotonic()
        self._reaped = self._sum = self._wanted = 0.0
        self._slots: dict[str, int] = {}  # room for descriptors, by task
        self._proc = (
            HOST_PROC[0]
            if HOST_PROC
            else os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        )

    def close(self) -> None:
        if self._proc not in HOST_PROC:
            os.close(self._proc)

    def ended(self, used: Any) -> None:
        """Process 1 has waited for one: its processor time and that of the children it had waited
        for.
        """
        self._reaped += used.ru_utime + used.ru_stime

    def look(self) -> None:
        files = os.statvfs(self.work)
        self.memory = (files.f_blocks - files.f_bfree) * files.f_frsize
        self._slots = {}
        seconds = self._reaped
        runnable = 0
        for process in self._processes():
            try:
                fields = self._read(f"{process}/stat").rpartition(b")")[2].split()
                runnable += fields[0] == b"R"
                # its own, and that of children it waited for
                seconds += sum(map(int, fields[11:15])) / TICKS_PER_SECOND
                task, status = self._living(process)
                for line in status.split(b"\n"):  # a name may have other ends of lines in it
                    if line.startswith(COUNTED):
                        self.memory += int(line.split()[1]) * 1024
                    elif line.startswith(b"FDSize:"):
                        self._slots[task] = int(line.split()[1])
            except (OSError, IndexError, ValueError):
                pass  # it has just ended
        self._add(seconds, runnable)

    def _living(self, process: str) -> tuple[str, bytes]:
        """A task of a process, and its status, that shows what the process holds.

        That is its first thread, unless that one has ended and left the others behind.
        """
        status = self._read(f"{process}/status")
        if not holds_memory(status):
            for name in self._names(f"{process}/task"):
                task = f"{process}/task/{name}"
                try:
                    other = self._read(f"{task}/status")
                except OSError:
                    continue  # this one has ended, and others may not have
                if holds_memory(other):
                    return task, other
        return process, status

    def _add(self, seconds: float, runnable: int) -> None:
        """A process that nobody waited for leaves the sum with its seconds: what was seen once
        stays counted.
        """
        self.cpu += max(0.0, seconds - self._sum)
        self._sum = seconds
        now = time.monotonic()
        self._wanted += max(0, runnable - 1) * (now - self._looked)
        self._looked = now
        self.greedy |= max(self._wanted, self.cpu - (now - self._started)) > GREEDY

    def _read(self, name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY, dir_fd=self._proc)
        try:
            return os.read(fd, 8192)
        finally:
            os.close(fd)

    def more_descriptors_than(self, limit: int) -> bool:
        """They are counted only where there is room for so many: room comes in powers of two, from
        64.
        """
        if sum(self._slots.values()) <= limit:
            return False
        return sum(self._open_files(task, room) for task, room in self._slots.items()) > limit

    def _open_files(self, task: str, room: int) -> int:
        try:
            return len(self._names(f"{task}/fd"))
        except PermissionError:  # it does not let us look, or is about to end and has no owner now
            return room if self._has_memory(task) else 0
        except OSError:
            return 0

    def _has_memory(self, task: str) -> bool:
        try:
            return holds_memory(self._read(f"{task}/status"))
        except OSError:
            return False

    def _names(self, folder: str) -> list[str]:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def _processes(self) -> list[str]:
        """All but process 1: what its own /proc lists, or whatever descends from it in
        the host's.
        """
        if not HOST_PROC:
            return [name for name in os.listdir(self._proc) if name.isdigit() and name != "1"]
        parents: dict[str, list[str]] = {}
        for name in os.listdir(self._proc):
            if name.isdigit():
                try:
                    parent = self._read(f"{name}/stat").rpartition(b")")[2].split()[1].decode()
                except (OSError, IndexError):
                    continue
                parents.setdefault(parent, []).append(name)
        found = list(parents.get(os.readlink("self", dir_fd=self._proc), ()))
        for name in found:  # grows while it is walked
            found += parents.get(name, ())
        return found


def first_process() -> None:
    """Makes this process 1 of a run: out of the program's reach, and gone when whoever started it
    is.
    """
    # signals without a handler never reach process 1 from inside (`import signal` takes longer than
    # all else)
    libc.signal(SIGINT, None)
    must("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    must("prctl", PR_SET_PDEATHSIG, 9, 0, 0, 0)  # after the change of uid, which clears it


def watch(
    main: int, control: int, report: int, limits: dict[str, Any], work: str, measured: bool = True
) -> None:
    """Reaps whatever dies and looks at what is used until the program ends, has too much, or nobody
    waits for it.
    """
    ended = os.pidfd_open(main)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, 0)  # only its end: whoever asked has gone
    meter = ProcessMeter(work) if measured else None
    greedy = False
    try:
        while True:
            if control in [fd for fd, _ in poll.poll(TICK_MS)]:
                return
            while True:
                try:
                    pid, status, used = os.wait4(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == main:
                    seconds = max(used.ru_utime + used.ru_stime, meter.cpu if meter else 0.0)
                    os.write(report, f"exit {status} {seconds:.3f} {used.ru_maxrss}\n".encode())
                    return
                if pid == 0:
                    break
                if meter is not None:
                    meter.ended(used)
            if meter is None:
                continue
            meter.look()
            if meter.greedy and not greedy:
                greedy = True
                os.write(report, b"greedy\n")
            for name, used_up in (
                ("memory", meter.memory > limits["memory"]),
                ("cpu", meter.cpu > limits["cpu"] + SPARE_CPU),
                ("descriptors", meter.more_descriptors_than(limits["descriptors_in_all"])),
            ):
                if used_up:
                    os.write(report, f"over {name}\n".encode())
                    return
    finally:
        os.close(ended)
        if meter is not None:
            meter.close()


def inner(job: dict[str, Any], control: int, report: int, channel: list[int]) -> None:
    """Process 1: make the root, start the program, and end when it does."""
    if job["mode"] == "own":
        new_root(job)
    elif job["mode"] == "bwrap":
        mount_work(job["limits"], "/tmp", OUTSIDE if os.getuid() == 0 else INSIDE)
        if os.getuid() == 0:
            own_user_namespace()
    first_process()
    if read_exactly(control, 1) != b"g":
        os._exit(1)
    main = os.fork()
    if main == 0:
        start(job, report, channel)
    for fd in (0, 1, 2, *channel):
        os.close(fd)
    watch(main, control, report, job["limits"], job["work"], measured=job["mode"] != "bare")


def run(handed: list[int], boxed: bool = False) -> None:
    """One run, from its job to its end.

    `boxed`: process 1 is there already, and this is the program's. Never returns.
    """
    # out of the program's numbers
    control, report, *channel = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for fd in handed)
    close_all_but(0, 1, 2, control, report, *channel)
    job = marshal.loads(read_exactly(control, int.from_bytes(read_exactly(control, 8), "little")))
    if boxed:
        start(job, report, channel)
    try:
        if job["mode"] != "own":
            if job["mode"] == "bare":
                os.write(report, f"pid {os.getpid()}\n".encode())
            inner(job, control, report, channel)
            os._exit(0)
        must("prctl", PR_SET_PDEATHSIG, 9, 0, 0, 0)
        new_namespaces()
        first = os.fork()
        if first == 0:
            inner(job, control, report, channel)
            os._exit(0)
        os.write(report, f"pid {first}\n".encode())
        close_all_but()
        os.waitpid(first, 0)
        os._exit(0)
    except BaseException as error:
        os.write(report, f"error {error or type(error).__name__}\n".encode()[:500])
        os._exit(1)


def main() -> None:
    run([int(argument) for argument in sys.argv[1:]])


if __name__ == "__main__":
    main()
