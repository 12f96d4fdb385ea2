"""Where compiled layers are kept, so that the next start of a run does not compile them again.

torch keeps what it compiled by default, in a directory of the system for temporary files: empty
after a reboot, and with a name that anyone on the machine can guess, although what lies there is
run. Ours is in the user's own cache. The key of an entry is torch's: the graph, the versions, the
GPU, and the settings that bits depend on (`torch.use_deterministic_algorithms`, the compiler's
`deterministic`).
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # torch's own


def cache_on_disk() -> Path:
    """Where torch keeps what it compiles, from now on: as the user says, or the user's cache.
    Kernels of Triton that belong to compiled layers lie there, too.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    said = os.environ.get(VARIABLE)
    if said not in (None, default_cache_dir()):  # which torch writes there when it is imported
        return Path(said)
    folder = cache_folder("compiled") or Path(default_cache_dir())
    os.environ[VARIABLE] = str(folder)
    return folder


def cache_folder(name: str) -> Path | None:
    """A folder of the user's own cache; None: there is no home that can be written to."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(home).expanduser() / "reinforge" / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder
