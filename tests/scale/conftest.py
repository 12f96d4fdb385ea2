"""How the tests of this folder share two processes (`pytest -n 2 --dist loadgroup`).

A file runs in one process, so that its ranks and servers are started once. Files that have the same
mark `xdist_group(...)` follow one another: two clusters at once, or two servers of vLLM, are too
much for a small machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
