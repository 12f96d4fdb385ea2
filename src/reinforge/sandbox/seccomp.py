"""The system calls that a contained program may not make, as a BPF program for the kernel.

Namespaces and an ordinary uid already take most of these away; what is refused here is also gone where those have a hole, and so is
memory that no limit counts (memfd, System V segments). Names and numbers are the kernel's, for the two machines we know.
"""

from __future__ import annotations

import platform
import struct

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
AF_UNIX = 1
NEW_NAMESPACE = 0x7E020000  # the CLONE_NEW* flags of clone(2)
TERMINAL_INPUT = (0x5412, 0x541C)  # ioctl TIOCSTI, TIOCLINUX: type into somebody's terminal

# name: (x86_64, aarch64); None: the machine has no such call
DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "uselib": (134, None), "vhangup": (153, 58), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "lookup_dcookie": (212, 18), "personality": (135, 92), "fanotify_init": (300, 262),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),  # a socket of a pair stays one,
    "sendmsg": (46, 211), "sendmmsg": (307, 269),  # ... and nothing is passed through it that could outlive its process
    "inotify_init": (253, None), "inotify_init1": (294, 26),  # counted for the user that we are outside
}  # fmt: skip
SPECIAL = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ioctl": (16, 29),
    "sendto": (44, 206),
    "prlimit64": (302, 261),
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH

LOAD, JEQ, JGE, JSET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
NR, ARCH, ARG0, ARG1, ARG4 = 0, 4, 16, 24, 48  # offsets in struct seccomp_data; the low halves of little-endian arguments


def bpf_filter(machine: str | None = None) -> bytes | None:
    """The filter as an array of struct sock_filter; None for a machine whose numbers are not here."""
    found = MACHINES.get(machine or platform.machine())
    if found is None:
        return None
    column, arch = found
    code: list[bytes] = []

    def emit(op: int, k: int, true: int = 0, false: int = 0) -> None:
        code.append(struct.pack("<HBBI", op, true, false, k))

    def refuse(errno: int) -> None:
        emit(RETURN, 0x00050000 | errno)

    emit(LOAD, ARCH)
    emit(JEQ, arch, 1, 0)
    emit(RETURN, KILL)  # another ABI would have other numbers
    emit(LOAD, NR)
    if column == 0:
        emit(JGE, 0x40000000, 0, 1)  # x32
        refuse(ENOSYS)
    for numbers in DENIED.values():
        if numbers[column] is not None:
            emit(JEQ, int(numbers[column] or 0), 0, 1)
            refuse(EPERM)
    number = {name: numbers[column] for name, numbers in SPECIAL.items()}
    emit(JEQ, number["clone3"], 0, 1)  # its flags are in memory, out of a filter's sight; libc falls back to clone
    refuse(ENOSYS)
    emit(JEQ, number["socket"], 0, 1)
    refuse(EAFNOSUPPORT)
    emit(JEQ, number["clone"], 0, 4)
    emit(LOAD, ARG0)
    emit(JSET, NEW_NAMESPACE, 0, 1)
    refuse(EPERM)
    emit(RETURN, ALLOW)
    emit(JEQ, number["socketpair"], 0, 4)  # unix pairs stay: asyncio is built on one
    emit(LOAD, ARG0)
    emit(JEQ, AF_UNIX, 1, 0)
    refuse(EAFNOSUPPORT)
    emit(RETURN, ALLOW)
    emit(JEQ, number["prlimit64"], 0, 4)  # only its own: another's need no more than the same user, and process 1 may be that
    emit(LOAD, ARG0)
    emit(JEQ, 0, 1, 0)
    refuse(EPERM)
    emit(RETURN, ALLOW)
    emit(JEQ, number["sendto"], 0, 6)  # only to the other end: an address needs no bind to be heard by who runs beside
    emit(LOAD, ARG4)
    emit(JEQ, 0, 0, 2)
    emit(LOAD, ARG4 + 4)
    emit(JEQ, 0, 1, 0)
    refuse(EPERM)
    emit(RETURN, ALLOW)
    emit(JEQ, number["ioctl"], 0, 4)
    emit(LOAD, ARG1)
    emit(JEQ, TERMINAL_INPUT[0], 1, 0)
    emit(JEQ, TERMINAL_INPUT[1], 0, 1)
    refuse(EPERM)
    emit(RETURN, ALLOW)
    return b"".join(code)
