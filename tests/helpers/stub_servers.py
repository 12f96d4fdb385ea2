"""Served engines whose servers are stubs, over real processes and real HTTP. The stub of a kind of
server is the module `KIND_stub.py` beside this one; tests/unit/engines/test_dialects.py and
tests/contract/test_engine.py run on all that there are.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from helpers.paths import TESTS
from helpers.toys import VOCABULARY, make_module
from reinforge.config.engine import SERVERS, EngineConfig, ServerFacts
from reinforge.config.server_devices import ServerPlacement
from reinforge.core.gpu_room import Release, nothing_to_release
from reinforge.core.weights import Weights
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.served.make import make_served


@dataclass(frozen=True)
class Stub:
    """Stands in for one kind of server."""

    kind: str  # a name in `SERVERS`
    speaks: str  # the module that speaks its API, which is run as a program
    started_as: str  # the module that the dialect starts: the stub takes its place

    @property
    def facts(self) -> ServerFacts:
        return SERVERS[self.kind]

    def install(self, site: Path) -> None:
        """Into a folder for the server's PYTHONPATH."""
        file = site.joinpath(*self.started_as.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(f"import runpy\n\nrunpy.run_module({self.speaks!r}, run_name='__main__')\n")


def stub_of(kind: str) -> Stub:
    module = f"helpers.{kind}_stub"
    return Stub(kind, module, started_as=import_module(module).STARTED_AS)


STUBS = tuple(
    stub_of(kind) for kind in SERVERS if (TESTS / "helpers" / f"{kind}_stub.py").is_file()
)


def bigram(table: torch.Tensor, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """The log-probs that a stub with this embedding must find; 0 for the first token."""
    logp = (table[list(tokens[:-1])] @ table.T / temperature).log_softmax(-1)
    own = logp.gather(1, torch.tensor(list(tokens[1:]))[:, None])[:, 0]
    return torch.cat([torch.zeros(1), own])


class StubServers:
    """A trainer's module, and engines over servers of one kind that get its weights."""

    def __init__(self, stub: Stub, folder: Path, **changes: Any):
        """`changes`: of the module's shape."""
        self.stub = stub
        self.folder = folder
        self.module = make_module(spread=8.0, **changes)
        self.model = folder / "model"
        self.module.save_pretrained(self.model)
        stub.install(folder / "site")
        self.hold = folder / "hold"  # while it exists, every answer stops in its middle
        self.hang = folder / "hang"  # while it exists, nothing is generated
        self.slow = folder / "slow"  # while it exists, no server starts
        self.numbers = itertools.count()
        self.engines: list[ServedEngine] = []

    def setup(
        self,
        *,
        env: dict[str, str] | None = None,
        device: str = "cpu",
        stop_tokens: Sequence[int] = (2,),
        placed: ServerPlacement | None = None,
        **options: Any,
    ) -> ServerSetup:
        """`options`: of the section `engine`. `placed`: default: colocated."""
        where = placed or ServerPlacement(colocated=True)
        if not options.get("address"):
            own = {
                "PYTHONPATH": os.pathsep.join([str(self.folder / "site"), str(TESTS)]),
                "STUB_HOLD": str(self.hold),
                "STUB_HANG": str(self.hang),
                "STUB_SLOW": str(self.slow),
            }
            options["env"] = own | (env or {})
        return ServerSetup(
            kind=self.stub.kind,
            cfg=EngineConfig(start_seconds=120, **options),
            model=str(self.model),
            folder=self.folder / f"run-{next(self.numbers)}",
            dtype="float32",
            device=device,
            context=128,
            vocabulary=VOCABULARY,
            stop_tokens=tuple(stop_tokens),
            seed=3,
            colocated=where.colocated,
            devices=where.devices,
        )

    def engine(self, release: Release = nothing_to_release, **settings: Any) -> ServedEngine:
        """As `setup` is told."""
        made = make_served(
            self.setup(**settings), lambda tokens: bigram(self.table(), tokens), release
        )
        self.engines.append(made)
        return made

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    @property
    def weights(self) -> Weights:
        return Weights("shared", module=self.module)

    def table(self) -> torch.Tensor:
        return self.module.get_input_embeddings().weight.detach().clone()

    def change(self, seed: int) -> None:
        """Another step of the trainer."""
        torch.manual_seed(seed)
        with torch.no_grad():
            weight = self.module.get_input_embeddings().weight
            weight.add_(torch.randn(*weight.shape) * 0.05)


async def told(engine: ServedEngine, replica: int = 0) -> dict[str, Any]:
    """What a stub says about itself: `BigramStub.facts`."""
    http = engine.replicas[replica].http
    assert http is not None
    facts: dict[str, Any] = await http.post("/stub")
    return facts


async def until(engine: ServedEngine, what: str, *counts: int) -> None:
    """Waits until so many requests are `held` or `running`, by replica."""
    found: list[int] = []
    end = time.monotonic() + 60
    while found != list(counts):
        assert time.monotonic() < end, f"{found} requests are {what}, not {counts}"
        await asyncio.sleep(0.02)
        found = [(await told(engine, i))[what] for i in range(len(counts))]
