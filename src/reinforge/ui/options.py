"""What may be set about the web app."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reinforge.serve.connections import ConnectionLimits
from reinforge.serve.options import ServeOptions

PORT = 8420
KEY = "REINFORGE_UI_TOKEN"
LIMITS = ConnectionLimits(requests=64, body=2 << 20, connections=256, body_seconds=20.0)


@dataclass(frozen=True)
class AppOptions:
    """The options of `reinforge ui`."""

    root: Path
    host: str = ServeOptions.host
    port: int = PORT
    token: str | None = None
    launching: bool = True  # whether runs can be started, stopped and talked to
    limits: ConnectionLimits = LIMITS
