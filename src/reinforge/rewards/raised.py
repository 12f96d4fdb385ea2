"""What a reward raised, and where in its author's code, in words.

No torch here: workers import this.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

OURS = str(Path(__file__).resolve().parents[1])
PYTHONS = sysconfig.get_path("stdlib")
INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
MOST_OF_A_LINE = 120  # characters


class RewardRaised(Exception):
    """The reward raised in its worker. The class has the name of what it raised there."""

    trace: str = ""  # the traceback in the worker
    place: str = ""  # as `place_of` tells it
    line: str = ""  # what stands there


def raised_in_words(error: BaseException) -> str:
    """`raised at rewards.py:12 in score: KeyError: 'answer' (the line: ...)`, as far as it is known
    where.
    """
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, RewardRaised):
        place = error.place
        line = error.line
    else:
        place, line = place_of(error)
    if not place:
        return f"raised {what}"
    shown = f" (the line: {line})" if line else ""
    return f"raised at {place}: {what}{shown}"


def place_of(error: BaseException) -> tuple[str, str]:
    """File, line and function of the innermost frame that the author of a reward wrote, and the
    line itself: a call into a library is told by who made it. Nothing where all of it is ours.
    """
    frames = traceback.extract_tb(error.__traceback__)
    for excluded in _libraries():
        theirs = [frame for frame in frames if not frame.filename.startswith(excluded)]
        if theirs:
            frame = theirs[-1]
            line = (frame.line or "").strip()
            name = _function(theirs)
            return f"{_short(frame.filename)}:{frame.lineno} in {name}", line[:MOST_OF_A_LINE]
    return "", ""


def from_their_code(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame on that is neither ours nor a library's; all of it where
    there is none.
    """
    libraries = next(_libraries())
    here = trace
    while here is not None and here.tb_frame.f_code.co_filename.startswith(libraries):
        here = here.tb_next
    return here or trace


def _function(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost that has a name: a comprehension is told by the function that it stands in."""
    file = frames[-1].filename
    named = [f.name for f in frames if f.filename == file and not f.name.startswith("<")]
    return named[-1] if named else frames[-1].name


def _libraries() -> Iterator[tuple[str, ...]]:
    """What is not taken for the author's code: first all that is installed, then less, for a reward
    that is itself of an installed package.
    """
    yield OURS, "<", *INSTALLED, PYTHONS
    yield OURS, "<", PYTHONS


def _short(file: str) -> str:
    """The path from here, where the file is below."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return file
