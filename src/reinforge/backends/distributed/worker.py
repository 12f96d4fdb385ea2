"""A rank's side of every backend on several processes: what it does with the packs that it was
dealt, whoever cuts the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reinforge.backends.deterministic import Determinism
from reinforge.backends.distributed.ranks import RankMember
from reinforge.backends.local import LocalBackend
from reinforge.backends.microbatch import combine
from reinforge.backends.oom import free_caches, memory_errors
from reinforge.core.backend import Loss, State, Stateful
from reinforge.core.batch import Batch, Totals
from reinforge.core.errors import InputError
from reinforge.core.metrics import LossMetrics, StepMetrics
from reinforge.core.sample import Sample
from reinforge.models.causal import VALUE_HEAD

T = TypeVar("T")
Dealt = Sequence[tuple[Batch, bool]]  # packs of one rank, and whether they count


@dataclass(frozen=True, slots=True)
class Shortage:
    """What every rank answers instead of a result where memory ran out in one of them, so that
    `DistributedBackend` asks again with smaller packs.
    """

    pack: int | None  # which of this rank's packs did not fit; None: it ran out elsewhere


class PassAbandoned(Exception):
    """Raised on all ranks at once where memory ran out in one of them: the pass is over."""

    def __init__(self, here: bool):
        super().__init__("memory ran out in a rank")
        self.here = here


class ForwardCollectives:
    """What a forward pass of a model that is cut over the ranks wants all of them to do together.
    `RankWorker` needs it where a rank cannot compute its pack to the end. This one is of a model
    whose forward asks nothing of other ranks.
    """

    def begin(self) -> None:
        """A forward pass begins."""

    def finish(self) -> None:
        """This rank's part of what is left of the pass, without computing: the others wait."""

    def reset(self) -> None:
        """The pass is not followed by a backward pass."""


