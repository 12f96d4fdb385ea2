"""GPUs that are files, for trainers and servers on CPUs that share them: who took what is written
down, and everything that happens to their memory is a line of a log in the order that it happened.

A trainer's side is `LedgerGpu`, in place of `TrainerGpu`; a server's is `ServerLedger`, which the
stubs of servers use where STUB_LEDGER names the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

WHOLE = 80 << 30
SERVER = 32 << 30  # what a server that is awake has of each of its GPUs
FOLDER = "STUB_LEDGER"


def note(event: str) -> None:
    """One line, whoever else writes at the same time."""
    with open(Path(os.environ[FOLDER]) / "events", "a") as log:
        log.write(f"{event}\n")


def events() -> list[str]:
    file = Path(os.environ[FOLDER]) / "events"
    return file.read_text().splitlines() if file.exists() else []


def taken(kind: str, gpu: str) -> int:
    file = Path(os.environ[FOLDER]) / f"{kind}-{gpu}"
    return int(file.read_text()) if file.exists() else 0


def take(kind: str, gpu: str, size: int) -> None:
    (Path(os.environ[FOLDER]) / f"{kind}-{gpu}").write_text(str(size))


class ServerLedger:
    """What one server has of its GPUs."""

    def __init__(self) -> None:
        self.on = FOLDER in os.environ
        self.gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self.resize("starts", SERVER)

    def event(self, what: str) -> None:
        if self.on:
            note(f"server on {','.join(self.gpus)} {what}")

    def resize(self, what: str, size: int) -> None:
        if self.on:
            for gpu in self.gpus:
                take("server", gpu, size)
            self.event(what)
