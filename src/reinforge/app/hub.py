"""Whether the model hub can be reached, asked once with a short timeout, so that being offline is a message and not a hang."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

from reinforge.config.schema import Config

PROBE_SECONDS = 3.0


def needs_hub(config: Config) -> bool:
    """Whether any name in the configuration is a hub id."""
    sources = [config.data.source, config.data.eval.source]
    names = [config.model.path, config.model.tokenizer, *(s for s in sources if s and ":" not in s)]
    return any(name and not Path(name).expanduser().exists() for name in names)


def go_offline_if_unreachable(config: Config) -> str | None:
    """Switches the hub libraries to their caches if the hub does not answer, and says why. Call before importing them."""
    return offline() if needs_hub(config) else None


def offline() -> str | None:
    """The same for whoever is sure to need the hub."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if reachable(_address(endpoint), PROBE_SECONDS):
        return None
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    return f"the hub {endpoint} cannot be reached"


def _address(endpoint: str) -> tuple[str, int]:
    """Where a connection to the hub goes first: the proxy, if there is one."""
    names = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    proxy = next((os.environ[name] for name in names if os.environ.get(name)), None)
    url = urlsplit(proxy if proxy and "//" in proxy else f"//{proxy}" if proxy else endpoint)
    return url.hostname or "", url.port or (80 if url.scheme == "http" else 443)


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
