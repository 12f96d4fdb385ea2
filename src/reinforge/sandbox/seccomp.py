"""The system calls that a contained program may not make, as a BPF program for the kernel.

Namespaces and an ordinary uid already take most of these away.
What is refused here is also gone where those have a hole, and so is memory that no limit counts:
memory files, System V segments, shared memory without a file, huge pages, pages given to a pipe.
Names and numbers are the kernel's, for the two machines we know.
A call newer than the last one we know does not exist here; a call of another ABI ends the program.
"""

from __future__ import annotations

import platform
import struct

SILENTLY = 0
EPERM = 1
ENOSYS = 38
EAFNOSUPPORT = 97
AF_UNIX = 1
# SO_SNDBUF, SO_RCVBUF and their FORCE twins
SOL_SOCKET = 1
BUFFER_SIZES = (7, 8, 32, 33)
NEW_NAMESPACE = 0x7E020000  # the CLONE_NEW* flags of clone(2)
CLONE_FILES = 0x400
CLONE_THREAD = 0x10000
TERMINAL_INPUT = (0x5412, 0x541C)  # ioctl TIOCSTI, TIOCLINUX: type into somebody's terminal
MAP_SHARED = 0x01
MAP_ANONYMOUS = 0x20
MAP_HUGETLB = 0x40000
F_SETPIPE_SZ = 1031
PR_SET_DUMPABLE = 4
LAST = 456  # futex_requeue, Linux 6.7; the same number on both machines, as all since 424

# name: (x86_64, aarch64); None: the machine has no such call
DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes: their memory, descriptors, pages
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # mounts, roots and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # the kernel itself
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "lookup_dcookie": (212, 18),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "vhangup": (153, 58),
    "personality": (135, 92),
    # the clock and the name of the machine
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    # what outlives a process: keys, segments, queues, files without a name
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # a socket of a pair stays one, and nothing is passed through it that could outlive its process
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # counted for the user that we are outside, or for the whole machine
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "ioprio_set": (251, 30),
    # one byte of a huge page, given to a pipe, keeps all of it
    "vmsplice": (278, 75),
}
# said to be done and not done: they would write out all that the whole machine holds back
QUIET = {
    "sync": (162, 81),
    "syncfs": (306, 267),
}
OWN = {  # only for the caller itself (0): process 1, which watches the run, may be the same user
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "prlimit64": (302, 261),
}
SPECIAL = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "setsockopt": (54, 208),
    "ioctl": (16, 29),
    "fcntl": (72, 25),
    "mmap": (9, 222),
    "sendto": (44, 206),
    "setpriority": (141, 140),
    "prctl": (157, 167),
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH

LOAD = 0x20
JEQ = 0x15
JGE = 0x35
JSET = 0x45
AND = 0x54
RETURN = 0x06
ALLOW = 0x7FFF0000
KILL = 0x80000000
ERRNO = 0x00050000
# offsets in struct seccomp_data, little-endian
NR = 0
ARCH = 4
ARGS = 16
X32 = 0x40000000  # the bit that its numbers have
ON, REFUSE, ALLOW_IT = range(3)  # where a step goes
Step = tuple[int, int, int, int]  # operation, operand, where to if it holds, where to if not


class SeccompFilter:
    """Instructions in the making.

    A filter is asked about one call, so each case ends in a verdict or goes on to the next.
    """

    def __init__(self) -> None:
        self.code: list[bytes] = []

    def emit(self, op: int, k: int, true: int = 0, false: int = 0) -> None:
        self.code.append(struct.pack("<HBBI", op, true, false, k))

    def refuse(self, nr: int, errno: int) -> None:
        """A call that is refused whatever its arguments are."""
        self.emit(JEQ, nr, 0, 1)
        self.emit(RETURN, ERRNO | errno)

    def case(self, nr: int, errno: int, *steps: Step) -> None:
        """A call that its arguments decide on: the steps jump to `REFUSE`, to `ALLOW_IT`, or go
        `ON`.
        """
        self.emit(JEQ, nr, 0, len(steps) + 2)
        for i, (op, k, true, false) in enumerate(steps):
            left = len(steps) - i - 1  # instructions between the next one and the verdicts
            self.emit(op, k, *(0 if to == ON else left + (to == ALLOW_IT) for to in (true, false)))
        self.emit(RETURN, ERRNO | errno)
        self.emit(RETURN, ALLOW)


