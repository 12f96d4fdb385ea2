"""Whether the model hub can be reached, asked once with a short timeout, so that being offline is a
message and not a hang.

The hub's own libraries try for a minute before they give up, aloud. Whoever is about to ask them
for a name asks here first. Only a definite answer counts as offline: the name is unknown, or every
address refuses or has no route. A hub that is merely slow to answer is left to its libraries.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

# not in the stubs
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

from reinforge.core.hub_trouble import endpoint

ADDRESS_SECONDS = 2.0  # for one address of the hub: IPv6 may lead nowhere where IPv4 works
PROBE_SECONDS = 6.0  # for the name and all its addresses
FLAGS = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
# modules that copy the first flag when they are imported
READ_ON_IMPORT = ("huggingface_hub.constants", "datasets.config")
_switched: list[str] = []  # why this process uses caches only, if it was decided here


def unavailable(name: str) -> str | None:
    """Why a model's name cannot be resolved; None where it is cached here or the hub answers.

    Call it for what is no path.
    """
    why = offline()
    if why is None or cached(name):
        return None
    return f"no such directory: {name}, and {why}"


def offline() -> str | None:
    """Why the hub cannot be asked, or None.

    Where it certainly cannot, its libraries use their caches from now on.
    """
    if _switched:
        return _switched[0]
    if os.environ.get(FLAGS[0], "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"{FLAGS[0]} is set"
    hub = endpoint()
    if not refused(_address(hub)):
        return None
    os.environ.update(dict.fromkeys(FLAGS, "1"))
    for module in READ_ON_IMPORT:
        if module in sys.modules:
            setattr(sys.modules[module], FLAGS[0], True)
    _switched.append(f"the hub {hub} cannot be reached")
    return _switched[0]


def cached(name: str) -> bool:
    """Whether the cache has some version of this model. Which files of it, only loading tells."""
    from huggingface_hub import constants

    return any(
        Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots").glob("*")
    )


def _address(endpoint: str) -> tuple[str, int]:
    """Where a connection to the hub goes first: the proxy, if there is one and NO_PROXY does not
    name the hub."""
    hub = urlsplit(endpoint)
    proxy = _setting(f"{hub.scheme}_proxy") or _setting("all_proxy")
    if proxy and not proxy_bypass_environment(
        hub.netloc.rpartition("@")[2], {"no": _setting("no_proxy")}
    ):
        hub = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)


def _setting(name: str) -> str:
    return os.environ.get(name) or os.environ.get(name.upper()) or ""


@cache
def refused(address: tuple[str, int]) -> bool:
    """Whether it is certain that no TCP connection can be opened; not if nobody has answered in
    time.

    In a thread, because a name lookup has no timeout of its own.
    """
    answer: list[bool] = []
    thread = threading.Thread(target=lambda: answer.append(_refused(address)), daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(answer) and answer[0]


def _refused(address: tuple[str, int]) -> bool:
    try:
        places = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    silent = False
    for *_, place in places:
        try:
            socket.create_connection((str(place[0]), address[1]), timeout=ADDRESS_SECONDS).close()
        except TimeoutError:
            silent = True
        except OSError:
            continue
        else:
            return False
    return not silent
