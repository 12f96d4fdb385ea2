"""What a backend is: something that trains one model.

Implementations live in `reinforge.backends`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from reinforge.core.batch import Batch, Totals
from reinforge.core.report import Metrics, StepReport
from reinforge.core.sample import Sample
from reinforge.core.weights import Weights


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """What a loss sees of one micro-batch: flat vectors over its M trained tokens, and nothing
    else.

    Prompt, padding and tool tokens are not here, so they cannot get a gradient.
    """

    logprobs: Tensor  # [M] of the policy being trained, with gradient
    entropy: Tensor | None  # [M] where the loss asked for it
    sequence: Tensor  # [M] which sequence of the micro-batch
    lengths: Tensor  # [S] trained tokens per sequence of the micro-batch
    # [M] trained tokens of the token's whole episode (over all rows and micro-batches)
    episode_tokens: Tensor
    streams: Mapping[str, Tensor]  # [M] each: behaviour, old, reference, advantages, ...
    values: Tensor | None = (
        # [M] of a critic (or of the policy's value head) before each token, with gradient, where
        # the loss `reads` it
        None
    )
    # [M] to a teacher, with gradient, where the loss names a `divergence`
    divergence: Tensor | None = None


@runtime_checkable
class Loss(Protocol):
    """A pure function of one micro-batch.

    Must be a sum over tokens divided by `totals`, never by local counts.

    It reads log-probs, unless it has an attribute `reads` that says otherwise: {"values"} for a
    critic, or both, or {"values_after"} for a reward model, whose values are read at each token
    instead of before it.
    """

    needs: frozenset[str]  # streams that `annotate` must fill before: "old", "reference", ...
    entropy: bool  # whether token entropies are wanted
    entropy_gradient: bool  # ... and enter the loss
    unit: int  # samples that must stay in one pack: 1, or 2 for preference pairs

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss and metrics.

        Metrics are sums already divided by `totals`, so that they add up over micro-batches; names
        ending in `/max` and `/min` are combined by max and min.
        """
        ...


@runtime_checkable
class Prepares(Protocol):
    """A loss with constants of the whole optimizer batch (a KTO baseline, ranks): it sees all
    packs, annotated, before the first is trained.
    """

    def companions(self, samples: Sequence[Sample]) -> list[Sample]:
        """Further rows to be packed and annotated with `old` and `reference`, and not trained;
        mostly none.
        """
        ...

    def prepare(self, batches: Sequence[Batch], companions: Sequence[Batch] = ()) -> None:
        """Writes what the loss will read as streams of the batches."""
        ...


class TensorShards(Protocol):
    """Tensors that lie in several processes, which write them into a checkpoint themselves: nobody
    gathers them.
    """

    def write(self, folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
        """Writes into the directory, `prefix` before every name.

        Returns what the manifest is to say of the files.
        """
        ...


@dataclass(slots=True)
class State:
    """Everything of a backend that a checkpoint must hold: flat tensors and plain JSON values."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, TensorShards] = field(default_factory=dict)  # by the prefix of their names


class Stateful(Protocol):
    """Something else of a run that must survive a resume: a critic, a pass-rate store, a
    coefficient that adapts.
    """

    def state(self) -> State: ...

    def load(self, state: State) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """What the loops train a policy, a critic or a reward model with. `build/` makes it."""

    # packed tokens per micro-batch. The gradient does not depend on it but its rounding does, so it
    # is part of the state
    budget: int
    share: bool  # whether packs compute the prompt of a group once (`Batch.pack`)

    @property
    def steps(self) -> int:
        """Optimizer steps done, skipped and empty ones included."""
        ...

    @property
    def devices(self) -> int:
        """How many train: one, the ranks of this run, or the actors of a cluster."""
        ...

    def parts(self) -> dict[str, Stateful]:
        """What must survive a resume beside the state: what follows the weights."""
        ...

    def annotate(self, batches: Sequence[Batch], needs: frozenset[str]) -> None:
        """Fills streams without gradient: old, reference, values (and the bootstrap of truncated
        samples), values_after, teacher, collision.
        """
        ...

    def forward_backward(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> Metrics:
        """Accumulates the gradient of a whole optimizer step."""
        ...

    def evaluate(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> Metrics:
        """What the loss says of the batches, without a gradient."""
        ...

    def step(self) -> StepReport:
        """Clips, updates, schedules.

        A gradient that is not finite leaves everything untouched, and the step was `skipped`.
        """
        ...

    def weights(self) -> Weights: ...

    def state(self) -> State: ...

    def load(self, state: State) -> None: ...
