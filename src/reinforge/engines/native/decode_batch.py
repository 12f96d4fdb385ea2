"""The live sequences as tensors, and one decode step for all of them, embedding to sampled token,
without asking the host.

A step verifies k drafts of every row beside its next token (k = 0: none): each row is k + 1 rows of
the forward, which feed its newest token and its drafts at the places where they would stand. What a
row would draw without drafts it draws with them, for the random number of a token depends on its
place alone; it takes what it drew as long as the drafts before were the same.

Legend: B rows, W cache blocks per sequence, k drafts, M tokens in which drafts are looked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from reinforge.core.arrays import floats, ints, to_device
from reinforge.core.engine import Completion, NewTokens, SampledArrays, Sampling
from reinforge.engines.native.blocks import CacheHolding
from reinforge.engines.native.drafts import NOTHING, AnswerMemory, Kin, look_up, padded, room_for
from reinforge.engines.native.sampler import draw, uniform
from reinforge.models.attention import HAS_TRITON, KVCache, PagedLayout
from reinforge.models.causal import CausalModel
from reinforge.models.fused_decode import FusedDecode
from reinforge.models.grammars import Matcher
from reinforge.models.head import LogitRule, exact_statistics, permitted
from reinforge.models.state import RowStates, StateStore

NEVER = -1  # pads lists of stop tokens: no token has this id
FREE = [1.0, 0.0, 0.0]  # top_p, top_k and min_p that drop nothing
GraphKey = tuple[int, int, int, bool, bool, int, int, int]
Listener = Callable[[NewTokens], None]


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
    kin: Kin  # in whose answers its drafts are looked for
    # hears of tokens as they come; must be quick and must not raise
    listener: Listener | None = None
    matcher: Matcher | None = None  # where its answer stands, if that must match something
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    # tokens and log-probs as they come, of an answer that may be long
    sampled: SampledArrays | None = None
    held: CacheHolding = field(default_factory=CacheHolding)
    ahead: int = 0  # tokens that come from what was launched and not taken in yet, at most

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
        """Tokens that it may still sample after all that was launched, at least."""
        return self.params.max_new_tokens - len(self.tokens) - self.ahead

    def reach(self, tokens: int) -> int:
        """Tokens that it has in the cache after so many more, at most."""
        return min(self.cached + self.ahead + tokens, self.limit)


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
    slots: Tensor  # [B] of state; 0: none, or nobody's
    filters: Tensor | None  # [B, 3] float32: top_p, top_k, min_p, where any row wants them
    # [B, words] int32: a bit for every token that may come next, where any row is constrained
    allowed: Tensor | None
    longest: int  # the largest context that a row can have now, known on the host
    drafts: int = 0  # k
    # [B, M] where drafts are looked for: `room` tokens of other answers, then prompt and own tokens
    seen: Tensor | None = None
    room: int = 0
    verified: Tensor | None = None  # [B] steps with drafts so far

    @classmethod
    def of(
        cls,
        sequences: list[LiveSequence],
        device: torch.device,
        *,
        size: int | None = None,
        width: int = 0,
        spare: int = 0,
    ) -> Self:
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
            slots=whole([s.held.slot for s in sequences]),
            filters=filters,
            allowed=_masks(sequences, pad, device),
            longest=max((s.cached for s in sequences), default=0) + 1,
        )

    @classmethod
    def joined(cls, parts: list[DecodeBatch], *, spare: int) -> DecodeBatch:
        """The rows of all parts, one after the other. What they may say next, and what is looked
        through for drafts, is not known here: `constrain` and `speculate` tell it.
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
            slots=plain("slots"),
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

    def speculate(
        self, sequences: list[LiveSequence], count: int, memory: AnswerMemory, *, width: int
    ) -> None:
        """From now on every step verifies so many drafts. The host must know all tokens of these
        sequences; `width`: the most tokens that any of them can have, prompts included.
        """
        fillers = len(self.newest) - len(sequences)
        device = self.newest.device
        self.drafts = count
        self.room = room_for(max(s.params.max_new_tokens for s in sequences))
        lines = [[*s.prompt, *s.tokens] for s in sequences] + [[0]] * fillers
        own = padded(lines, 1 << (width + count).bit_length())
        others = padded([[]] * len(lines), self.room)
        self.seen = to_device(torch.cat([others, own], 1), device)
        self.verified = torch.zeros_like(self.newest)
        self.refer(list(enumerate(sequences)), memory)

    def refer(self, rows: list[tuple[int, LiveSequence]], memory: AnswerMemory) -> None:
        """Drafts of these rows are looked for in what is remembered of their kin now."""
        assert self.seen is not None
        lines = padded([memory.line(s.kin, self.room) for _, s in rows], self.room)
        index = to_device(ints([row for row, _ in rows]), self.seen.device)
        self.seen[:, : self.room].index_copy_(0, index, to_device(lines, self.seen.device))

    def plain(self) -> None:
        """No drafts any more."""
        self.drafts = 0
        self.room = 0
        self.seen = None
        self.verified = None

    def retire(self, rows: list[int], spare: int) -> None:
        """These are done and their blocks belong to others now: they stand still, and write only
        into the block `spare`, and into the slot of state that is nobody's.
        """
        index = to_device(ints(rows), self.done.device)
        self.done.index_fill_(0, index, True)
        self.cached.index_fill_(0, index, 0)
        self.tables.index_fill_(0, index, spare)
        self.slots.index_fill_(0, index, 0)

    @property
    def key(self) -> GraphKey:
        """What a captured graph is made for: rows, table width, stop tokens, whether rows are
        filtered, whether they are constrained, drafts and the sizes of what is looked through.
        """
        return (
            len(self.newest),
            self.tables.shape[1],
            self.stops.shape[1],
            self.filters is not None,
            self.allowed is not None,
            self.drafts,
            self.room,
            0 if self.seen is None else self.seen.shape[1],
        )

    def copy_(self, other: DecodeBatch) -> None:
        """The values of `other`, in the tensors of this one."""
        for part in fields(self):
            mine, theirs = getattr(self, part.name), getattr(other, part.name)
            if isinstance(mine, Tensor) and mine is not theirs:
                mine.copy_(theirs)
        self.longest = other.longest

    def move_into(self, other: DecodeBatch) -> None:
        """From now on in the tensors of `other`, whatever they hold. Rows that stay in a graph's
        tensors need not be copied for its next replay.
        """
        for part in fields(self):
            theirs = getattr(other, part.name)
            if isinstance(theirs, Tensor):
                setattr(self, part.name, theirs)
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
            from reinforge.models.kernels import draw as kernels

            picked, logprobs = kernels.draw(
                logits,
                self.temperatures,
                self.seeds,
                self.produced,
                scale=rule.scale,
                softcap=rule.softcap,
                exact=model.exact,
            )
            return picked, logprobs
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
        self,
        model: CausalModel,
        cache: KVCache,
        fused: FusedDecode | None = None,
        parts: int = 1,
        states: StateStore | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The next token of every row and what came of its drafts: tokens [B, k+1], log-probs
        [B, k+1]. `produced` tells how many of them are real. `fused`: the trunk with fewer kernels,
        where there is one. `parts`: programs that share the keys of a sequence. `states`: of a
        model that keeps state; it has no drafts, for a state cannot go back.

        Rows advance in place; nothing is copied to the host.
        """
        drafts = None
        rows = self
        if self.seen is not None:
            drafts = look_up(self.seen, self.room + self.cached, self.drafts)
            rows = self._with_drafts(drafts, cache.keys[0].shape[0] - 1)
        tables = (
            rows.tables
            if self.newest.is_cuda
            else rows.tables[:, : -(-(self.longest + self.drafts) // cache.block_size)]
        )
        layout = PagedLayout(cache, tables, rows.cached, parts, shared=drafts is not None)
        if fused is None:
            kept = None if states is None else RowStates(states, rows.slots)
            hidden = model.hidden(rows.newest, rows.cached, layout, kept)
        else:
            hidden = fused.hidden(rows.newest, layout)
        if cache.routes is not None:
            cache.routes.keep(layout.slots)
        picked, logprobs = rows.draw(model, hidden)
        shape = (len(self.newest), self.drafts + 1)
        picked = picked.view(shape)
        self.advance(picked, drafts)
        return picked, logprobs.view(shape)

    def _with_drafts(self, drafts: Tensor, spare: int) -> DecodeBatch:
        """[B·(k+1)] rows: the newest token of each row and its drafts [B, k], each at its place.

        Those that cannot be taken (there is no draft, the row may not sample so many tokens) stand
        at the beginning of the block `spare`.
        """
        fed = torch.cat([self.newest[:, None], drafts], 1)
        place = torch.arange(fed.shape[1], device=fed.device)
        idle = (fed == NOTHING) | (place >= (self.limits - self.produced)[:, None])
        idle = idle.reshape(-1)

        def at(first: Tensor) -> Tensor:
            return (first[:, None] + place).reshape(-1)

        own = replace(self, drafts=0, seen=None, room=0, verified=None)
        wide = own._each(lambda x: x.repeat_interleave(fed.shape[1], 0))
        wide.newest = fed.reshape(-1).clamp(min=0)
        wide.cached = at(self.cached).masked_fill(idle, 0)
        wide.produced = at(self.produced)
        wide.tables = wide.tables.masked_fill(idle[:, None], spare)
        return wide

    def advance(self, picked: Tensor, drafts: Tensor | None = None) -> None:
        """Takes in what was drawn for every row [B, k+1]: as much of it as the drafts [B, k] agree
        with, up to a stop token or the limit. The last one is fed next, and may have ended the row.
        """
        self.longest += self.drafts + 1
        if drafts is None and picked.is_cuda and HAS_TRITON:
            from reinforge.models.kernels import draw as kernels

            kernels.advance(
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
        place = torch.arange(picked.shape[1], device=picked.device)
        stopped = (picked[:, :, None] == self.stops[:, None]).any(2)
        wrong = stopped[:, :-1]
        if drafts is not None:
            wrong = wrong | (picked[:, :-1] != drafts)
        taken = (_before(wrong) == 0) & (place < (self.limits - self.produced)[:, None])
        count = taken.sum(1) * live
        self.done.logical_or_((stopped & taken).any(1))
        last = picked.gather(1, (count - 1).clamp_(min=0)[:, None])[:, 0]
        self.newest.copy_(torch.where(live, last, self.newest))
        if self.seen is not None and self.verified is not None:
            after = (self.room + self.cached + 1)[:, None] + place
            own = torch.where(taken & live[:, None], picked, NOTHING)
            self.seen.scatter_(1, after, own)
            self.verified.add_(live)
        self.cached.add_(count)
        self.produced.add_(count)
        self.done.logical_or_(self.produced >= self.limits)


def _before(wrong: Tensor) -> Tensor:
    """[B, k+1]: how many of `wrong` [B, k] there are before each place."""
    return torch.nn.functional.pad(wrong.long(), (1, 0)).cumsum(1)


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
