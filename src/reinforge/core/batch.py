"""A `Batch` is samples packed end to end: [N] tokens, no padding. Packing lives here because every floor above reads it.

The trained tokens of a batch are handed to losses as flat [M] vectors (`Batch.view`): there is no mask to forget,
because nothing but trained tokens is there.

Legend: N tokens of the pack, M trained tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reinforge.core.sample import Sample


@dataclass(slots=True)
class Batch:
    samples: list[Sample]
    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, restart at 0 in each sequence
    starts: Tensor  # [S+1] int32: sequence s is tokens[starts[s]:starts[s+1]]
    lengths: list[int]  # [S] on the host, so that nobody has to ask the device
    targets: Tensor  # [M] int64: where the trained tokens are in the pack; never a sequence's first token
    sequence: Tensor  # [M] int64: which sequence of this pack a trained token belongs to
    streams: dict[str, Tensor] = field(default_factory=dict)  # [M] float32 each, aligned with `targets`

    @classmethod
    def pack(cls, samples: Sequence[Sample]) -> Batch:
        lengths = [len(s.tokens) for s in samples]
        starts = torch.zeros(len(samples) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        trained = torch.cat([s.trained for s in samples]) if samples else torch.zeros(0, dtype=torch.bool)
        targets = trained.nonzero()[:, 0]
        owner = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths, dtype=torch.int64))
        streams = {"behaviour": torch.cat([s.logprobs for s in samples])[targets]} if samples else {}
        for name in samples[0].streams if samples else ():
            streams[name] = torch.cat([s.streams[name] for s in samples])[targets]
        return cls(
            samples=list(samples),
            tokens=torch.cat([s.tokens for s in samples]) if samples else torch.zeros(0, dtype=torch.int64),
            positions=torch.cat([torch.arange(n) for n in lengths]) if samples else torch.zeros(0, dtype=torch.int64),
            starts=starts, lengths=lengths, targets=targets, sequence=owner[targets], streams=streams,
        )  # fmt: skip

    @property
    def n_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def n_trained(self) -> int:
        return int(self.targets.shape[0])

    def trained_lengths(self) -> Tensor:
        """[S] trained tokens of each sequence."""
        return torch.bincount(self.sequence, minlength=len(self.samples))

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`; the samples stay where they are."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return Batch(self.samples, move(self.tokens), move(self.positions), move(self.starts), self.lengths,
                     move(self.targets), move(self.sequence), {k: move(v) for k, v in self.streams.items()})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole optimizer batch (all micro-batches, all ranks), taken before anything is cut.

    A loss divides by these and never by what happens to be in its micro-batch, so the gradient is the same for any
    micro-batch size, packing order, accumulation count or number of ranks.
    """

    tokens: int  # trained tokens
    sequences: int  # episodes with at least one trained token
    max_length: int  # the configured limit of response tokens (fixed_length reduction)
    episode_tokens: dict[str, int]  # trained tokens of each episode, whichever rows they are in

    @classmethod
    def of(cls, batches: Iterable[Batch], max_length: int = 0) -> Totals:
        per_episode: dict[str, int] = {}
        for batch in batches:
            for sample, n in zip(batch.samples, batch.trained_lengths().tolist(), strict=True):
                if n:
                    per_episode[sample.episode] = per_episode.get(sample.episode, 0) + n
        return cls(sum(per_episode.values()), len(per_episode), max_length or max(per_episode.values(), default=1), per_episode)


def pack(samples: Sequence[Sample], budget: int, *, unit: int = 1) -> list[Batch]:
    """Cuts samples into packs of at most `budget` tokens. `unit` neighbours (a preference pair) are never separated.

    Longest first, so that a pack holds rows of like length (attention over it wastes little) and the biggest pack comes
    first (memory peaks at once or never). The order is a function of the samples alone. A row longer than the budget
    gets a pack of its own.
    """
    if len(samples) % unit:
        raise ValueError(f"{len(samples)} samples do not divide into units of {unit}")
    units = [list(samples[i : i + unit]) for i in range(0, len(samples), unit)]
    sizes = [sum(len(s.tokens) for s in u) for u in units]
    order = sorted(range(len(units)), key=lambda i: -sizes[i])
    packs: list[list[Sample]] = []
    room = 0
    for i in order:
        if not packs or sizes[i] > room:
            packs.append([])
            room = budget
        packs[-1].extend(units[i])
        room -= sizes[i]
    return [Batch.pack(p) for p in packs]
