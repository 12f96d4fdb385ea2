"""The same bits twice on a GPU: no sum whose order depends on which thread comes first.

Attention's backward, gradients of gathered keys and of embeddings add up by atomics unless torch is
told otherwise; torch has another form of most such operations, and refuses those that have none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from reinforge.core.errors import InputError
from reinforge.core.turns import TURNS

log = logging.getLogger(__name__)
REFUSAL = "does not have a deterministic implementation"


class Determinism:
    """What `train.deterministic` asks for, and whether it still holds.

    `auto` ends with the first operation that has no deterministic form; the log names it.
    """

    def __init__(self, asked: bool | Literal["auto"], device: torch.device):
        self.asked = asked
        self.on = bool(asked) and device.type == "cuda"

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Inside, operations are deterministic or raise: where `true` was asked for an error that
        says what to do.
        """
        if not self.on:
            yield
            return
        settings: Any = torch.utils.deterministic
        with TURNS.working():  # an engine that captures a graph changes the same settings
            before = torch.are_deterministic_algorithms_enabled()
            warned = torch.is_deterministic_algorithms_warn_only_enabled()
            filled = settings.fill_uninitialized_memory
            settings.fill_uninitialized_memory = False  # nobody reads it here
            torch.use_deterministic_algorithms(True)
        try:
            yield
        except RuntimeError as error:
            if self.asked is not True or REFUSAL not in str(error):
                raise
            raise InputError(
                f"{_operation(error)} has no deterministic form on a GPU.",
                where="train.deterministic",
                fix="Set it to auto: such a run continues, and its last bits may differ.",
            ) from error
        finally:
            with TURNS.working():
                torch.use_deterministic_algorithms(before, warn_only=warned)
                settings.fill_uninitialized_memory = filled

    def give_up(self, error: RuntimeError) -> None:
        """After an error inside: returns where the work is to be done again without. Raises the
        error if it is another one.
        """
        if not self.on or REFUSAL not in str(error):
            raise error
        self.on = False
        log.warning(
            "%s has no deterministic form on a GPU: two runs of this configuration may differ in"
            " their last bits.",
            _operation(error),
        )


def _operation(error: RuntimeError) -> str:
    return str(error).split(REFUSAL)[0].strip()
