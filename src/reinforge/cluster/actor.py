"""What runs inside an actor: objects by name (a backend, an engine, a reward model), and calls of
their methods.

Everything that computes runs in one event loop, one after the other, as it does in one process: an
engine and a trainer that share a module never touch it at the same time. Only `ping` has a thread
of its own: a busy actor still says that it lives. Imports nothing heavy: the environment is set
before torch is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.cluster.connect import ray
from reinforge.core.cpus import bind, numa_cpus, threads_for
from reinforge.core.errors import InputError, ReinforgeError

# objects of an actor that its own methods use
MODEL = "model"  # what an engine in an actor of its own generates with, if it does so itself
SCORE = "score"  # the trainer's own log-probs, which servers elsewhere must find too


@dataclass(frozen=True, slots=True)
class ActorReply:
    """What a call of an actor's method returned, packed; or what it raised, as a text from which
    the controller can raise it again. `Actor` makes it, `WorkerGroup` opens it.
    """

    value: Any = None
    error: str | None = None  # the class, where it is one that a user can act on
    detail: Any = None
    refs: Any = None  # to objects in the store; Ray has to see them to keep count


@dataclass(frozen=True, slots=True)
class ActorAddress:
    """Where an actor runs, for logs and for whoever wants to end it. `Actor` says it to its
    `WorkerGroup`.
    """

    pid: int
    node: str
    ip: str
    devices: tuple[int, ...] = ()  # the numbers of its GPUs on that machine


class Actor:
    """The body of every actor of a run. A `WorkerGroup` starts it and calls its methods.

    A factory gets the dictionary of objects first: what was made before may be used. It is number
    `local` of the run's actors on its machine, which share the cores.
    """

    def __init__(
        self, env: Mapping[str, str], cwd: str, paths: Sequence[str], local: int, sharing: int
    ):
        # Ray says 1 for an actor of one logical CPU; only what the user said counts
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(env)
        self.threads = threads_for(sharing)
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        bind(numa_cpus(_devices(), local, sharing))
        with contextlib.suppress(OSError):
            os.chdir(cwd)  # names of files in a config are meant from there
        sys.path += [p for p in paths if p not in sys.path]
        self.objects: dict[str, Any] = {}
        self._kept: Any = None  # references to what was published last

    # ---- life ----

    @ray.method(concurrency_group="health")
    async def ping(self) -> ActorAddress:
        context = ray.get_runtime_context()
        ip = ray.util.get_node_ip_address()
        return ActorAddress(os.getpid(), context.get_node_id(), ip, _devices())

    @ray.method(concurrency_group="health")
    async def port(self) -> int:
        """A free one, for a rendezvous."""
        with socket.socket() as found:
            found.bind(("", 0))
            return int(found.getsockname()[1])

    async def setenv(self, env: Mapping[str, str]) -> None:
        os.environ.update(env)

    async def warm(self, modules: Sequence[str]) -> None:
        """Imports what takes long, so that a spare is ready at once."""
        self._prepare()
        for name in modules:
            importlib.import_module(name)

    async def follow(self) -> None:
        """The life of a rank other than 0: ends with the process."""
        self._prepare()
        from reinforge.backends.distributed.ranks import serve

        threading.Thread(target=serve, name="rank", daemon=True).start()
        await asyncio.Event().wait()

    def _prepare(self) -> None:
        import torch

        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    # ---- objects ----

    async def make(self, name: str, payload: Any) -> ActorReply:
        """`factory(objects, *args)` becomes object `name`."""
        self._prepare()
        return self._reply_of(
            lambda factory, args: self.objects.__setitem__(name, factory(self.objects, *args)),
            payload,
        )

    async def call(self, name: str, method: str, payload: Any, views: bool = False) -> ActorReply:
        """A method of an object; or, where the method is empty, a function of it.

        `views`: see `unpack`.
        """

        def work(function: Any, args: tuple[Any, ...]) -> Any:
            target = self.objects[name]
            return (
                function(target, *args) if function is not None else getattr(target, method)(*args)
            )

        return self._reply_of(work, payload, views)

    async def acall(self, name: str, method: str, payload: Any) -> ActorReply:
        """A method that awaits. Others run meanwhile."""
        from reinforge.cluster.transport import pack, unpack

        try:
            _, args = unpack(payload)
            return ActorReply(pack(await getattr(self.objects[name], method)(*args)))
        except Exception as error:
            return _error_reply(error)

    def _reply_of(self, work: Any, payload: Any, views: bool = False) -> ActorReply:
        from reinforge.cluster.transport import pack, unpack

        try:
            return ActorReply(pack(work(*unpack(payload, views=views))))
        except Exception as error:
            return _error_reply(error)

    # ---- weights ----

    async def publish(self, name: str) -> ActorReply:
        """The trained weights of a backend, put into the object store bucket by bucket:
        (references, their fingerprint).
        """
        from reinforge.cluster.tensors import buckets_of, fingerprint, trained_of
        from reinforge.cluster.transport import pack

        try:
            named = trained_of(self.objects[name].weights())
            self._kept = None  # one generation at a time; readers hold what they read
            self._kept = [ray.put(pack(bucket)) for bucket in buckets_of(named.items())]
            return ActorReply(pack(fingerprint(named)), refs=self._kept)
        except Exception as error:
            return _error_reply(error)

    async def publish_served(self, name: str, setup: Any, number: int) -> ActorReply:
        """The same as the servers of `setup` take them, which have no module to put them into
        (`ServedWeights`), with what the trainer says about probe `number`.
        """
        from reinforge.cluster.served_weights import store
        from reinforge.cluster.transport import pack

        try:
            base = self._kept.base if self._kept is not None else None
            self._kept = None
            weights = self.objects[name].weights()
            self._kept = store(
                weights,
                setup,
                number,
                weights.probe or self.objects[SCORE],
                lambda bucket: ray.put(pack(bucket)),
                base,
            )
            return ActorReply(pack(None), refs=self._kept)
        except Exception as error:
            return _error_reply(error)

    async def receive(self, name: str, refs: Sequence[Any], mark: str, version: int) -> ActorReply:
        """New weights for an engine with a module of its own: all are here before the first is
        written, and nothing is computed while they are, so it serves the old ones or the new ones.
        """
        from reinforge.cluster.tensors import put_into
        from reinforge.cluster.transport import pack, unpack

        try:
            payloads = [await ref for ref in refs]
            named = {
                key: tensor for payload in payloads for key, tensor in unpack(payload, views=True)
            }
            engine = self.objects[name]
            await engine.update(put_into(self.objects[MODEL].module, named, mark), version)
            return ActorReply(pack(dict(engine.measured)))
        except Exception as error:
            return _error_reply(error)

    async def receive_served(self, name: str, sent: Any, version: int) -> ActorReply:
        """New weights for an engine over servers: what is sent goes on to them, bucket by bucket,
        and nothing of it stays in this process.
        """
        from reinforge.cluster.transport import pack, unpack

        try:
            engine = self.objects[name]
            weights = sent.weights(lambda ref: unpack(ray.get(ref), views=True))
            await engine.update(weights, version)
            return ActorReply(pack(dict(engine.measured)))
        except Exception as error:
            return _error_reply(error)

    async def end(self) -> None:
        """An orderly end, for what has one."""
        for thing in reversed(self.objects.values()):
            if callable(close := getattr(thing, "close", None)):
                with contextlib.suppress(Exception):
                    close()

    async def clear(self) -> None:
        """Ready for another attempt at the run."""
        await self.end()
        self.objects.clear()
        self._kept = None


def _devices() -> tuple[int, ...]:
    """The numbers of the GPUs that Ray gave this actor; -1 for one that has another name."""
    given = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return tuple(sorted(int(name) if name.isdigit() else -1 for name in given))


def _error_reply(error: Exception) -> ActorReply:
    if isinstance(error, InputError):
        return ActorReply(
            error="InputError", detail={"what": error.what, "where": error.where, "fix": error.fix}
        )
    if isinstance(error, ReinforgeError):
        return ActorReply(error=type(error).__name__, detail=str(error))
    return ActorReply(error="", detail="".join(traceback.format_exception(error)))
