"""Where vLLM is: an environment of its own, named by REINFORGE_PYTHON_VLLM, or .venv-vllm in the
repository.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.paths import ROOT

DEFAULT = ROOT / ".venv-vllm" / "bin" / "python"
START = 900.0  # seconds; two slow cores that are shared need minutes


def vllm_python() -> str:
    """Skips where there is none."""
    python = Path(os.environ.get("REINFORGE_PYTHON_VLLM", DEFAULT))
    if not python.exists():
        pytest.skip(
            f"no vLLM: {python} does not exist (REINFORGE_PYTHON_VLLM names a Python that has it)"
        )
    return str(python)
