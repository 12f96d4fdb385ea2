"""Floor 1: contained execution of code that a model wrote, and verdicts that such code cannot
forge.
"""

from reinforge.sandbox.local import Pool, run, run_sync
from reinforge.sandbox.program import Limits, Program, Result

__all__ = ["Limits", "Pool", "Program", "Result", "run", "run_sync"]
