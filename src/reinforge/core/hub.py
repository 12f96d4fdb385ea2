"""Whether the model hub can be reached, asked once with a short timeout, so that being offline is a message and not a hang.

The hub's own libraries try for a minute before they give up, aloud. Whoever is about to ask them for a name asks here first.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

PROBE_SECONDS = 2.0
FLAGS = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
READ_ON_IMPORT = ("huggingface_hub.constants", "datasets.config")  # modules that copy the first flag when they are imported
_switched: list[str] = []  # why this process uses caches only, if it was decided here


def unavailable(name: str) -> str | None:
    """Why a model's name cannot be resolved; None where it is cached here or the hub answers. Call it for what is no path."""
    why = offline()
    if why is None or cached(name):
        return None
    return f"no such directory: {name}, and {why}"


def offline() -> str | None:
    """Why the hub cannot be asked, or None. Where it does not answer, its libraries use their caches from now on."""
    if _switched:
        return _switched[0]
    if os.environ.get(FLAGS[0], "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"{FLAGS[0]} is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if reachable(_address(endpoint), PROBE_SECONDS):
        return None
    os.environ.update(dict.fromkeys(FLAGS, "1"))
    for module in READ_ON_IMPORT:
        if module in sys.modules:
            setattr(sys.modules[module], FLAGS[0], True)
    _switched.append(f"the hub {endpoint} cannot be reached")
    return _switched[0]


def cached(name: str) -> bool:
    """Whether the cache has some version of this model. Which files of it, only loading tells."""
    from huggingface_hub import constants

    return any(Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots").glob("*"))


def _address(endpoint: str) -> tuple[str, int]:
    """Where a connection to the hub goes first: the proxy, if there is one."""
    names = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    proxy = next((os.environ[name] for name in names if os.environ.get(name)), None)
    url = urlsplit(proxy if proxy and "//" in proxy else f"//{proxy}" if proxy else endpoint)
    return url.hostname or "", url.port or (80 if url.scheme == "http" else 443)


@cache
def reachable(address: tuple[str, int], seconds: float) -> bool:
    """Whether a TCP connection opens in time. In a thread, because a name lookup has no timeout of its own."""
    answer: list[bool] = []

    def ask() -> None:
        try:
            socket.create_connection(address, timeout=seconds).close()
        except OSError:
            return
        answer.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answer)
