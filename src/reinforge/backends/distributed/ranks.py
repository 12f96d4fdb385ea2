"""Several processes, one of which drives.

Rank 0 runs the loop and calls; the others serve: they wait for a command, run their part of it
beside rank 0's, and answer.

`Ranks.open(n)` starts the others as processes of this machine; under torchrun they are there
already and call `serve`. Every rank is in a collective at the same moment, so an exception in one
of them leaves the others waiting: the rank leaves its story in the store and ends, and rank 0 tells
who it was.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from reinforge.backends.distributed.commands import LAZY, CommandTree, raise_file_limit
from reinforge.backends.distributed.wire import pack, unpack
from reinforge.core.cpus import bind, numa_cpus, threads_for, visible_gpu
from reinforge.core.errors import InputError, ReinforgeError, StoppedByPolicy, said_by
from reinforge.core.torchrun import launched

IDLE = timedelta(days=30)  # how long a rank waits for a command: rollouts take what they take
WORK = timedelta(minutes=30)  # how long a rank waits for another in the middle of a pass
EVIDENCE_SECONDS = 10.0  # for the reason of a lost connection to arrive
# in a collective with a rank that is dead, before the process ends the hard way
BLOCKED_SECONDS = 30.0
WRONG_INPUT = "wrong input"  # in the store where what a rank said is an InputError
PARENT = "REINFORGE_PARENT"  # pid of the rank 0 that started this process

_open: Ranks | None = None


def current() -> Ranks | None:
    """The ranks that are open."""
    return _open


class RankMember:
    """One rank's end of the connection: where it computes, the process group of its work, and the
    `commands`, which go over the CPU. Every worker gets it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, kind: str):
        self.store = store
        self.rank = rank
        self.size = size
        local = int(os.environ.get("LOCAL_RANK", rank))
        self.device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        if rank:  # rank 0 also runs the loop, and starts processes that belong anywhere
            beside = int(os.environ.get("LOCAL_WORLD_SIZE", size))
            gpus = [visible_gpu(local)] if kind == "cuda" else []
            bind(numa_cpus(gpus, local, beside))
        os.environ.setdefault(LAZY, "1")
        raise_file_limit()
        transport = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(
            transport,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=WORK,
        )
        self.commands = CommandTree(rank, size, IDLE)
        self.objects: dict[int, Any] = {}
        # a whole model that this rank generates with: `Backend.weights` brings it up to date
        self.copy: nn.Module | None = None

    def run(self, kind: str, target: int, name: Any, args: tuple[Any, ...]) -> Any:
        """`make`: name(member, *args) becomes object `target`; `call`: its method, or a function of
        it; `drop` forgets it.
        """
        if kind == "make":
            self.objects[target] = name(self, *args)
            return None
        if kind == "drop":
            self.objects.pop(target, None)
            return None
        return (
            name(self.objects[target], *args)
            if callable(name)
            else getattr(self.objects[target], name)(*args)
        )


