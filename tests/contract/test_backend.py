"""The contract of backends in one process and over FSDP2. Those that need more than torch are in
tests/scale/test_backend_contract.py.
"""

from __future__ import annotations

from functools import partial

from helpers.backend_contract import (
    BackendCase,
    BackendContract,
    OnTwoRanks,
    on_one_process,
    on_ranks,
)
from reinforge.backends.fsdp.backend import FsdpBackend


class TestLocal(BackendContract):
    cases = (BackendCase("local", "local", on_one_process),)


class TestFsdp(OnTwoRanks):
    cases = (BackendCase("fsdp", "fsdp", partial(on_ranks, FsdpBackend), {"backend": "fsdp"}),)
