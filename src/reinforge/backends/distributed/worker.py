"""A rank's side of every backend on several processes: what it does with the packs that it was
dealt, whoever cuts the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from reinforge.backends.deterministic import Determinism
from reinforge.backends.distributed.ranks import RankMember
from reinforge.backends.local import LocalBackend
from reinforge.backends.microbatch import combine
from reinforge.backends.oom import memory_errors
from reinforge.core.backend import Loss, State, Stateful
from reinforge.core.batch import Batch, Totals
from reinforge.core.errors import InputError
from reinforge.core.metrics import LossMetrics, StepMetrics

Dealt = Sequence[tuple[Batch, bool]]  # packs of one rank, and whether they count


class RankWorker(LocalBackend, ABC):
    """One rank's part of a backend. `DistributedBackend` makes one on every rank, and calls its
    methods on all of them at once.

    A kind says how weights are cut, how one pack is run and annotated where that differs, and how
    whole tensors are put together and taken apart. It is made of (member, make, cfg, settings,
    compiled): `make` loads the model, whole and on the host; `settings` are those of
    `LocalBackend`; `compiled`: its layers are to be compiled. One that keeps averages has `swap`
    too, and one that `writes_pieces` has `write_pieces` and `read_pieces` (fsdp/worker.py).
    """

    member: RankMember
    saves: ClassVar[str]  # a setting with which less memory is needed
    # whether it writes and reads its own files of checkpoints
    writes_pieces: ClassVar[bool] = False
    stored: Mapping[str, torch.dtype]  # of each trained parameter, the precision in checkpoints
    shapes: Mapping[str, torch.Size]  # of each trained parameter, when it is whole

    def _determinism(self) -> Determinism:
        """Where it is asked for by name: ranks cannot agree to go on without in mid-pass."""
        return Determinism(self.cfg.deterministic is True, self.model.device)

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
    def evaluate_packs(self, dealt: Dealt, loss: Loss, totals: Totals) -> StepMetrics:
        return self._run(dealt, loss, totals)

    def train_packs(self, dealt: Dealt, loss: Loss, totals: Totals) -> StepMetrics:
        with self._update():
            return self._run(dealt, loss, totals)

    def _run(self, dealt: Dealt, loss: Loss, totals: Totals) -> StepMetrics:
        found = [
            (self._safely(batch, partial(self._one, batch, loss, totals, counts)), counts)
            for batch, counts in dealt
        ]
        return combine([part for part, counts in found if counts])

    def _one(self, batch: Batch, loss: Loss, totals: Totals, counts: bool) -> LossMetrics:
        """A pack that does not count gives gradients of 0, so that every rank has some to add."""
        value, metrics = self._micro(batch, loss, totals, counts)
        if value.requires_grad:
            (value if counts else value * 0.0).backward()
        return {"train/loss": value.detach(), **metrics}

    def _move_biases(self, moved: bool) -> None:
        """By the tokens of all ranks."""
        if self.experts.bias is not None:
            self.experts.bias.add_up()
        super()._move_biases(moved)

    def limit(self, budget: int) -> None:
        self.budget = budget

    def _safely(self, batch: Batch, work: Callable[[], Any]) -> Any:
        try:
            with memory_errors():
                return work()
        except torch.OutOfMemoryError as error:
            # the other ranks wait in the middle of the pass: it cannot be done again in smaller
            # shards
            raise InputError(
                f"a micro-batch of {batch.n_tokens} tokens does not fit into the memory of rank"
                f" {self.member.rank}.",
                where="train.tokens_per_microbatch",
                fix=(
                    f"Set it to {max(1, batch.n_tokens // 2)}, or use "
                    f"{self.saves}. The newest checkpoint is intact."
                ),
            ) from error

    # ---- whole tensors ----

    def part(self, name: str) -> Stateful:
        """This rank's side of the backend itself (""), or of what follows its weights."""
        return self.parts()[name] if name else self

    @abstractmethod
    def gathered(self, part: str = "") -> State | None:
        """The whole state of a part in the host memory of rank 0; None on the others."""
        ...

    @abstractmethod
    def publish(self, targets: Mapping[str, Tensor] | None) -> None:
        """Puts the trained weights into `targets` on rank 0, one at a time."""
        ...

    def cut(self, name: str, tensor: Tensor) -> list[Tensor]:
        """What each rank is sent of a tensor of the parameter `name`. Here: all of it, and every
        rank keeps its shard.
        """
        return [tensor] * self.member.size

    @abstractmethod
    def receive(self, tensors: dict[str, Tensor]) -> None:
        """Some of the tensors of a state, as `cut` made them."""
        ...

    @abstractmethod
    def load_received(self, part: str, meta: dict[str, Any]) -> None:
        """Loads what was received."""
        ...

    def close(self) -> None:
        """Frees what does not go with the object."""


def parameter_of(key: str) -> str:
    """The parameter that a tensor of a state belongs to.

    >>> parameter_of("model/a.weight"), parameter_of("a.weight")
    ('a.weight', 'a.weight')
    >>> parameter_of("optimizer/a.weight/exp_avg")
    'a.weight'
    """
    parts = key.split("/")
    return parts[0] if len(parts) == 1 else parts[1]
