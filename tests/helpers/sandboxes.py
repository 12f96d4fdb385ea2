"""What the tests of the sandbox share: the ways of containment that work here."""

from __future__ import annotations

import os
import shutil
from typing import Literal

import pytest

from helpers import needs
from reinforge.sandbox.detect import missing
from reinforge.sandbox.isolation import Isolation

WAYS: tuple[Literal["own", "bwrap"], ...] = ("own", "bwrap")


def containment(mode: Literal["own", "bwrap"]) -> Isolation:
    """Skips, with the reason, where this machine cannot; fails where it visibly can and
    we do not.
    """
    reason = missing(mode)
    if reason is None:
        return Isolation(mode)
    if (
        mode == "own"
        and os.getuid() == 0
        and os.system("unshare -Urnpimf --mount-proc true 2>/dev/null") == 0
    ):
        pytest.fail(f"unshare(1) makes namespaces here, and we do not: {reason}")
    if (
        mode == "bwrap"
        and shutil.which("bwrap")
        and os.system("bwrap --unshare-all --ro-bind / / true 2>/dev/null") == 0
    ):
        pytest.fail(f"bubblewrap works here, and we do not make it: {reason}")
    needs.missing("sandbox", f"cannot contain programs by {mode}: {reason}")
