"""The live sequences as tensors, and one decode step for all of them, embedding to sampled token,
without asking the host.

Legend: B rows, W cache blocks per sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reinforge.core.arrays import floats, ints, to_device
from reinforge.core.engine import Completion, Sampling
from reinforge.core.sample import Stop
from reinforge.engines.native.blocks import CacheHolding
from reinforge.engines.native.sampler import draw, uniform
from reinforge.models.attention import HAS_TRITON, KVCache, PagedLayout
from reinforge.models.causal import CausalModel
from reinforge.models.fused_decode import FusedDecode
from reinforge.models.grammars import Matcher
from reinforge.models.head import LogitRule, exact_statistics, permitted

NEVER = -1  # pads lists of stop tokens: no token has this id
FREE = [1.0, 0.0, 0.0]  # top_p, top_k and min_p that drop nothing
GraphKey = tuple[int, int, int, bool, bool]
# new tokens, their log-probs, and why it ended there
Listener = Callable[[list[int], list[float], Stop | None], None]


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One sequence on its way from prompt to completion. The native engine makes one for each
    sample that it was asked for, and sets its future when it is done.
    """

    prompt: list[int]
    params: Sampling
    seed: int
    stops: frozenset[int]
    future: asyncio.Future[Completion]
    order: int  # of arrival: where the cache runs out, the youngest gives way
    # hears of tokens as they come; must be quick and must not raise
    listener: Listener | None = None
    matcher: Matcher | None = None  # where its answer stands, if that must match something
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    held: CacheHolding = field(default_factory=CacheHolding)
    ahead: int = 0  # steps launched for it whose tokens are not taken in yet

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in the cache while decoding: all but the newest."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def limit(self) -> int:
        """Tokens that it can have at most, those of the prompt included."""
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def left(self) -> int:
        """Tokens that it may still sample after all that was launched."""
        return self.params.max_new_tokens - len(self.tokens) - self.ahead

    def reach(self, steps: int) -> int:
        """Tokens that it has in the cache after so many more decode steps, at most."""
        return min(self.cached + self.ahead + steps, self.limit)


