"""The other end of `ui/worker.py`: asks it, and is not held up by it for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reinforge.core.errors import InputError

SECONDS = 120.0


def ask_worker(kind: str, asked: Mapping[str, Any], seconds: float = SECONDS) -> Any:
    """What a new process answers; it and all that it started are ended at the deadline."""
    process = subprocess.Popen(
        [sys.executable, "-m", "reinforge.ui.worker", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=environment(),
    )
    try:
        out, err = process.communicate(json.dumps(asked).encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"this took more than {seconds:g} s and was ended.", where=kind, fix="Ask for less."
        ) from None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        process.wait()
    lines = out.decode("utf-8", "replace").strip().splitlines()
    try:
        found = json.loads(lines[-1] if lines else "")
    except ValueError:
        told = err.decode("utf-8", "replace").strip().splitlines()
        raise InputError(
            f"the process failed: {told[-1] if told else 'it said nothing'}.", where=kind
        ) from None
    if "error" in found:
        raise InputError(**found["error"])
    return found["found"]


def environment() -> dict[str, str]:
    """Ours, with this very package on the path."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@contextmanager
def config_file(text: str) -> Iterator[Path]:
    """A file with a configuration, while the block lasts."""
    with tempfile.TemporaryDirectory(prefix="reinforge-ui-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
        yield file
