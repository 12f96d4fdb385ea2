"""`train.deterministic`: what is asked of torch, and what happens when it has no such operation.
The bits themselves need a GPU: tests/gpu/test_deterministic_cuda.py.
"""

from __future__ import annotations

import logging

import pytest
import torch

from reinforge.backends.deterministic import Determinism
from reinforge.core.errors import InputError

GPU = torch.device("cuda")
REFUSED = RuntimeError(
    "cumsum_cuda_kernel does not have a deterministic implementation, but you set"
    " 'torch.use_deterministic_algorithms(True)'."
)


def flags() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize("warn", [False, True])
def test_torch_is_asked_inside_and_is_as_before_outside(warn: bool) -> None:
    before = flags()
    try:
        torch.use_deterministic_algorithms(warn, warn_only=warn)
        outside = flags()
        with pytest.raises(KeyError), Determinism("auto", GPU).enforced():
            assert flags() == (True, False, False)
            raise KeyError
        assert flags() == outside
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize(
    ("asked", "device"), [("auto", torch.device("cpu")), (True, torch.device("cpu")), (False, GPU)]
)
def test_a_cpu_needs_nothing_and_false_is_off(asked: bool, device: torch.device) -> None:
    with Determinism(asked, device).enforced():
        assert not torch.are_deterministic_algorithms_enabled()


def test_auto_goes_on_without_and_names_the_operation(caplog: pytest.LogCaptureFixture) -> None:
    asked = Determinism("auto", GPU)
    with caplog.at_level(logging.WARNING):
        asked.give_up(REFUSED)
    assert "cumsum_cuda_kernel has no deterministic form" in caplog.text
    with asked.enforced():
        assert not torch.are_deterministic_algorithms_enabled()


def test_true_is_an_error_that_says_what_to_do() -> None:
    wanted = pytest.raises(InputError, match=r"train.deterministic.*cumsum_cuda_kernel.*auto")
    with wanted, Determinism(True, GPU).enforced():
        raise REFUSED
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_errors_are_raised_again() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        Determinism("auto", GPU).give_up(RuntimeError("shapes do not fit"))
