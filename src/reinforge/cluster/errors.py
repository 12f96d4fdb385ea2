"""What is raised when an actor is gone."""

from __future__ import annotations

from reinforge.core.errors import EXIT_STOPPED, ReinforgeError


class ActorLost(ReinforgeError):
    """An actor is gone, or does not answer; `role` says whose. Worker groups raise it, and the run
    is attempted again by `build/ray_run.py`.
    """

    exit_code = EXIT_STOPPED

    def __init__(self, role: str, how: str):
        self.role = role
        self.how = how
        super().__init__(f"{role}: {how}")
