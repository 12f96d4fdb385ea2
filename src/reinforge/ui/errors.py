"""What the web app refuses, beside what is wrong with the request."""

from __future__ import annotations

from reinforge.core.errors import InputError


class NoSuchRun(InputError):
    """A run, a sample or a checkpoint that is not there. The web app answers 404."""
