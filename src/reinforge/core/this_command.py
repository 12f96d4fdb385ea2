"""How a command of reinforge is written for whoever reads it in this shell."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def this_command() -> str:
    """What starts reinforge in the reader's shell: its name alone only where that is found."""
    if shutil.which("reinforge"):
        return "reinforge"
    script = Path(sys.executable).with_name("reinforge")
    found = [str(script)] if script.is_file() else [sys.executable, "-m", "reinforge"]
    program = Path(found[0])
    if program.is_relative_to(Path.cwd()):
        found[0] = str(program.relative_to(Path.cwd()))
    return shlex.join(found)
