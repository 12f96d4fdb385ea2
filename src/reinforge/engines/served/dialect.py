"""How one kind of inference server is started and spoken to: the contract `Dialect`, and the plain
values that it is given and gives back.

`ServedEngine` (engine.py) does everything that is the same for all servers: replicas, routing,
restarts, interruptions, updates and their proof. What differs is a dialect. To add one:

1. Write `engines/served/NAME.py` with a class that has the members of `Dialect`. `sglang.py` is the
   example to copy: it needs nothing in the server but HTTP.
2. Name it in `EngineName` and in `SERVERS`, which stand together in config/engine.py.
3. Write a stub that speaks the server's API (tests/helpers/sglang_stub.py is one), and run on it
   what tests/unit/engines/test_engine_sglang.py runs, and tests/contract/test_engine.py.

The server must take token ids and give back token ids with the log-prob of each, score given
tokens, load new weights without a restart, and abort what is running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from reinforge.config.engine import EngineConfig
from reinforge.core.engine import Sampling
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
        found += (
            [f"--{flag}" if value else f"--no-{flag}"]
            if isinstance(value, bool)
            else [f"--{flag}", str(value)]
        )
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
    colocated: bool = True  # on the trainer's own device

    @property
    def sleep_level(self) -> int:
        """0 never, 1 keeps the weights in host memory, 2 drops them too.

        A CPU gives nothing back.
        """
        if (
            self.device != "cuda"
            or self.cfg.sleep == "never"
            or (self.cfg.sleep == "auto" and not self.colocated)
        ):
            return 0
        return 2 if self.cfg.sleep == "all" else 1


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What one sample still needs: a request for a completion. `ServedEngine` makes it."""

    tokens: list[int]  # prompt, and what was written before it was interrupted
    seed: int | None
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What a server answered to one `SampleRequest`: a whole completion, or its first part where an
    update of the weights interrupted it. A dialect makes it.
    """

    tokens: list[int]  # sampled ids, the stop token included
    logprobs: list[float]  # of each sampled token: post-temperature, full vocabulary
    reason: str  # stop | length | abort; after abort the engine asks for the rest


class Dialect(Protocol):
    """One kind of server. `make.py` makes one for an engine; `Replica` calls it to start a server
    and to ask whether it lives, `ServedEngine` to generate, `WeightTransfer` to send weights.

    Every call with an `http` is about the one server behind that address. A call that the server
    does not survive raises `ServerDown`; one that only this request fails of raises `ServerFault`;
    `ServerClient` raises both already, by the status code.
    """

    name: str  # as in `SERVERS`
    # How weights may arrive, which is what `stage` understands. "safetensors": a directory with
    # config.json and *.safetensors, under the names of the checkpoint. "files", "adapter", "ipc":
    # forms of ours (weights/), for servers that load a plug-in of ours.
    channels: tuple[str, ...]

    def command(self, setup: ServerSetup, python: str, port: int) -> list[str]:
        """The command line of a server on the loopback address. Options of the user
        (`setup.cfg.args`) count more than ours. The key is no argument: those of a process are
        there for every user to read.
        """
        ...

    def environment(self, setup: ServerSetup, key: str) -> dict[str, str]:
        """What is added to the server's environment. `key` is what it must ask of every request
        (Authorization: Bearer).
        """
        ...

    async def status(self, http: ServerClient, setup: ServerSetup) -> dict[str, Any]:
        """Facts of a server that is ready: dtype, sleeps. Raises ServerDown while it is not."""
        ...

    async def generate(
        self,
        http: ServerClient,
        draws: Sequence[SampleRequest],
        params: Sampling,
        stops: frozenset[int],
    ) -> list[SampleOutput]:
        """One piece for each draw, in order. A sample ends at a token of `stops` (the server's own
        idea of an end is turned off), which stays in its tokens.
        """
        ...

    async def score(self, http: ServerClient, tokens: Sequence[int]) -> list[float]:
        """The log-prob at temperature 1 of every given token after the first; 0 for the first."""
        ...

    async def stage(self, http: ServerClient, message: Mapping[str, Any]) -> None:
        """Phase one of an update: makes the weights ready. What is served does not change.

        `message` has the `folder` where they are and their `version` (`SafetensorsChannel.message`,
        and the others of weights/).
        """
        ...

    async def commit(self, http: ServerClient, version: int, fix_head: bool) -> float:
        """Phase two: serves what was staged, and drops what it cached under the old weights.
        Nothing is generated meanwhile. Gives the error of a tied head, where the server can tell;
        otherwise 0.
        """
        ...

    async def abort(self, http: ServerClient) -> None:
        """Ends all that is being generated; the requests answer with what they have."""
        ...

    async def sleep(self, http: ServerClient, level: int) -> None:
        """Gives GPU memory back: 1 the KV cache, 2 the weights too. Called only where
        `ServerSetup.sleep_level` is above 0.
        """
        ...

    async def wake(self, http: ServerClient, level: int) -> None:
        """Takes back what `sleep` gave. After level 2 new weights follow."""
        ...