class Ranks:
    """All processes of a run that trains on ranks, seen from rank 0. `open_ranks` in the build
    opens them; backends make objects on them, and `call` runs a method of such an object on every
    rank, each with arguments of its own.
    """

    def __init__(self, size: int, kind: str):
        self.size = size
        self.kind = kind
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.broken: str | None = None  # why nothing can be asked any more
        self._fault: type[InputError | StoppedByPolicy] = StoppedByPolicy  # and whose fault it is
        self._since: float | None = None  # when the call in progress began
        self._made = 0
        self._ended = threading.Event()
        self._turn = threading.Lock()  # one command at a time, whichever thread gives it
        if launched():
            store = next(iter(dist.rendezvous("env://")))[0]
        else:
            store = dist.TCPStore(
                "127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=WORK
            )
            self.children = {rank: _spawn(rank, size, kind, store.port) for rank in range(1, size)}
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        self._store = store
        store.set("kind", kind)

    @cached_property
    def own(self) -> RankMember:
        """Rank 0's own end.

        Made with the first command: while the others start, rank 0 reads its data.
        """
        with self._guarded():
            return RankMember(self._store, 0, self.size, self.kind)

    # ---- begin and end ----

    @classmethod
    @contextlib.contextmanager
    def open(cls, size: int | None, kind: str) -> Iterator[Ranks]:
        """The ranks that are open already, or new ones that end with the block.

        Those of torchrun end with the process.
        """
        global _open
        if _open is not None and _open.broken is None:
            _matches(size, _open.size)
            yield _open
            return
        if _open is not None and not launched():
            _open.close()  # broken: its process group is in the way of a new one
        ranks = cls(how_many(size, kind), kind)
        _open = ranks
        if launched():
            atexit.register(ranks.close)
            yield ranks
            return
        try:
            yield ranks
        finally:
            _open = None
            ranks.close()

    def close(self) -> None:
        """Ends the other ranks: by a word where they listen, by force where they do not."""
        if self._ended.is_set():
            return
        self._ended.set()
        free = self._turn.acquire(timeout=10.0)  # a command in another thread
        self.broken = self.broken if free else "a command is under way"
        if self.broken is None and "own" in vars(self):
            with contextlib.suppress(RuntimeError):
                self._send([pack(("stop", 0, None, ()))] * self.size)
        until = time.monotonic() + 10.0
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self.broken is None and "own" in vars(self):
                    child.wait(max(0.1, until - time.monotonic()))
            if child.poll() is None:
                child.kill()
                child.wait()
        if free:
            self._turn.release()
        if dist.is_initialized() and (self.broken is None or self.kind == "cpu"):
            # models in cycles would end their groups after the process has ended its own
            gc.collect()
            dist.destroy_process_group()

    # ---- commands ----

    def make(self, factory: Callable[..., Any], args: Sequence[tuple[Any, ...]]) -> int:
        """An object on every rank: factory(member, *its arguments). Returns its number."""
        self._made += 1
        self._all("make", self._made, factory, args)
        return self._made

    def call(
        self,
        target: int,
        method: str | Callable[..., Any],
        args: Sequence[tuple[Any, ...]] | None = None,
    ) -> list[Any]:
        """What the method of each rank's object returned, in the order of ranks.

        Rank 0's arguments and result are not copied.
        """
        return self._all("call", target, method, args if args is not None else [()] * self.size)

    @property
    def usable(self) -> bool:
        """Whether they can be asked: nothing is broken, and they are still open."""
        return self.broken is None and not self._ended.is_set()

    def drop(self, target: int) -> None:
        if self.usable:
            self._all("drop", target, None, [()] * self.size)

    def _all(self, kind: str, target: int, name: Any, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        assert len(args) == self.size
        self._check()
        own = self.own
        # what cannot be sent is refused before anybody waits
        messages = [b"", *(pack((kind, target, name, own)) for own in args[1:])]
        with self._turn, self._guarded():
            self._send(messages)
            mine = own.run(kind, target, name, args[0])
            found = own.commands.gather(b"")
        return [mine, *(unpack(answer) for answer in found[1:])]

    def _send(self, messages: list[bytes]) -> None:
        self.own.commands.scatter(messages)

    # ---- faults ----

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever is raised inside leaves the ranks out of step: from then on nothing can be
        asked.
        """
        self._since = time.monotonic()
        try:
            yield
        except ReinforgeError as error:
            self.broken = str(error)
            if isinstance(error, InputError):
                self._fault = InputError
            raise
        except RuntimeError as error:
            self.broken = said_by(error)
            evidence = None if isinstance(error, torch.OutOfMemoryError) else self._evidence()
            if evidence is None:
                raise
            self.broken = evidence
            if self._store.check([WRONG_INPUT]):
                self._fault = InputError
            raise self.fault() from error
        except BaseException as error:
            self.broken = repr(error)
            raise
        finally:
            self._since = None

    def _check(self) -> None:
        if dead := self._dead():
            self.broken = self.broken or dead
        if self.broken is not None:
            raise self.fault()

    def fault(self) -> InputError | StoppedByPolicy:
        """The error of whoever asks when nothing can be asked any more."""
        return self._fault(self.broken or "the ranks have ended")

    def _evidence(self) -> str | None:
        """Who is the reason of a failed collective: what a rank said before it ended, or which one
        is gone.
        """
        until = time.monotonic() + EVIDENCE_SECONDS
        while time.monotonic() < until:
            for rank in range(1, self.size):
                if self._store.check([f"error/{rank}"]):
                    return f"rank {rank} failed: {self._store.get(f'error/{rank}').decode()}"
            if dead := self._dead():
                return dead
            time.sleep(0.1)
        return None

    def _dead(self) -> str | None:
        for rank, child in self.children.items():
            if (code := child.poll()) is not None and not self._ended.is_set():
                how = (
                    f"was ended by {signal.Signals(-code).name}"
                    if code < 0
                    else f"ended with exit code {code}"
                )
                return (
                    f"rank {rank} (pid {child.pid}) {how}. The newest checkpoint is intact: the"
                    " same command continues from it."
                )
        return None

    def _watch(self) -> None:
        """A collective with a rank that is gone may never return (NCCL): then this ends the
        process.
        """
        blocked: float | None = None
        while not self._ended.wait(0.5):
            blocked = (
                (blocked or time.monotonic()) if self._since is not None and self._dead() else None
            )
            if blocked is not None and time.monotonic() - blocked > BLOCKED_SECONDS:
                print(f"error: {self._dead()}", file=sys.stderr, flush=True)
                for child in self.children.values():
                    child.kill()
                os._exit(StoppedByPolicy.exit_code)


def how_many(size: int | None, kind: str) -> int:
    """The ranks that can be started here where `size` are asked for."""
    if launched():
        world = int(os.environ["WORLD_SIZE"])
        _matches(size, world)
        return world
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    if size is None and kind != "cuda":
        raise InputError(
            "without GPUs there is no telling how many processes are to train.",
            where="train.ranks",
            fix="Set it, e.g. train.ranks=2.",
        )
    if kind == "cuda" and size is not None and size > gpus:
        raise InputError(
            f"{size} ranks need a GPU each, and there are {gpus}.",
            where="train.ranks",
            fix=f"Set it to at most {gpus}.",
        )
    return size if size is not None else gpus


def _matches(asked: int | None, there: int) -> None:
    if asked is not None and asked != there:
        raise InputError(
            f"{asked} ranks are asked for, and {there} were started.",
            where="train.ranks",
            fix="Leave it out under torchrun: --nproc_per_node says it.",
        )


def _spawn(rank: int, size: int, kind: str, port: int) -> subprocess.Popen[bytes]:
    """A process that serves as `rank`.

    It finds modules where this one does, and shares the cores with the others.
    """
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        PARENT: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads_for(size)),
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
    }
    return subprocess.Popen(
        [sys.executable, "-c", "from reinforge.backends.distributed.ranks import serve; serve()"],
        env=env,
        stdin=subprocess.DEVNULL,
    )


def serve() -> NoReturn:
    """The life of a rank other than 0.

    A signal that is meant for the run reaches rank 0, which saves and then says stop.
    """
    # in an actor, signals are Ray's business
    if threading.current_thread() is threading.main_thread():
        for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(kind, signal.SIG_IGN)
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    parent = os.environ.get(PARENT)  # or torchrun's agent
    threading.Thread(
        target=_follow, args=(int(parent) if parent else os.getppid(),), daemon=True
    ).start()
    if parent:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            size,
            is_master=False,
            timeout=WORK,
        )
    else:
        store = next(iter(dist.rendezvous("env://")))[0]
    code = 0
    try:
        # what takes long, while rank 0 does other things
        importlib.import_module("reinforge.models.load")
        importlib.import_module("transformers.modeling_utils")
        member = RankMember(store, rank, size, store.get("kind").decode())
        while _serve_one(member):
            pass
    except BaseException as error:
        code = 1
        # another rank is gone: not this one's story
        lost = isinstance(error, RuntimeError) and "onnection" in str(error)
        if not lost:
            text = (
                str(error)
                if isinstance(error, ReinforgeError)
                else f"{type(error).__name__}: {error}"
            )
            with contextlib.suppress(RuntimeError):
                if isinstance(error, InputError):
                    store.set(WRONG_INPUT, "")
                store.set(f"error/{rank}", text.strip()[:2000] or type(error).__name__)
            if not isinstance(error, ReinforgeError):
                traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # groups of a broken run do not end in an orderly way


def _serve_one(member: RankMember) -> bool:
    kind, target, name, args = unpack(member.commands.scatter(None))
    if kind == "stop":
        return False
    answer = member.run(kind, target, name, args)
    member.commands.gather(pack(answer))
    return True


def _follow(parent: int) -> None:
    """A rank does not outlive the one that started it, however that one ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
