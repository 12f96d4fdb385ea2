"""What the rank side of every backend on several processes does with the packs that it was dealt,
whoever cuts the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from reinforge.backends.distributed.ranks import Member
from reinforge.backends.local import LocalBackend
from reinforge.backends.microbatch import combine
from reinforge.backends.oom import memory_errors
from reinforge.core.backend import Loss, Metrics
from reinforge.core.batch import Batch, Totals
from reinforge.core.errors import InputError

Dealt = Sequence[tuple[Batch, bool]]  # packs of one rank, and whether they count


class DealtBackend(LocalBackend):
    """Who cuts the weights says how one pack is run, and annotated, where that differs."""

    member: Member
    saves: ClassVar[str]  # a setting with which less memory is needed

    @torch.no_grad()
    def annotate_packs(
        self, dealt: Dealt, needs: frozenset[str]
    ) -> list[tuple[dict[str, Tensor], Tensor | None]]:
        """Streams and bootstraps of the packs that count, in their order."""
        found = []
        for batch, counts in dealt:
            self._safely(batch, partial(self._annotate, batch, needs))
            if counts:
                found.append(
                    (
                        {name: batch.streams[name] for name in needs if name in batch.streams},
                        batch.bootstrap,
                    )
                )
        return found

    @torch.no_grad()
    def evaluate_packs(self, dealt: Dealt, loss: Loss, totals: Totals) -> Metrics:
        return self._run(dealt, loss, totals)

    def train_packs(self, dealt: Dealt, loss: Loss, totals: Totals) -> Metrics:
        self.model.recompute(True)
        try:
            return self._run(dealt, loss, totals)
        finally:
            self.model.recompute(False)

    def _run(self, dealt: Dealt, loss: Loss, totals: Totals) -> Metrics:
        found = [
            (self._safely(batch, partial(self._one, batch, loss, totals, counts)), counts)
            for batch, counts in dealt
        ]
        return combine([part for part, counts in found if counts])

    def _one(self, batch: Batch, loss: Loss, totals: Totals, counts: bool) -> dict[str, Tensor]:
        """A pack that does not count gives gradients of 0, so that every rank has some to add."""
        value, metrics = self._micro(batch, loss, totals)
        if value.requires_grad:
            (value if counts else value * 0.0).backward()
        return {"train/loss": value.detach(), **metrics}

    def limit(self, budget: int) -> None:
        self.budget = budget

    def _safely(self, batch: Batch, work: Callable[[], Any]) -> Any:
        try:
            with memory_errors():
                return work()
        except torch.OutOfMemoryError as error:
            # the other ranks wait in the middle of the pass: it cannot be done again in smaller
            # pieces
            raise InputError(
                f"a micro-batch of {batch.n_tokens} tokens does not fit into the memory of rank"
                f" {self.member.rank}.",
                where="train.tokens_per_microbatch",
                fix=(
                    f"Set it to {max(1, batch.n_tokens // 2)}, or use "
                    f"{self.saves}. The newest checkpoint is intact."
                ),
            ) from error
