"""What `reinforge plan` was asked for beside the configuration, and how the process that does the
checks is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reinforge.backends.roofline import GPUS, Machine, known_gpu
from reinforge.cluster.scaling import machine
from reinforge.core.errors import InputError

DEEP = "--deep"
GPU = "--gpu="


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """`deep`: also the third phase. `gpu`: predict for this one, whatever is here."""

    deep: bool = False
    gpu: str | None = None

    def arguments(self) -> list[str]:
        """For the process of the checks."""
        return [*([DEEP] if self.deep else []), *([f"{GPU}{self.gpu}"] if self.gpu else [])]

    @classmethod
    def of(cls, argv: Sequence[str]) -> PlanOptions:
        """What `arguments` were made from."""
        named = [arg.removeprefix(GPU) for arg in argv if arg.startswith(GPU)]
        return cls(deep=DEEP in argv, gpu=named[0] if named else None)


def stated_gpu(text: str) -> Machine:
    """A GPU of our table, with another size of memory behind a colon; or a size alone.

    >>> stated_gpu("A100:40").memory // 2**30, stated_gpu("L4").memory // 2**30
    (40, 24)
    >>> stated_gpu("24").known
    False
    """
    found = re.fullmatch(r"(?:(?P<name>.*[A-Za-z].*?)(?::|$))?(?P<gib>\d+(?:\.\d+)?)?", text)
    name = found["name"] if found else None
    gib = float(found["gib"]) if found and found["gib"] else None
    known = name is not None and known_gpu(name) is not None
    if not known and (name is not None or not gib):
        raise InputError(
            f"there is no GPU {text!r} in our table.",
            where="--gpu",
            fix=f"Give the GiB of its memory, or one of: {', '.join(GPUS)}.",
        )
    return machine(name or f"a GPU of {gib:g} GiB", gib)
