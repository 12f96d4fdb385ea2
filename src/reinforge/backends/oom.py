"""When the device's memory runs out: the same samples again, in smaller micro-batches.

The gradient does not depend on their size.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from reinforge.core.batch import Batch, cut, unit_sizes
from reinforge.core.errors import InputError
from reinforge.core.report import OutOfMemory
from reinforge.core.turns import TURNS


class OomRecovery:
    """Finds a smaller micro-batch when memory runs out, and remembers it until the next optimizer
    step reports it. Every backend has one.
    """

    def __init__(self) -> None:
        # the micro-batch in progress: the one that failed, if memory runs out now
        self.working: Batch | None = None
        self._budgets: list[tuple[int, int]] = []  # before and after, each time

    def smaller(self, budget: int, unit: int) -> int:
        """The budget from now on: half of what failed, but no less than its longest unit.

        To be called outside of the `except` block: the error holds the frames that hold the
        tensors.
        """
        free_caches()
        failed = self.working
        assert failed is not None, "memory ran out outside of a micro-batch"
        sizes = unit_sizes(failed, unit)
        if len(sizes) < 2:
            what = "a row" if unit == 1 else f"a unit of {unit} rows"
            raise InputError(
                f"{what} of {failed.n_tokens} tokens does not fit into the memory of the device,"
                " even alone.",
                where="train",
                fix=(
                    "Lower rollout.max_new_tokens or data.max_length, set"
                    " model.gradient_checkpointing=true (or host), train an adapter"
                    " (adapter.rank=16) instead of all weights, or set"
                    " train.optimizer.offload=true."
                ),
            )
        half = min(budget, failed.n_tokens) // 2
        new = max(half, *sizes)
        # a pack beyond the budget, which pack does where prompts of a group differ
        new = new if new < budget else max(1, half)
        self._budgets.append((budget, new))
        return new

    def report(self) -> OutOfMemory | None:
        """How often memory ran out since this was asked last, and the largest and smallest budget
        meanwhile. None if it did not.
        """
        told = self._budgets
        self._budgets = []
        self.working = None
        if not told:
            return None
        return OutOfMemory(times=len(told), old_budget=told[0][0], new_budget=told[-1][1])


def fit_to_budget(batches: Sequence[Batch], budget: int, unit: int = 1) -> list[Batch]:
    """The batches, those that are larger than the budget cut: they were packed before it shrank."""
    return [
        part
        for batch in batches
        for part in (cut(batch, budget, unit=unit) if batch.n_tokens > budget else [batch])
    ]


@contextmanager
def memory_errors() -> Iterator[None]:
    """What the libraries below torch say when they get no memory (cuBLAS for its workspace, cuDNN)
    becomes torch's own error.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not any(
            f"{library}_STATUS_ALLOC_FAILED" in str(error) for library in ("CUBLAS", "CUDNN")
        ):
            raise
        raise torch.OutOfMemoryError(str(error)) from None


def free_caches() -> None:
    gc.collect()
    if torch.cuda.is_available():
        with TURNS.working():
            torch.cuda.empty_cache()
