"""Errors that a user can act on.

Each is one paragraph: what is wrong, where, and what to do about it.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 3
EXIT_TERMINATED = 143
ENDS = (".", "!", "?", ":", ";", "…")


def said_by(error: BaseException) -> str:
    r"""What a library's error says, for a message of ours: its lines up to the first that ends a
    sentence, as one.

    >>> said_by(ValueError("Layer Experts(\n  (act): SiLU()\n) is unknown. \nSee the docs."))
    'Layer Experts( (act): SiLU() ) is unknown.'
    >>> said_by(OSError("none of:\n(1) a file,\n(2) a folder")), said_by(ValueError())
    ('none of: (1) a file, (2) a folder', 'ValueError')
    """
    told: list[str] = []
    for line in str(error).strip().splitlines():
        told.append(line.strip())
        if told[-1].endswith((".", "!", "?")):
            break
    return " ".join(told) or type(error).__name__


class ReinforgeError(Exception):
    """Base of every error that is shown without a traceback; `exit_code` is what the command
    returns.
    """

    exit_code = 1


class InputError(ReinforgeError):
    """The user's config, data, model or flags are wrong.

    `where` names the file, key or row; `fix` says what to do.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None):
        self.what = what
        self.where = where
        self.fix = fix
        # so that two sentences never run together
        said = f"{what.rstrip()}." if fix and not what.rstrip().endswith(ENDS) else what
        super().__init__(
            " ".join(part for part in (f"{where}:" if where else "", said, fix or "") if part)
        )


class RequestError(InputError):
    """An engine or a server cannot answer this request, and may well answer others. Engines and
    clients raise it; who asks for many completions may leave one out.
    """


class StoppedByPolicy(ReinforgeError):
    """The run ended itself: three bad steps in a row, mismatch beyond the limit, all
    workers dead.
    """

    exit_code = EXIT_STOPPED


class WeightMismatch(ReinforgeError):
    """The engine does not serve what the trainer has. `compare` (weights/probe.py) raises it with
    the likeliest reason, and the run ends.
    """


class Terminated(ReinforgeError):
    """SIGTERM or Ctrl-C arrived and a checkpoint was saved. `Run` raises it; the command line ends
    with its exit code.
    """

    exit_code = EXIT_TERMINATED
