"""What may be set about a server, and what that means for its socket and its key."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from reinforge.core.errors import InputError

KEY = "REINFORGE_API_KEY"


@dataclass(frozen=True)
class ServeOptions:
    """The options of `reinforge serve`."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None  # default: from the environment
    name: str | None = None  # the model's name in requests
    max_new_tokens: int = 512  # where a request names no limit
    max_requests: int = 256  # at once
    max_body_mib: int = 8
    max_completions: int = 512  # prompts x n of one request
    max_logprobs: int = 128  # likeliest tokens in place of each token of a prompt
    max_connections: int = 1024  # open at once
    header_seconds: float = 10.0  # for the headers of a request to arrive
    body_seconds: float = 60.0  # for the rest of it, and for a client to read some more
    max_batch: int = 256  # sequences decoded at once
    kv_gib: float | None = None
    context: int | None = None  # default: the model's own
    checkpoint: str = "latest"
    adapter: str | None = None


def name_of(source: str) -> str:
    """A directory is known by its last part: where it lies is nobody's business."""
    path = Path(source)
    return path.resolve().name if path.exists() else source


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def key_of(options: ServeOptions) -> str | None:
    """The key that clients must show. Refuses to be open to the network without one."""
    key = options.api_key or os.environ.get(KEY) or None
    if key is None and not is_loopback(options.host):
        raise InputError(
            f"{options.host} can be reached from other machines, and there is no API key.",
            where="--host",
            fix=f"Set {KEY} (or --api-key), or stay on 127.0.0.1.",
        )
    return key


def listen(options: ServeOptions) -> socket.socket:
    """The port is taken before the model is loaded: whether it is free shows at once."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        raise InputError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}.",
            where="--port",
            fix="Give another port.",
        ) from error
