"""How one kind of inference server is started and spoken to: the contract `Dialect`, and the plain
values that it is given and gives back.

`ServedEngine` (engine.py) does everything that is the same for all servers: replicas, routing,
restarts, interruptions, updates and their proof. What differs is a dialect. To add one:

1. Write `engines/served/NAME.py` with a class that has the members of `Dialect`. `sglang.py` is the
   example to copy: it needs nothing in the server but HTTP.
2. Name it in `EngineName` and in `SERVERS`, which stand together in config/engine.py. There
   `ServerFacts` says what the server cannot do: no dialect is asked for that.
3. Write a stub that speaks the server's API, tests/helpers/NAME_stub.py (sglang_stub.py is one).
   What every dialect owes (tests/unit/engines/test_dialects.py) and what every engine owes
   (tests/contract/test_engine.py) then runs on it.

The server must take token ids and give back token ids with the log-prob of each, score given
tokens, load new weights without a restart, and abort what is running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from reinforge.config.engine import SERVERS, EngineConfig, gpus_of, workers_of
from reinforge.core.engine import Sampling
from reinforge.core.routes import RoutedLayers
from reinforge.engines.served.http import ServerClient

# how long a server may take, in seconds
ASK = 30.0  # for answers that need no model
LOAD = 600.0  # for those that move weights


def options(args: Mapping[str, Any]) -> list[str]:
    """Options of a server as its command line wants them.

    >>> options({"enforce-eager": True, "tensor_parallel_size": 2, "enable-prefix-caching": False})
    ['--enforce-eager', '--tensor-parallel-size', '2', '--no-enable-prefix-caching']
    """
    found: list[str] = []
    for name, value in args.items():
        flag = name.strip("-").replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", str(value)]
    return found


@dataclass(frozen=True)
class ServerSetup:
    """Everything a served engine is made of, as plain values: it can be sent to another process.
    `build/served.py` makes it of a run's config.
    """

    kind: str  # a name in `SERVERS`
    cfg: EngineConfig
    model: str  # a directory that the server loads, or a hub id
    folder: Path  # of logs and weights on disk: the run's
    dtype: str
    device: str  # cpu | cuda: where the servers compute
    context: int
    vocabulary: int
    stop_tokens: tuple[int, ...] = ()
    longest: int = 0  # the longest sequence to expect; 0: the context
    max_batch: int = 512
    kv_gib: float | None = None
    seed: int = 0
    colocated: bool = True  # on GPUs of trainers
    # CUDA_VISIBLE_DEVICES of each replica; none: what the process that starts them sees
    devices: tuple[str, ...] = ()
    gpu: str = ""  # of the process that sends weights, in the same words
    # where a server tells which experts its tokens went to; never without `ServerFacts.routes`
    routed: RoutedLayers | None = None
    name: str = "engine"  # of the engine among those of a run, for its logs: an actor's is its role

    def log(self, replica: int | str) -> Path:
        """Where the server of a replica writes what it says: nobody else does."""
        return self.folder / f"{self.name}-{replica}.log"

    @property
    def near(self) -> bool:
        """Whether every server is one process on the sender's own GPU, which can open its
        memory.
        """
        return (
            self.device == "cuda"
            and self.colocated
            and all(devices == self.gpu for devices in self.devices)
            and not self.cfg.address
            and workers_of(self.cfg) == 1
        )

    @property
    def in_turn(self) -> bool:
        """Whether servers share a GPU: each measures what is free when it starts."""
        gpus = [gpu for devices in self.devices for gpu in gpus_of(devices)]
        return len(gpus) > len(set(gpus))

    @property
    def sleep_level(self) -> int:
        """0 never, 1 keeps the weights in host memory, 2 drops them too.

        A CPU gives nothing back, and neither does a server that cannot.
        """
        if (
            self.device != "cuda"
            or not SERVERS[self.kind].sleeps
            or self.cfg.sleep == "never"
            or (self.cfg.sleep == "auto" and not self.colocated)
        ):
            return 0
        return 2 if self.cfg.sleep == "all" else 1


def given_options(setup: ServerSetup) -> dict[str, Any]:
    """The options of the user, spelled as those of a dialect, so that they replace them."""
    return {name.strip("-").replace("_", "-"): value for name, value in setup.cfg.args.items()}


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample, or what is missing of it: a request for tokens after those given. `ServedEngine`
    makes it.
    """

    tokens: list[int]  # prompt, and what was written before it was interrupted
    seed: int | None  # of this sample alone, 63 bits; None: any
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What a server answered to one `SampleRequest`: a whole completion, or its first part where an
    update of the weights interrupted it. A dialect makes it.
    """

    tokens: list[int]  # sampled ids, the stop token included
    logprobs: list[float]  # of each sampled token: post-temperature, full vocabulary
    # stop | length | abort. After `abort` the engine asks for the rest, unless the last token is a
    # stop token or there are max_tokens of them. So a server that does not say why an answer ended
    # is always answered for with `abort`; only an end at a stop string must be told, as `stop`.
    reason: str
    # [T, layers of the model, k] of prompt and answer, all but the last token: the experts that
    # each went to. None: the server was not started to tell, or could not
    routes: Tensor | None = None
    # where weights changed under way and the server went on: (tokens before, the new version)
    cuts: Sequence[tuple[int, int]] = ()


# hears what a server has written of a request since the last time: its place, and the new part.
# Its reason is `abort`, and the last token of an answer is never in it: that comes with the end
OnOutput = Callable[[int, SampleOutput], None]


class Dialect(Protocol):
    """One kind of server. `make.py` makes one for an engine; `Replica` calls it to start a server
    and to ask whether it lives, `ServedEngine` to generate, `WeightTransfer` to send weights.

    Every call with an `http` is about the one server behind that address. Several calls may be
    under way at once, to several servers: what is remembered between two calls is remembered by
    address. A call that the server does not survive raises `ServerDown`; one that only this request
    fails of raises `ServerFault`. `ServerClient` raises both already, by the status code: its
    docstring has the table. An answer that is no JSON object or list is given as text. A 4xx is an
    `InputError` and ends the run: a server that answers so while it starts, or where it is only
    busy, is asked in a way that it does not.
    """

    name: str  # as in `SERVERS`
    # How weights may arrive, which is what `stage` understands. "safetensors": a directory with
    # config.json and one model.safetensors, however large, under the names of the checkpoint.
    # "files", "adapter", "ipc", "group": forms of ours (reinforge/weights/), for servers that load
    # a plug-in of ours.
    channels: tuple[str, ...]
    # What to do about a server that answers 404: one of another version, or without our plug-in.
    unknown_path: str

    def command(self, setup: ServerSetup, python: str, port: int) -> list[str]:
        """The command line of a server on the loopback address. Options of the user
        (`given_options`) count more than ours. The key is no argument: those of a process are
        there for every user to read. What the server has no option for (dtype, seed, context) is
        left out. One that has none for its address must listen on the loopback address by itself.
        """
        ...

    def environment(self, setup: ServerSetup, key: str) -> dict[str, str]:
        """What is added to the server's environment. `key` is what it must ask of every request
        (Authorization: Bearer).

        A server that knows no key ignores it and has `key=False` in `SERVERS`: everybody on its
        host can then ask it and give it weights. `plan` warns of that.
        """
        ...

    async def status(self, http: ServerClient, setup: ServerSetup) -> dict[str, Any]:
        """Returns once the server can be asked; raises `ServerDown` while it cannot, and
        `InputError` where it runs with settings that we cannot use.

        What is returned is whatever the server tells of itself, for tests and for people
        (`Replica.facts`). No code reads it, and `{}` will do. Later health is not asked here but
        with `generate`, for one token.
        """
        ...

    async def generate(
        self,
        http: ServerClient,
        requests: Sequence[SampleRequest],
        params: Sampling,
        stops: frozenset[int],
        on_output: OnOutput | None = None,
    ) -> list[SampleOutput]:
        """One output for each request, in order. A sample ends at a token of `stops` (the server's
        own idea of an end is turned off), which stays in its tokens. Of `params` a dialect reads
        the temperature, and what its server can do of filters and stop strings. Under `ignore_eos`
        there are no `stops`, and stop strings do not count.

        Every request has a seed of its own, so that a sample does not depend on what else is asked
        for. A server that takes one seed for several answers (`n`) is therefore asked for one
        answer at a time: `await together(self._one(http, request) for request in requests)`
        (core/aio.py) sends all of them, gives their answers in order, and cancels the others when
        one fails or the caller leaves.
        A caller that leaves closes the connection; the server should take that for an abort.

        `on_output`: the server is asked to tell tokens as they come, several times a second; what
        was told is not in the outputs again. Then nothing that was told is lost with the server.
        """
        ...

    async def score(self, http: ServerClient, tokens: Sequence[int]) -> list[float]:
        """The log-prob at temperature 1 of every given token after those before it. As many numbers
        as tokens: the first has nothing before it and gets 0, whatever the server says about it.
        """
        ...

    async def stage(self, http: ServerClient, message: Mapping[str, Any]) -> None:
        """Phase one of an update: makes the weights ready. What is served does not change.

        `message` has the `folder` where they are and their `version` (`SafetensorsChannel.message`
        in reinforge/weights/files.py, and the others there). A server that loads in one go is told
        nothing yet: remember the message for `commit`.
        """
        ...

    async def commit(
        self, http: ServerClient, version: int, fix_head: bool, keep: bool = False
    ) -> float:
        """Phase two: serves what was staged, and drops what it cached under the old weights (a
        server that cannot is started without such a cache). Nothing is generated meanwhile. Where
        this version is not what was staged: `ServerDown`.

        `keep`: what is being generated was not interrupted; it stands still meanwhile, goes on
        with the cache that it has, and its output tells where (`SampleOutput.cuts`). Never with
        `keeps=False` in `SERVERS`.

        `fix_head` and the result are about a head that is tied to the embedding, which a server's
        own loader may leave at the old weights (vLLM's on a CPU): point it at the new ones, and
        give how far its logits are from theirs. Only a plug-in can. Another server ignores
        `fix_head` and gives 0: the proof after the update notices a head that is left behind.
        """
        ...

    async def abort(self, http: ServerClient) -> None:
        """Ends all that is being generated; the requests answer with what they have."""
        ...

    async def sleep(self, http: ServerClient, level: int) -> None:
        """Gives GPU memory back: 1 the KV cache, 2 the weights too. Called only where
        `ServerSetup.sleep_level` is above 0: never with `sleeps=False` in `SERVERS`.
        """
        ...

    async def wake(self, http: ServerClient, level: int) -> None:
        """Takes back what `sleep` gave. After level 2 new weights follow."""
        ...