def load(number: int, high: bool = False) -> Step:
    """One half of an argument, the lower unless asked for the other."""
    return LOAD, ARGS + 8 * number + 4 * high, ON, ON


def bpf_filter(machine: str | None = None) -> bytes | None:
    """The filter as an array of struct sock_filter; None for a machine whose numbers
    are not here.
    """
    found = MACHINES.get(machine or platform.machine())
    if found is None:
        return None
    column, arch = found
    f = SeccompFilter()
    f.emit(LOAD, ARCH)
    f.emit(JEQ, arch, 1, 0)
    f.emit(RETURN, KILL)  # another ABI would have other numbers
    f.emit(LOAD, NR)
    if column == 0:
        f.emit(JGE, X32, 0, 1)
        f.emit(RETURN, KILL)
    f.emit(JGE, LAST + 1, 0, 1)
    f.emit(RETURN, ERRNO | ENOSYS)
    for numbers in DENIED.values():
        nr = numbers[column]
        if nr is not None:
            f.refuse(nr, EPERM)
    for numbers in QUIET.values():
        f.refuse(numbers[column], SILENTLY)
    for numbers in OWN.values():
        f.case(numbers[column], EPERM, load(0), (JEQ, 0, ALLOW_IT, REFUSE))
    _by_arguments(f, {name: numbers[column] for name, numbers in SPECIAL.items()})
    f.emit(RETURN, ALLOW)
    return b"".join(f.code)


def _by_arguments(f: SeccompFilter, number: dict[str, int]) -> None:
    """The calls of which only some uses are refused."""
    # its flags are in memory, out of a filter's sight; libc falls back to clone
    f.refuse(number["clone3"], ENOSYS)
    f.refuse(number["socket"], EAFNOSUPPORT)
    f.case(
        number["clone"],
        EPERM,
        load(0),
        (JSET, NEW_NAMESPACE, REFUSE, ON),
        (AND, CLONE_FILES | CLONE_THREAD, ON, ON),
        # the descriptors of such a thread would be counted by nobody
        (JEQ, CLONE_THREAD, REFUSE, ALLOW_IT),
    )
    # asyncio is built on one
    f.case(number["socketpair"], EAFNOSUPPORT, load(0), (JEQ, AF_UNIX, ALLOW_IT, REFUSE))
    f.case(
        number["mmap"],
        EPERM,
        load(3),
        (JSET, MAP_HUGETLB, REFUSE, ON),  # of a store that the whole machine shares
        (AND, MAP_SHARED | MAP_ANONYMOUS, ON, ON),
        # its pages stay when they are unmapped: nobody would count them
        (JEQ, MAP_SHARED | MAP_ANONYMOUS, REFUSE, ALLOW_IT),
    )
    f.case(
        # only to the other end: an address needs no bind to be heard by who runs beside
        number["sendto"],
        EPERM,
        load(4),
        (JEQ, 0, ON, REFUSE),
        load(4, high=True),
        (JEQ, 0, ALLOW_IT, REFUSE),
    )
    f.case(
        number["setpriority"],
        EPERM,
        load(0),
        (JEQ, 0, ON, REFUSE),
        load(1),
        (JEQ, 0, ALLOW_IT, REFUSE),
    )
    # process 1 could not look at it any more
    f.case(number["prctl"], EPERM, load(0), (JEQ, PR_SET_DUMPABLE, REFUSE, ALLOW_IT))
    f.case(number["fcntl"], EPERM, load(1), (JEQ, F_SETPIPE_SZ, REFUSE, ALLOW_IT))
    sizes: list[Step] = [(JEQ, size, REFUSE, ON) for size in BUFFER_SIZES]
    f.case(
        number["setsockopt"],
        EPERM,
        load(1),
        (JEQ, SOL_SOCKET, ON, ALLOW_IT),
        load(2),
        *sizes[:-1],
        (JEQ, BUFFER_SIZES[-1], REFUSE, ALLOW_IT),
    )
    first, second = TERMINAL_INPUT
    f.case(
        number["ioctl"], EPERM, load(1), (JEQ, first, REFUSE, ON), (JEQ, second, REFUSE, ALLOW_IT)
    )
