"""Runs as a script of its own, in the interpreter that programs will run in: prints, as JSON, the
files that it needs.

That is its standard library, and the shared libraries that it and the library's extension modules
are linked to. A sandbox shows these and nothing else of the folder that the interpreter was
installed in, which may be a home.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import sys
from typing import Any

PACKAGES = ("site-packages", "dist-packages")  # what somebody installed: not the standard library


class LoadedLibrary(ctypes.Structure):
    """The first fields of struct dl_phdr_info."""

    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]


def libraries() -> list[str]:
    """The shared libraries of this process, under the names by which the loader found them."""
    found: list[str] = []

    def visit(info: Any, size: int, data: Any) -> int:
        name = os.fsdecode(info.contents.name or b"")
        if os.path.isabs(name) and os.path.exists(name):
            found.append(
                os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
            )
        return 0

    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(LoadedLibrary), ctypes.c_size_t, ctypes.c_void_p
    )
    ctypes.CDLL(None).dl_iterate_phdr(kind(visit), None)
    return sorted(set(found))


def main() -> None:
    """Started without `site`: the path then holds the standard library only."""
    library = [path for path in sys.path if os.path.isabs(path) and os.path.exists(path)]
    library = [
        path
        for path in library
        if os.path.basename(path) not in PACKAGES
        and path != os.path.dirname(os.path.abspath(__file__))
    ]
    for folder in library:
        for module in glob.glob(os.path.join(glob.escape(folder), "*.so")):
            try:
                ctypes.CDLL(module)  # loaded and not imported: only what it is linked to matters
            except OSError:  # linked to something that is not installed
                pass
    installed = [os.path.join(folder, name) for folder in library for name in PACKAGES]
    print(
        json.dumps(
            {
                "library": library,
                "libraries": libraries(),
                "installed": [p for p in installed if os.path.isdir(p)],
            }
        )
    )


if __name__ == "__main__":
    main()
