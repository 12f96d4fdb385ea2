"""What a backend is: something that trains one model.

Implementations live in `reinforge.backends`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from reinforge.core.batch import DOMAIN, Batch, Totals
from reinforge.core.metrics import LossMetrics, StepMetrics
from reinforge.core.model_facts import ModelFacts
from reinforge.core.report import StepReport
from reinforge.core.sample import Sample
from reinforge.core.weights import Weights

# Streams [M, k]: the likeliest tokens of a teacher at every trained place, and their log-probs.
TEACHER_IDS = "teacher_ids"
TEACHER_LOGPROBS = "teacher_logprobs"


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """What a loss sees of one micro-batch: flat vectors over its M trained tokens, and nothing
    else. A backend makes it of a batch and its own forward, and calls the loss with it.

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
        # the loss `reads` it; [M, A] of a reward model with several heads
        None
    )
    # [M] to a teacher, with gradient, where the loss names a `divergence`
    divergence: Tensor | None = None


# [M, V] logits of the student and of a teacher -> [M]
Divergence = Callable[[Tensor, Tensor], Tensor]


class Loss(ABC):
    """A pure function of one micro-batch, and what it wants to know of it. Losses stand in
    `algorithms/losses`; backends call them, pack by pack.

    Must be a sum over tokens divided by `totals`, never by local counts.
    """

    # streams that `annotate` must fill before: "old", "reference", ...
    needs: frozenset[str] = frozenset()
    # what is read of the model: "logprobs"; "values" before each token, for a critic;
    # "values_after", at each token, for a reward model
    reads: frozenset[str] = frozenset({"logprobs"})
    entropy: bool = False  # whether token entropies are wanted
    entropy_gradient: bool = False  # ... and enter the loss
    unit: int = 1  # samples that must stay in one pack: 1, or 2 for preference pairs
    divergence: Divergence | None = None  # to a teacher; None: it compares with none
    # ... to the tokens that were kept of a teacher (ids and log-probs side by side)
    given: Divergence | None = None
    # ... to a teacher with another tokenizer: the i-th token against the i-th
    by_rank: bool = False
    # the names of the domains that the stream `domain` counts; none where rows have no domain
    domains: tuple[str, ...] = ()

    def name_domains(self, names: tuple[str, ...]) -> None:
        """Tells the loss whose means it is to report."""
        self.domains = names

    @property
    def idle(self) -> bool:
        """Whether a token with advantage 0 has no gradient, so that rows of such tokens need not be
        computed.
        """
        return False

    @abstractmethod
    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        """The scalar loss and metrics.

        Metrics are sums already divided by `totals`, so that they add up over micro-batches, or an
        `Extreme`.
        """
        ...


def by_domain(
    name: str, values: Tensor, tokens: TrainedTokens, totals: Totals, domains: Sequence[str]
) -> LossMetrics:
    """The mean of `values` [M] over the tokens of each domain, as metrics `name/domain`."""
    if DOMAIN not in tokens.streams:
        return {}
    of_token = tokens.streams[DOMAIN]
    return {
        f"{name}/{domain}": values.detach()[of_token == i].sum() / totals.domain_tokens[i]
        for i, domain in enumerate(domains)
        if totals.domain_tokens.get(i)
    }


@runtime_checkable
class PreparingLoss(Protocol):
    """A loss with constants of the whole optimizer batch (a KTO baseline, ranks). Backends and
    loops call `prepare` with all packs, annotated, before the first is trained.
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
    """Tensors that lie in several processes, which write them into a checkpoint themselves, so that
    nobody gathers them. A backend on ranks puts them into its `State`; the checkpoint store calls
    `write`, and who keeps a state in memory `gather`.
    """

    def write(self, folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
        """Writes into the directory, `prefix` before every name.

        Returns what the manifest is to say of the files.
        """
        ...

    def gather(self) -> Mapping[str, Tensor]:
        """The whole tensors, by name."""
        ...

    def stage(self) -> TensorShards | None:
        """A copy as they are now, which a thread can write while training goes on; None: they can
        only be written at once.
        """
        ...


@dataclass(slots=True)
class State:
    """Everything of a backend or a part that a checkpoint must hold: flat tensors and plain JSON
    values. `Backend.state` and `Stateful.state` make it, the `Checkpointer` saves it and gives it
    back to `load`.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, TensorShards] = field(default_factory=dict)  # by the prefix of their names


class Stateful(Protocol):
    """Something else of a run that must survive a resume: a critic, a pass-rate store, a
    coefficient that adapts. The builders collect the parts of a run; the `Checkpointer` calls them.
    """

    def state(self) -> State: ...

    def load(self, state: State) -> None: ...


class SwappableWeights(Protocol):
    """Weights that a model can compute with for a while instead of its own: the moving average of a
    backend (`train.ema`).
    """

    def swapped(self) -> AbstractContextManager[None]:
        """Inside, the model computes with the average; afterwards with its own weights again."""
        ...


@runtime_checkable
class Backend(Protocol):
    """What trains one model: a policy, a critic or a reward model. `build/` makes it, the loops
    call it once per step: `annotate`, then `forward_backward` and `step` for each update, then
    `weights` for the engine.
    """

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

    @property
    def device(self) -> torch.device:
        """Where the model computes, or its part in this process."""
        ...

    @property
    def has_reference(self) -> bool:
        """Whether `annotate` can fill the stream `reference`."""
        ...

    @property
    def ema(self) -> SwappableWeights | None:
        """The average of the weights, where one is kept."""
        ...

    def forget_teachers(self) -> None:
        """Nobody will ask the teachers that it was made with any more: their memory is free."""
        ...

    def facts(self) -> ModelFacts:
        """For predictions of memory and time."""
        ...

    def parts(self) -> dict[str, Stateful]:
        """What must survive a resume beside the state: what follows the weights."""
        ...

    def annotate(self, batches: Sequence[Batch], needs: frozenset[str]) -> None:
        """Fills streams without gradient: old, reference, values (and the bootstrap of truncated
        samples), values_after, teacher, teacher_ids with teacher_logprobs, collision.
        """
        ...

    def forward_backward(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> StepMetrics:
        """Accumulates the gradient of a whole optimizer step."""
        ...

    def evaluate(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> StepMetrics:
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