@dataclass(slots=True)
class DecodeBatch:
    """The sequences that are decoded now, as tensors, one row each. Every decode step advances it
    in place, and a row that is done stands still.

    The native engine makes it from sequences (`of`); afterwards it lives on the device, where rows
    enter and leave (`joined`, `select`, `retire`) and take more blocks (`extend`) while the host
    does not know their newest tokens yet.
    """

    newest: Tensor  # [B] the token to feed
    cached: Tensor  # [B] tokens already in the cache = position of the newest
    produced: Tensor  # [B] tokens sampled so far = index of the next draw
    limits: Tensor  # [B] tokens it may sample
    seeds: Tensor  # [B]
    temperatures: Tensor  # [B] float32
    stops: Tensor  # [B, S] token ids that end it
    done: Tensor  # [B] bool
    tables: Tensor  # [B, W]
    filters: Tensor | None  # [B, 3] float32: top_p, top_k, min_p, where any row wants them
    # [B, words] int32: a bit for every token that may come next, where any row is constrained
    allowed: Tensor | None
    longest: int  # the largest context that a row can have now, known on the host

    @classmethod
    def of(
        cls,
        sequences: list[LiveSequence],
        device: torch.device,
        *,
        size: int | None = None,
        width: int = 0,
        spare: int = 0,
    ) -> DecodeBatch:
        """`size` rows at least: those beyond the sequences are done and point at the
        block `spare`.
        """
        pad = max(0, (size or 0) - len(sequences))
        width = max([width, *(len(s.held.blocks) for s in sequences)])
        params = [s.params for s in sequences]
        most = max([1, *(len(s.stops) for s in sequences)])
        filters = None
        if any(p.filtered for p in params):
            wanted = [[p.top_p, p.top_k, p.min_p] for p in params] + [FREE] * pad
            filters = to_device(torch.tensor(wanted, dtype=torch.float32), device)

        def whole(values: list[Any], filler: Any = 0) -> Tensor:
            return to_device(ints(values + [filler] * pad), device)

        return cls(
            newest=whole([(s.tokens or s.prompt)[-1] for s in sequences]),
            cached=whole([s.cached for s in sequences]),
            produced=whole([len(s.tokens) for s in sequences]),
            limits=whole([p.max_new_tokens for p in params]),
            seeds=whole([s.seed for s in sequences]),
            temperatures=to_device(floats([p.temperature for p in params] + [1.0] * pad), device),
            stops=whole(
                [sorted(s.stops) + [NEVER] * (most - len(s.stops)) for s in sequences],
                [NEVER] * most,
            ),
            done=to_device(torch.tensor([False] * len(sequences) + [True] * pad), device),
            tables=to_device(_tables(sequences, width, pad, spare), device),
            filters=filters,
            allowed=_masks(sequences, pad, device),
            longest=max((s.cached for s in sequences), default=0) + 1,
        )

    @classmethod
    def joined(cls, parts: list[DecodeBatch], *, spare: int) -> DecodeBatch:
        """The rows of all parts, one after the other. What they may say next is not known here:
        `constrain` tells it.
        """
        width = max(part.tables.shape[1] for part in parts)
        most = max(part.stops.shape[1] for part in parts)
        filtered = any(part.filters is not None for part in parts)

        def filters(part: DecodeBatch) -> Tensor:
            free = to_device(floats(FREE), part.newest.device)
            return free.expand(len(part.newest), 3) if part.filters is None else part.filters

        def plain(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts])

        return cls(
            newest=plain("newest"),
            cached=plain("cached"),
            produced=plain("produced"),
            limits=plain("limits"),
            seeds=plain("seeds"),
            temperatures=plain("temperatures"),
            stops=torch.cat([_widened(part.stops, most, NEVER) for part in parts]),
            done=plain("done"),
            tables=torch.cat([_widened(part.tables, width, spare) for part in parts]),
            filters=torch.cat([filters(part) for part in parts]) if filtered else None,
            allowed=None,
            longest=max(part.longest for part in parts),
        )

    def select(self, rows: list[int]) -> DecodeBatch:
        """These rows, in this order."""
        index = to_device(ints(rows), self.newest.device)
        return self._each(lambda x: x.index_select(0, index))

    def clone(self) -> DecodeBatch:
        return self._each(Tensor.clone)

    def _each(self, change: Callable[[Tensor], Tensor]) -> DecodeBatch:
        changed: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, Tensor):
                changed[part.name] = change(value)
        return replace(self, **changed)

    def extend(self, entries: list[tuple[int, int, int]]) -> None:
        """Sequences took more blocks: (row, column, block) of each."""
        rows, columns, blocks = to_device(ints(entries), self.tables.device).unbind(1)
        self.tables.index_put_((rows, columns), blocks)

    def constrain(self, sequences: list[LiveSequence]) -> None:
        """What may come next in the rows of these sequences now: everything where none of them is
        constrained.
        """
        pad = len(self.newest) - len(sequences)
        self.allowed = _masks(sequences, pad, self.newest.device)

    def retire(self, rows: list[int], spare: int) -> None:
        """These are done and their blocks belong to others now: they stand still, and write only
        into the block `spare`.
        """
        index = to_device(ints(rows), self.done.device)
        self.done.index_fill_(0, index, True)
        self.cached.index_fill_(0, index, 0)
        self.tables.index_fill_(0, index, spare)

    @property
    def key(self) -> GraphKey:
        """What a captured graph is made for: rows, table width, stop tokens, whether rows are
        filtered, and whether they are constrained.
        """
        return (
            len(self.newest),
            self.tables.shape[1],
            self.stops.shape[1],
            self.filters is not None,
            self.allowed is not None,
        )

    def copy_(self, other: DecodeBatch) -> None:
        """The values of `other`, in the tensors of this one."""
        for part in fields(self):
            mine = getattr(self, part.name)
            if isinstance(mine, Tensor):
                mine.copy_(getattr(other, part.name))
        self.longest = other.longest

    def draw(self, model: CausalModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] and log-probs [B] from last hidden states [B, E]."""
        raw = model.project(hidden)
        logits = raw
        rule = model.rule
        if self.allowed is not None:
            logits = permitted(raw, rule, self.allowed)
            rule = LogitRule()
        if hidden.is_cuda and HAS_TRITON and self.filters is None:
            from reinforge.models import decode_kernels

            picked, logprobs = decode_kernels.draw(
                logits,
                self.temperatures,
                self.seeds,
                self.produced,
                scale=rule.scale,
                softcap=rule.softcap,
            )
        else:
            picked, logprobs = draw(
                rule.apply(logits.float()),
                self.temperatures,
                uniform(self.seeds, self.produced),
                None if self.filters is None else self.filters.unbind(1),
            )
        if model.exact:  # the training forward's own arithmetic
            heat = torch.where(self.temperatures == 0, 1.0, self.temperatures)
            logprobs = exact_statistics(raw, picked, heat, model.rule, allowed=self.allowed)[0]
        return picked, logprobs

    def step(
        self, model: CausalModel, cache: KVCache, fused: FusedDecode | None = None, parts: int = 1
    ) -> tuple[Tensor, Tensor]:
        """One token for every row: tokens [B], log-probs [B]. `fused`: the trunk with fewer
        kernels, where there is one. `parts`: programs that share the keys of a sequence.

        Rows advance in place; nothing is copied to the host.
        """
        tables = (
            self.tables
            if self.newest.is_cuda
            else self.tables[:, : -(-self.longest // cache.block_size)]
        )
        layout = PagedLayout(cache, tables, self.cached, parts)
        if fused is None:
            hidden = model.hidden(self.newest, self.cached, layout)
        else:
            hidden = fused.hidden(self.newest, layout)
        picked, logprobs = self.draw(model, hidden)
        self.advance(picked)
        return picked, logprobs

    def advance(self, picked: Tensor) -> None:
        """Takes in what was drawn for every row [B]: it is fed next, and may have ended the row."""
        self.longest += 1
        if picked.is_cuda and HAS_TRITON:
            from reinforge.models import decode_kernels

            decode_kernels.advance(
                picked,
                self.newest,
                self.cached,
                self.produced,
                self.limits,
                self.done,
                self.stops,
            )
            return
        live = ~self.done
        self.newest.copy_(torch.where(live, picked, self.newest))
        self.cached.add_(live)
        self.produced.add_(live)
        self.done.logical_or_(
            (picked[:, None] == self.stops).any(1) | (self.produced >= self.limits)
        )


def _widened(x: Tensor, width: int, filler: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[1]), value=filler)


def _masks(sequences: list[LiveSequence], pad: int, device: torch.device) -> Tensor | None:
    """[B + pad, words] int32: what may come next; everything in rows that are not constrained. None
    where none is.
    """
    words = next((len(s.matcher.allowed) for s in sequences if s.matcher is not None), None)
    if words is None:
        return None
    masks = torch.full((len(sequences) + pad, words), -1, dtype=torch.int32)
    for row, sequence in zip(masks.numpy(), sequences, strict=False):
        if sequence.matcher is not None:
            row[:] = sequence.matcher.allowed
    return to_device(masks, device)


def _tables(sequences: list[LiveSequence], width: int, pad: int, spare: int) -> Tensor:
    """[B + pad, W] block tables, filled up with `spare`."""
    tables = np.full((len(sequences) + pad, width), spare, dtype=np.int64)
    for row, sequence in zip(tables, sequences, strict=False):
        row[: len(sequence.held.blocks)] = sequence.held.blocks
    return torch.from_numpy(tables)