NO_COLLECTIVES = ForwardCollectives()


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

    @property
    def retries(self) -> bool:
        """Whether a pass can be done again where memory ran out in the forward of one rank: that
        rank must be able to take part in what is left of it.
        """
        return False

    @property
    def has_gradients(self) -> bool:
        """Whether an earlier pass of this optimizer step left some."""
        return bool(self.optimizer.gradients())

    @torch.no_grad()
    def annotate_packs(
        self, dealt: Dealt, needs: frozenset[str]
    ) -> list[tuple[dict[str, Tensor], Tensor | None]] | Shortage:
        """Streams and bootstraps of the packs that count, in their order."""
        found = []
        for i, (batch, counts) in enumerate(dealt):
            try:
                self._annotate_pack(batch, needs)
            except PassAbandoned as abandoned:
                return Shortage(i if abandoned.here else None)
            if counts:
                found.append(
                    (
                        {name: batch.streams[name] for name in needs if name in batch.streams},
                        batch.bootstrap,
                    )
                )
        return found

    def _annotate_pack(self, batch: Batch, needs: frozenset[str]) -> None:
        self._agreed(batch, partial(self._annotate, batch, needs))

    @torch.no_grad()
    def evaluate_packs(self, dealt: Dealt, loss: Loss, totals: Totals) -> StepMetrics | Shortage:
        return self._run(dealt, loss, totals)

    def train_packs(self, dealt: Dealt, loss: Loss, totals: Totals) -> StepMetrics | Shortage:
        with self._update():
            return self._run(dealt, loss, totals)

    def _run(self, dealt: Dealt, loss: Loss, totals: Totals) -> StepMetrics | Shortage:
        found = []
        for i, (batch, counts) in enumerate(dealt):
            try:
                metrics = self._one(batch, loss, totals, counts)
            except PassAbandoned as abandoned:
                return Shortage(i if abandoned.here else None)
            if counts:
                found.append(metrics)
        return combine(found)

    def _one(self, batch: Batch, loss: Loss, totals: Totals, counts: bool) -> LossMetrics:
        """A pack that does not count runs through the same graph, so that no rank waits for a
        gradient that never comes, times 0.
        """
        forward = partial(self._micro, batch, loss, totals, counts)
        value, metrics = self._agreed(batch, partial(self._inside, forward), self.collectives)
        if value.requires_grad:
            wanted = value if counts else value * 0.0
            try:
                with memory_errors():
                    self._backward(wanted)
            except torch.OutOfMemoryError as error:
                raise self._too_large(batch) from error
        return {"train/loss": value.detach(), **metrics}

    # how one pack is run; what cuts the weights has ways of its own

    collectives = NO_COLLECTIVES

    def _inside(self, work: Callable[[], tuple[Tensor, LossMetrics]]) -> tuple[Tensor, LossMetrics]:
        return work()

    def _backward(self, value: Tensor) -> None:
        value.backward()

    def _agreed(
        self, batch: Batch, work: Callable[[], T], collectives: ForwardCollectives = NO_COLLECTIVES
    ) -> T:
        """What the forward pass of a pack finds, once every rank has found something.

        The vote is before the backward: where memory ran out in one rank, that one takes part in
        the rest of the forward, and then all of them leave the pass.
        """
        collectives.begin()
        found: list[T] = []
        try:
            with memory_errors():
                found.append(work())
        except torch.OutOfMemoryError as error:
            if not self.retries:
                raise self._too_large(batch) from error
        if not self.retries:
            return found[0]
        # the `except` block is left: nothing holds the tensors of the failed pass
        if not found:
            free_caches()
            collectives.finish()
        if self._anywhere(not found):
            here = not found
            found.clear()
            collectives.reset()
            raise PassAbandoned(here)
        return found[0]

    def _anywhere(self, here: bool) -> bool:
        """Whether it is so on any rank. Asked on the host: devices need not be waited for."""
        votes = torch.tensor(int(here))
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes)

    def _too_large(self, batch: Batch) -> InputError:
        """Where the other ranks wait in the middle of something that this one cannot take part
        in.
        """
        return InputError(
            f"a micro-batch of {batch.n_tokens} tokens does not fit into the memory of rank"
            f" {self.member.rank}.",
            where="train.tokens_per_microbatch",
            fix=(
                f"Set it to {max(1, batch.n_tokens // 2)}, or use "
                f"{self.saves}. The newest checkpoint is intact."
            ),
        )

    def shrink(self, budget: int, forget: bool) -> None:
        """Packs are smaller from now on; `forget`: the gradients of the pass that did not fit."""
        if forget:
            self._forget_gradients()
            if self.experts.bias is not None:
                self.experts.bias.forget()
        free_caches()
        self.limit(budget)

    def _forget_gradients(self) -> None:
        self.optimizer.zero()

    def _move_biases(self, moved: bool) -> None:
        """By the tokens of all ranks."""
        if self.experts.bias is not None:
            self.experts.bias.add_up()
        super()._move_biases(moved)

    @torch.no_grad()
    def probe(self, tokens: Sequence[int]) -> Tensor:
        """The log-prob at temperature 1 of each token after those before it; 0 for the first. All
        ranks compute it together, where the weights are.
        """
        batch = Batch.pack([Sample.from_tokens("probe", list(tokens), [True] * len(tokens))])
        sampled_at = self.temperature
        self.temperature = 1.0
        try:
            found = self.annotate_packs([(batch, True)], frozenset({"old"}))
        finally:
            self.temperature = sampled_at
        if isinstance(found, Shortage):
            raise InputError(
                f"memory ran out in the proof of new weights, {len(tokens)} tokens on every rank.",
                where="train.backend",
                fix="Use more ranks, or leave the engine less of the memory (engine.memory).",
            )
        return torch.cat([torch.zeros(1), batch.streams["old"].float()])

    def limit(self, budget: int) -> None:
        self.budget = budget

    # ---- whole tensors ----

    def part(self, name: str) -> Stateful:
        """This rank's side of the backend itself (""), or of what follows its weights."""
        return self.parts()[name] if name else self

    @abstractmethod
    def gathered(self, part: str = "") -> State | None:
        """The whole state of a part in the host memory of rank 0; None on the others."""
        ...

    @torch.no_grad()
    def publish(self, module: nn.Module | None = None) -> None:
        """Puts the trained weights and the biases of routers into `module`, which rank 0 is given,
        or into the copy of the model that this rank generates with, if it does. All ranks take
        part; afterwards nothing of it has to be sent to anybody.
        """
        module = self.member.copy if module is None else module
        if module is None:
            return self.put_whole({})
        own = dict(module.named_parameters())
        read = [name for name in self.shapes if not name.startswith(VALUE_HEAD) or name in own]
        self.put_whole({name: own[name] for name in read})
        if self.experts.bias is not None:
            self.experts.bias.publish(module)

    @abstractmethod
    def put_whole(self, targets: Mapping[str, Tensor]) -> None:
        """Gathers the trained weights, and puts those into `targets` that are named there."""
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
