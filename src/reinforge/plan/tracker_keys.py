"""Whether a tracker that wants a key finds one, without importing it."""

from __future__ import annotations

import configparser
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

OFFLINE = ("offline", "disabled", "dryrun")  # of W&B's mode: nothing leaves the machine
HOST = "https://api.wandb.ai"


def wandb_has_key() -> bool:
    """Whether W&B needs no key, or has one where it looks for it: in the environment, and in netrc
    under the name of its host.
    """
    settings = _wandb_settings()
    if (os.environ.get("WANDB_MODE") or settings.get("mode")) in OFFLINE:
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or HOST).hostname
    return host is not None and any(_has_login(file, host) for file in _netrc_files())


def _wandb_settings() -> dict[str, str]:
    """What `wandb offline` and `wandb login --host` have written; that of the project counts."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    found = configparser.ConfigParser(interpolation=None)
    try:
        found.read([Path(folder) / "settings", Path("wandb") / "settings"], encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}
    return dict(found["default"]) if found.has_section("default") else {}


def _netrc_files() -> list[Path]:
    if given := os.environ.get("NETRC"):
        return [Path(given).expanduser()]
    return [Path.home() / name for name in (".netrc", "_netrc")]


def _has_login(file: Path, host: str) -> bool:
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
