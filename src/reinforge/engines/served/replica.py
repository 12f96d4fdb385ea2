"""One server among several: where it is, whether it lives and what it serves."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.engines.served.dialect import Dialect, SampleRequest, ServerSetup
from reinforge.engines.served.http import ServerClient, ServerDown
from reinforge.engines.served.server_process import ServerProcess, free_port

FOREIGN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    # of the trainer's own making: a server must not believe it is one of its ranks
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_GLOO_LAZY_INIT",
)


@dataclass
class Replica:
    """One server of a served engine: started by us, or one that runs already. `ServedEngine` makes
    it, sends it work while it is `up`, and starts it again when it died.
    """

    index: int
    setup: ServerSetup
    dialect: Dialect
    http: ServerClient | None = None
    process: ServerProcess | None = None
    load: int = 0  # completions under way
    version: int | None = None  # what it serves; None: not known
    # what the running server told of itself (`Dialect.status`); None until it is ready
    facts: dict[str, Any] | None = None
    failures: int = 0  # starts that failed, one after the other
    checked: float = 0.0  # when it last proved that it generates
    last_words: str = ""  # of a server that is gone
    # how often it was started: who failed in an earlier one does not speak about this one
    life: int = 0

    @property
    def where(self) -> str:
        return "engine.address" if self.setup.cfg.address else "engine"

    @property
    def up(self) -> bool:
        return self.facts is not None and (self.process is None or self.process.alive)

    def start(self) -> None:
        """Begins to start the server, unless it is somebody else's."""
        self.life += 1
        cfg = self.setup.cfg
        if cfg.address:
            given = os.environ.get(cfg.key_env, "") if cfg.key_env else None
            self.http = ServerClient(cfg.address[self.index], given, self.dialect.unknown_path)
            return
        key = secrets.token_hex(24)
        port = free_port()
        python = cfg.python or sys.executable
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in FOREIGN and not name.startswith("TORCHELASTIC_")
        }
        if (
            cfg.python is not None
            and Path(cfg.python).absolute() != Path(sys.executable).absolute()
        ):
            env.pop("PYTHONPATH", None)  # it points at the trainer's packages
        env |= cfg.env
        made = self.dialect.environment(self.setup, key)
        env |= {
            name: value
            for name, value in made.items()
            if name not in cfg.env and name != "PYTHONPATH"
        }
        env["PYTHONPATH"] = os.pathsep.join(
            part for part in (made.get("PYTHONPATH"), env.get("PYTHONPATH")) if part
        )
        if self.setup.devices:
            env["CUDA_VISIBLE_DEVICES"] = self.setup.devices[self.index]
        self.http = ServerClient(f"http://127.0.0.1:{port}", key, self.dialect.unknown_path)
        self.process = ServerProcess(
            self.dialect.command(self.setup, python, port),
            env,
            self.setup.log(self.index),
            where=self.where,
        )

    async def ready(self) -> None:
        """Waits until the server says that it is ready."""
        seconds = self.setup.cfg.start_seconds

        async def answers() -> bool:
            assert self.http is not None
            try:
                self.facts = await self.dialect.status(self.http, self.setup)
            except ServerDown:
                return False
            return True

        if self.process is not None:
            return await self.process.ready(answers, seconds)
        assert self.http is not None
        limit = time.monotonic() + min(20.0, seconds)
        while not await answers():
            if time.monotonic() < limit:
                await asyncio.sleep(0.5)
                continue
            raise InputError(
                f"{self.http.address} does not answer.",
                where=self.where,
                fix="Start that server, or leave engine.address out.",
            )

    def stop(self) -> None:
        if self.process is not None:
            self.last_words = self.process.tail()
            self.process.stop()
        self.facts = None
        self.version = None
        self.process = None

    async def healthy(self, every: float) -> bool:
        """One token, really generated. What was proved a moment ago is not proved again."""
        if time.monotonic() - self.checked < every * 0.9:
            return True
        self.checked = time.monotonic()
        assert self.http is not None
        try:
            asked = self.dialect.generate(
                self.http, [SampleRequest([1], 0, 1)], Sampling(1, ignore_eos=True), frozenset()
            )
            return bool((await asyncio.wait_for(asked, max(5.0, every)))[0].tokens)
        except (ServerDown, TimeoutError):
            return False
