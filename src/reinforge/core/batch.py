"""A `Batch` is samples packed end to end: [N] tokens, no padding.

Packing lives here because every floor above reads it. It is done in numpy: for some thousands of
numbers torch wakes threads, which on cores that others use takes several times as long.

The tokens lie in segments. Without sharing a segment is a sample; with it, the prompt of a group is
one segment that the answers of the group continue, so that it is computed once.

The trained tokens of a batch are handed to losses as flat [M] vectors (`TrainedTokens`): there is
no mask to forget, because nothing but trained tokens is there.

Legend: N tokens of the pack, M trained tokens, S samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from reinforge.core import routes
from reinforge.core.arrays import to_device
from reinforge.core.sample import Sample

# A stream: which domain the token's row is of, where every domain has a teacher of its own.
DOMAIN = "domain"
EMPTY = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class Batch:
    """Samples packed end to end, as one forward computes them. The loops make batches with `pack`;
    a backend annotates and trains them.
    """

    samples: list[Sample]
    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64: the place of a token in its sample
    starts: Tensor  # [segments + 1] int32: segment s is tokens[starts[s]:starts[s+1]]
    lengths: list[int]  # of each segment, on the host, so that nobody has to ask the device
    # which segment each segment continues, -1 = none; None: no segment continues another
    prefix: list[int] | None
    # [M] int64: where the trained tokens are in the pack, sample by sample; never a sample's first
    # token
    targets: Tensor
    # [M] int64: where the token before each of them is, whose hidden state predicts it
    sources: Tensor
    sequence: Tensor  # [M] int64: which sample of this pack a trained token belongs to
    # [S] int64: where the last token of each sample is; -1 where it was left out (nothing to train)
    ends: Tensor
    # [M] float32 each, aligned with `targets`
    streams: dict[str, Tensor] = field(default_factory=dict)
    # [S] float32: a critic's value after the last token of a truncated sample; 0 where it ended by
    # itself
    bootstrap: Tensor | None = None
    # [N, L, k]: the experts that the tokens went to when they were sampled (core/routes.py)
    routes: Tensor | None = None

    @classmethod
    def pack(cls, samples: Sequence[Sample], *, share: bool = False) -> Batch:
        """`share`: samples of one group with the same tokens before the first trained one share
        that prompt, and a sample with nothing to train takes no room. Hidden states are the same
        either way.
        """
        return cls._of([_Row.of(sample) for sample in samples], share)

    @classmethod
    def _of(cls, rows: Sequence[_Row], share: bool) -> Batch:
        segments = (
            _shared_segments(rows)
            if share
            else [_Segment(i, 0, row.size, -1) for i, row in enumerate(rows)]
        )
        lengths = [g.stop - g.start for g in segments]
        begins = [0, *itertools.accumulate(lengths)]
        targets: list[np.ndarray] = [EMPTY] * len(rows)
        sources: list[np.ndarray] = [EMPTY] * len(rows)
        ends = [-1] * len(rows)
        for i, g in enumerate(segments):
            if g.prompt_only:
                continue
            own = rows[g.row].trained + (begins[i] - g.start)
            before = own - 1
            if g.start and len(before):  # the last token of the prompt, wherever that is
                before[0] = begins[g.prefix + 1] - 1
            targets[g.row] = own
            sources[g.row] = before
            ends[g.row] = begins[i + 1] - 1
        samples = [row.sample for row in rows]
        names = samples[0].streams if samples else ()
        streams = {"behaviour": _trained(rows, [s.logprobs for s in samples])} if samples else {}
        streams |= {name: _trained(rows, [s.streams[name] for s in samples]) for name in names}
        return cls(
            samples=samples,
            tokens=_joined([rows[g.row].tokens[g.start : g.stop] for g in segments]),
            positions=_joined([np.arange(g.start, g.stop) for g in segments]),
            starts=torch.tensor(begins, dtype=torch.int32),
            lengths=lengths,
            prefix=[g.prefix for g in segments] if any(g.prefix >= 0 for g in segments) else None,
            targets=_joined(targets),
            sources=_joined(sources),
            sequence=torch.from_numpy(
                np.repeat(np.arange(len(rows)), [len(row.trained) for row in rows])
            ),
            ends=torch.tensor(ends, dtype=torch.int64),
            streams=streams,
            routes=routes.joined(
                [(samples[g.row].extras.get(routes.NAME), g.start, g.stop) for g in segments]
            ),
        )

    @property
    def n_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def n_trained(self) -> int:
        return int(self.targets.shape[0])

    def trained_lengths(self) -> Tensor:
        """[S] trained tokens of each sequence."""
        return torch.bincount(self.sequence, minlength=len(self.samples))

    def of(self, rows: Sequence[int]) -> Batch:
        """Some of the samples, packed as these are, on the same device, with the streams that the
        samples brought along.
        """
        chosen = [self.samples[i] for i in rows]
        return Batch.pack(chosen, share=_is_shared(self)).to(self.tokens.device)

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`; the samples stay where they are."""

        def move(tensor: Tensor) -> Tensor:
            return to_device(tensor, device)

        return Batch(
            self.samples,
            move(self.tokens),
            move(self.positions),
            move(self.starts),
            self.lengths,
            self.prefix,
            move(self.targets),
            move(self.sources),
            move(self.sequence),
            move(self.ends),
            {k: move(v) for k, v in self.streams.items()},
            None if self.bootstrap is None else move(self.bootstrap),
            None if self.routes is None else move(self.routes),
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample whose tensors packing has looked at: once, for each look takes microseconds."""

    sample: Sample
    tokens: np.ndarray  # [T] int64
    trained: np.ndarray  # int64: the places of its trained tokens
    prompt: int  # tokens before the first trained one; all of them where nothing is trained

    @classmethod
    def of(cls, sample: Sample) -> _Row:
        tokens = sample.tokens.numpy()
        trained = sample.trained.numpy().nonzero()[0]
        return cls(sample, tokens, trained, int(trained[0]) if len(trained) else len(tokens))

    @property
    def size(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A run of tokens in the pack: a whole sample, the prompt of a group, or an answer that
    continues one.
    """

    row: int  # whose tokens
    start: int
    stop: int
    prefix: int  # the segment it continues, or -1
    prompt_only: bool = False


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    """[n] int64."""
    return torch.from_numpy(np.concatenate([EMPTY, *parts]))


def _trained(rows: Sequence[_Row], streams: Sequence[Tensor]) -> Tensor:
    """Of the streams of all rows the part at their trained tokens."""
    parts = [stream.numpy()[row.trained] for row, stream in zip(rows, streams, strict=True)]
    return torch.from_numpy(np.concatenate(parts))


def _shared_segments(rows: Sequence[_Row]) -> list[_Segment]:
    """Shared prompts first, then what continues them and what stands alone, longest first."""
    groups: dict[tuple[str, bytes], list[int]] = {}
    for i, row in enumerate(rows):
        if len(row.trained):
            groups.setdefault((row.sample.group, row.tokens[: row.prompt].tobytes()), []).append(i)
    prompts: list[_Segment] = []
    rest: list[_Segment] = []
    for members in groups.values():
        cut = rows[members[0]].prompt if len(members) > 1 else 0
        if cut:
            prompts.append(_Segment(members[0], 0, cut, -1, prompt_only=True))
        rest += [_Segment(i, cut, rows[i].size, len(prompts) - 1 if cut else -1) for i in members]
    return prompts + sorted(rest, key=lambda g: g.start - g.stop)


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole optimizer batch (all micro-batches, all ranks), taken before anything
    is cut.

    A loss divides by these and never by what happens to be in its micro-batch, so the gradient is
    the same for any micro-batch size, packing order, accumulation count or number of ranks.
    """

    tokens: int  # trained tokens
    sequences: int  # episodes with at least one trained token
    max_length: int  # the configured limit of response tokens (fixed_length reduction)
    episode_tokens: dict[str, int]  # trained tokens of each episode, whichever rows they are in
    samples: int = 0  # rows, trained or not: where rows are pairs, twice the number of pairs
    # trained tokens of every pack's even rows: where rows are pairs, those of the chosen sides
    chosen_tokens: int = 0
    # of `tokens`: those of rows that are not computed because they have no gradient; metrics are
    # means over the others
    left_out: int = 0
    traced: int = 0  # slots of samples that people want to look at: core/trace.py
    # trained tokens that are computed of each domain, where rows have one
    domain_tokens: Mapping[int, int] = field(default_factory=dict)

    @property
    def seen(self) -> int:
        return max(1, self.tokens - self.left_out)

    @classmethod
    def of(cls, batches: Iterable[Batch], max_length: int = 0) -> Totals:
        batches = list(batches)
        per_episode: dict[str, int] = {}
        samples = 0
        chosen = 0
        for batch in batches:
            lengths = batch.trained_lengths().tolist()
            samples = samples + len(lengths)
            chosen = chosen + sum(lengths[::2])
            for sample, n in zip(batch.samples, lengths, strict=True):
                if n:
                    per_episode[sample.episode] = per_episode.get(sample.episode, 0) + n
        limit = max_length or max(per_episode.values(), default=1)
        return cls(
            sum(per_episode.values()),
            len(per_episode),
            limit,
            per_episode,
            samples,
            chosen,
            domain_tokens=domain_tokens(batches),
        )


def domain_tokens(batches: Iterable[Batch]) -> dict[int, int]:
    """Trained tokens of each domain; none where rows have no domain."""
    found: dict[int, int] = {}
    for batch in batches:
        if DOMAIN in batch.streams:
            for domain, n in enumerate(torch.bincount(batch.streams[DOMAIN].long()).tolist()):
                if n:
                    found[domain] = found.get(domain, 0) + n
    return found


def pack(
    samples: Sequence[Sample], budget: int, *, unit: int = 1, share: bool = False
) -> list[Batch]:
    """Cuts samples into packs of at most `budget` tokens.

    `unit` neighbours (a preference pair) are never separated.

    Longest first, so that a pack holds rows of like length (attention over it wastes little) and
    the biggest pack comes first (memory peaks at once or never). The order is a function of the
    samples alone. A row longer than the budget gets a pack of its own. With `share`, units of one
    group stay together as far as the budget allows: see `Batch.pack`.
    """
    if len(samples) % unit:
        raise ValueError(f"{len(samples)} samples do not divide into units of {unit}")
    rows = [_Row.of(sample) for sample in samples]
    units = [rows[i : i + unit] for i in range(0, len(rows), unit)]
    clusters: dict[str, list[list[_Row]]] = {}
    for i, u in enumerate(units):
        clusters.setdefault(u[0].sample.group if share else str(i), []).append(u)
    packs: list[list[_Row]] = []
    room = 0
    for cluster in sorted(clusters.values(), key=lambda c: -sum(row.size for u in c for row in u)):
        for i, u in enumerate(sorted(cluster, key=lambda u: -sum(row.size for row in u))):
            size = _size(u, share, i > 0)
            if not packs or size > max(room, 0):  # what takes no room never gets a pack of its own
                packs.append([])
                room = budget
                size = _size(u, share, False)
            packs[-1].extend(u)
            room -= size
    return [Batch._of(p, share) for p in packs]


def _size(unit: Sequence[_Row], share: bool, joins: bool) -> int:
    """Tokens that a unit adds to a pack.

    With `share` rows without trained tokens take none, and a unit that `joins` its group finds the
    prompt there. (Where prompts differ inside a group the pack gets a little larger than the
    budget, which is no harm.)
    """
    if not share:
        return sum(row.size for row in unit)
    real = [row for row in unit if len(row.trained)]
    return sum(row.size - (row.prompt if joins or i else 0) for i, row in enumerate(real))


def unit_sizes(batch: Batch, unit: int = 1) -> list[int]:
    """Tokens of each unit of a batch if it stood alone; those that take no room are left out."""
    share = _is_shared(batch)
    rows = [_Row.of(sample) for sample in batch.samples]
    sizes = [_size(rows[i : i + unit], share, False) for i in range(0, len(rows), unit)]
    return [n for n in sizes if n]


def _is_shared(batch: Batch) -> bool:
    return batch.prefix is not None or bool((batch.ends < 0).any())


def cut(batch: Batch, budget: int, *, unit: int = 1) -> list[Batch]:
    """The same samples in the same order as packs of at most `budget` tokens, each with its part of
    every stream. `unit` neighbours stay together; a unit longer than the budget gets a pack of its
    own. `rejoin` is the way back.
    """
    assert len(batch.samples) % unit == 0, (
        f"{len(batch.samples)} samples do not divide into units of {unit}"
    )
    share = _is_shared(batch)
    rows = [_Row.of(sample) for sample in batch.samples]
    edges = [0]
    room = budget
    for i in range(0, len(rows), unit):
        members = rows[i : i + unit]
        group = members[0].sample.group
        joins = share and any(s.group == group for s in batch.samples[edges[-1] : i])
        size = _size(members, share, joins)
        if i > edges[-1] and size > max(room, 0):
            edges.append(i)
            room = budget
            size = _size(members, share, False)
        room -= size
    edges.append(len(batch.samples))
    ends = [0, *batch.trained_lengths().cumsum(0).tolist()]
    parts = []
    for a, b in itertools.pairwise(edges):
        part = Batch._of(rows[a:b], share)
        part.streams = {name: stream[ends[a] : ends[b]] for name, stream in batch.streams.items()}
        part.bootstrap = None if batch.bootstrap is None else batch.bootstrap[a:b]
        parts.append(part)
    return parts


def rejoin(batch: Batch, parts: Sequence[Batch]) -> None:
    """Gives the batch what was found out about the parts that it was `cut` into; a part that is the
    batch itself has it already.
    """
    if parts[0] is batch:
        return
    batch.streams = {
        name: torch.cat([part.streams[name] for part in parts]) for name in parts[0].streams
    }
    found = [part.bootstrap for part in parts if part.bootstrap is not None]
    batch.bootstrap = torch.cat(found) if found else None
