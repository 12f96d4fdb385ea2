"""Functions of a user's as parts of an algorithm: errors that they raise, and results of a wrong
shape, are reported as theirs, with the key, the file and the line.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from reinforge.algorithms.settings import name_of
from reinforge.core.errors import InputError


def is_ours(function: Any) -> bool:
    own = getattr(function, "func", function)  # settings may be bound to it
    module = getattr(own, "__module__", None) or ""  # of text that was executed: None
    return module.startswith("reinforge.")


def error_of(
    function: Any, error: Exception, where: str, call: str, ours: str
) -> InputError | None:
    """The error of a user's own function: which line raised what.

    None: it is ours, and stays as it is. `call`: what it is called with; `ours`: the file that
    called it, whose lines say nothing.
    """
    if isinstance(error, InputError) or is_ours(function):
        return None
    at = traceback.extract_tb(error.__traceback__)[-1]
    place = f" ({Path(at.filename).name}:{at.lineno})" if at.filename != ours else ""
    return InputError(
        f"{name_of(function)} raised {type(error).__name__}: {error}{place}.",
        where=where,
        fix=f"It is called with {call}. Repair it; --debug shows the traceback.",
    )


@dataclass(frozen=True)
class UserSurrogate:
    """A surrogate that a user wrote; `build` wraps it, and a loss calls it like one of ours."""

    func: Callable[..., Any]

    def __call__(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            found = self.func(logprobs, old, advantages, sequence)
        except Exception as error:
            call = "(logprobs, old, advantages, sequence)"
            told = error_of(self.func, error, "algorithm.surrogate", call, __file__)
            if told is None:
                raise
            raise told from error
        if not (
            isinstance(found, tuple)
            and len(found) == 2
            and isinstance(found[0], Tensor)
            and isinstance(found[1], Mapping)
        ):
            raise self._wrong(
                f"a {type(found).__name__}"
                if not isinstance(found, tuple)
                else f"a tuple of {len(found)}"
            )
        if found[0].shape != logprobs.shape:
            raise self._wrong(f"losses of shape {tuple(found[0].shape)} for {len(logprobs)} tokens")
        return found[0], dict(found[1])

    def _wrong(self, what: str) -> InputError:
        return InputError(
            f"{name_of(self.func)} returned {what}.",
            where="algorithm.surrogate",
            fix=(
                "Return (losses, metrics): one loss per token, not their sum or mean, and a dict of"
                " tensors per token, which may be empty."
            ),
        )
