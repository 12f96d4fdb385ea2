"""The in-process engine: runs the trainer's own module.

One model, not two; no weight sync, no second copy.
"""

from reinforge.engines.native.engine import NativeEngine

__all__ = ["NativeEngine"]
