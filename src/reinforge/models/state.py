"""State beside keys and values: what convolutions and recurrences remember of a sequence.

A layer that is no attention (a short convolution, a gated delta net, a Mamba) reads a sequence from
left to right and keeps a state of fixed size: the last inputs of a convolution, the matrix of a
recurrence. Its segments may lie end to end with others, may continue one another and may be cut
into pieces, so in every forward somebody must know with which state a segment begins and where the
state at its end goes. That is a `StateFlow`: `PackedStates` in training, `PieceStates` where
prompts enter the engine's `StateStore`, `RowStates` where every sequence gets one more token.

`models.mixers` lets the layers of transformers ask for it.

Legend: N tokens of a forward, S segments, L their padded length, C channels, K taps of a
convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforge.core.arrays import ints, to_device
from reinforge.models.attention import tile_runs
from reinforge.models.convolution import SILU, TapRows, activated, has_kernel, tap_by_tap
from reinforge.models.exact import RowWiseMode
from reinforge.models.segment_table import SegmentTable

StateKey = tuple[int, int, int]  # the layer, the mixer in it, and which of its states
StateShape = tuple[tuple[int, ...], torch.dtype]  # of one sequence


class Recurrence(Protocol):
    """How a state goes from token to token. `models.recurrences` has them."""

    def __call__(
        self, parts: Sequence[Tensor], real: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Of parts [S, L, ...] the outputs [S, L, ...] and the states [S, ...] at the end. `real`
        [S, L]: which places are tokens, those of a segment first; None: all. `state`: at the
        beginning; None: nothing was there.
        """
        ...

    def in_pack(
        self, parts: Sequence[Tensor], table: Callable[[], SegmentTable]
    ) -> tuple[Tensor, StateShape] | None:
        """Of parts [N, ...] of segments that lie end to end the outputs [N, ...], and what one
        state is. None: there is no kernel for it.
        """
        ...

    def in_place(self, parts: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor | None:
        """Of parts [N, ...], a token for each of the slots [N], the outputs [N, ...]; the states
        [slots, ...] move on. None: there is no kernel for it.
        """
        ...


class StateFlow(Protocol):
    """Where the state of each segment of a forward comes from, and where it goes."""

    def convolve(
        self,
        key: StateKey,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None = None,
    ) -> Tensor:
        """The causal convolution of each channel, and the activation behind it by the name that
        transformers has for it: x [N, C], weight [C, K] -> [N, C].
        """
        ...

    def scan(self, key: StateKey, rule: Recurrence, parts: Sequence[Tensor]) -> Tensor:
        """Parts [N, ...] -> [N, ...]."""
        ...


@dataclass(slots=True)
class _SegmentTile:
    """Segments of like length, padded on the right."""

    segments: list[int]
    index: Tensor  # [S * L] where its places come from
    real: Tensor | None  # [S, L]; None: no place is a pad
    rows: Tensor | None  # [n] which places are tokens

    def run(
        self, rule: Recurrence, parts: Sequence[Tensor], state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        count = len(self.segments)
        padded = [
            x.index_select(0, self.index).view(count, -1, *x.shape[1:])  # [S, L, ...]
            for x in parts
        ]
        out, final = rule(padded, self.real, state)
        flat = out.reshape(-1, *out.shape[2:])
        return flat if self.rows is None else flat.index_select(0, self.rows), final


@dataclass(slots=True)
class _Wave:
    """Segments that can be computed at once, in tiles."""

    tiles: list[_SegmentTile]
    segments: list[int]  # in the order in which their states come out

    @classmethod
    def of(cls, chosen: list[int], lengths: list[int], device: torch.device) -> _Wave:
        begins = [0]
        for n in lengths:
            begins.append(begins[-1] + n)
        sizes = [lengths[i] for i in chosen]
        tiles = []
        for a, b in tile_runs(sizes, sizes):
            index, real = _padded_rows(sizes[a:b], [begins[i] for i in chosen[a:b]])
            whole = bool(real.all())
            tiles.append(
                _SegmentTile(
                    chosen[a:b],
                    to_device(index, device),
                    None if whole else to_device(real.view(b - a, -1), device),
                    None if whole else to_device(real.nonzero()[:, 0], device),
                )
            )
        return cls(tiles, chosen)

    def run(
        self, rule: Recurrence, parts: Sequence[Tensor], states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs of its tokens and states of its segments, in its own order."""
        outs = []
        finals = []
        at = 0
        for tile in self.tiles:
            end = at + len(tile.segments)
            out, final = tile.run(rule, parts, None if states is None else states[at:end])
            outs.append(out)
            finals.append(final)
            at = end
        return torch.cat(outs), torch.cat(finals)


def _padded_rows(lengths: list[int], begins: list[int]) -> tuple[Tensor, Tensor]:
    """Where each place of a right-padded tile comes from, and which places are tokens, both
    [S * L]; pads repeat the last token.
    """
    size = ints(lengths)[:, None]
    within = torch.arange(max(lengths))[None]
    index = ints(begins)[:, None] + torch.minimum(within, size - 1)
    return index.reshape(-1), (within < size).reshape(-1)


@dataclass(slots=True)
class PackedStates:
    """The states of a pack: every segment begins with nothing, or with the state at the end of the
    segment that it continues. Gradients of answers flow into the prompt that they share.
    """

    lengths: list[int]
    device: torch.device
    prefix: list[int] | None = None  # which segment each one continues, -1 = none
    # of one sequence, as they were seen
    shapes: dict[StateKey, StateShape] = field(default_factory=dict)
    _taps: dict[int, TapRows] = field(default_factory=dict)
    _waves: list[_Wave] = field(default_factory=list)
    _parents: Tensor | None = None  # [S2] of the second wave: which of the first wave it continues
    _order: Tensor | None = None  # [N] of what the waves gave; None: as it lies
    _table: SegmentTable | None = None  # the segments as kernels read them

    def convolve(
        self,
        key: StateKey,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None = None,
    ) -> Tensor:
        taps = weight.shape[1]
        self.shapes[key] = ((taps - 1, x.shape[1]), x.dtype)
        if taps not in self._taps:
            before = self._inputs_before(taps - 1)
            self._taps[taps] = TapRows.of(self.lengths, before, sum(self.lengths), self.device)
        return self._taps[taps].convolve(x, weight, bias, activation)

    def _inputs_before(self, count: int) -> list[list[int]]:
        nothing = sum(self.lengths)
        prefix = self.prefix or [-1] * len(self.lengths)
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        before = []
        for parent in prefix:
            rows = list(range(ends[parent] - self.lengths[parent], ends[parent]))
            known = rows[-count:] if parent >= 0 and count else []
            before.append([nothing] * (count - len(known)) + known)
        return before

    def table(self) -> SegmentTable:
        if self._table is None:
            self._table = SegmentTable.of_pack(self.lengths, self.prefix, self.device)
        return self._table

    def scan(self, key: StateKey, rule: Recurrence, parts: Sequence[Tensor]) -> Tensor:
        done = rule.in_pack(parts, self.table)
        if done is not None:
            out, self.shapes[key] = done
            return out
        if not self._waves:
            self._plan()
        out, final = self._waves[0].run(rule, parts, None)
        self.shapes[key] = (tuple(final.shape[1:]), final.dtype)
        if self._parents is not None:
            begun = final.index_select(0, self._parents)
            out = torch.cat([out, self._waves[1].run(rule, parts, begun)[0]])
        return out if self._order is None else out.index_select(0, self._order)

    def _plan(self) -> None:
        prefix = self.prefix or [-1] * len(self.lengths)
        roots = [i for i, parent in enumerate(prefix) if parent < 0]
        children = [i for i, parent in enumerate(prefix) if parent >= 0]
        self._waves = [_Wave.of(roots, self.lengths, self.device)]
        if not children:
            return
        self._waves.append(_Wave.of(children, self.lengths, self.device))
        self._parents = to_device(ints([roots.index(prefix[i]) for i in children]), self.device)
        rows = torch.arange(sum(self.lengths)).split(self.lengths)
        lie = torch.cat([rows[i] for i in [*roots, *children]])
        self._order = to_device(torch.argsort(lie), self.device)


class StateStore:
    """The states of the engine's sequences: [slots, ...] of each kind. Slot 0 is nobody's: rows
    that only fill a batch write there.
    """

    def __init__(self, shapes: dict[StateKey, StateShape], slots: int, device: torch.device):
        self.parts = {
            key: torch.zeros(slots + 1, *shape, dtype=dtype, device=device)
            for key, (shape, dtype) in shapes.items()
        }

    @staticmethod
    def slot_bytes(shapes: dict[StateKey, StateShape]) -> int:
        """What one sequence takes."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())

    @property
    def tensors(self) -> list[Tensor]:
        return list(self.parts.values())

    def copy(self, source: Tensor, target: Tensor) -> None:
        """From slots to slots."""
        for part in self.tensors:
            part.index_copy_(0, target, part.index_select(0, source))


@dataclass(slots=True)
class PieceStates:
    """Pieces of prompts on their way into the engine: each begins with what its slot holds, or with
    nothing if it is the first of its prompt, and leaves its state there.
    """

    lengths: list[int]
    store: StateStore
    slots: Tensor  # [S]
    begun: Tensor  # [S] bool: whether a piece before it was computed
    # and which rows are the last inputs of each segment
    _taps: dict[int, tuple[TapRows, Tensor]] = field(default_factory=dict)
    _wave: _Wave | None = None

    def _held(self, key: StateKey) -> Tensor:
        held = self.store.parts[key].index_select(0, self.slots)
        begun = self.begun.view(-1, *[1] * (held.ndim - 1))
        return torch.where(begun, held, torch.zeros_like(held))

    def convolve(
        self,
        key: StateKey,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None = None,
    ) -> Tensor:
        taps = weight.shape[1]
        if taps not in self._taps:
            self._taps[taps] = self._tap_rows(taps - 1)
        table, tail = self._taps[taps]
        rows = torch.cat([x, self._held(key).flatten(0, 1).to(x.dtype)])
        part = self.store.parts[key]
        kept = rows.index_select(0, tail).view(len(self.lengths), *part.shape[1:])
        part.index_copy_(0, self.slots, kept.to(part.dtype))
        return table.convolve(rows, weight, bias, activation)

    def _tap_rows(self, count: int) -> tuple[TapRows, Tensor]:
        first = sum(self.lengths)
        segments = len(self.lengths)
        before = [list(range(first + i * count, first + (i + 1) * count)) for i in range(segments)]
        table = TapRows.of(self.lengths, before, first + segments * count, self.slots.device)
        ends = table.outputs[torch.tensor(self.lengths).cumsum(0) - 1] + count
        tail = table.line[(ends[:, None] - torch.arange(count - 1, -1, -1)).reshape(-1)]
        return table, to_device(tail, self.slots.device)

    def scan(self, key: StateKey, rule: Recurrence, parts: Sequence[Tensor]) -> Tensor:
        if self._wave is None:
            everyone = list(range(len(self.lengths)))
            self._wave = _Wave.of(everyone, self.lengths, self.slots.device)
        part = self.store.parts[key]
        out, final = self._wave.run(rule, parts, self._held(key))
        part.index_copy_(0, self.slots, final.to(part.dtype))
        return out


@dataclass(slots=True)
class RowStates:
    """One more token for each of N sequences: their slots are read and written in place, without
    asking the host.
    """

    store: StateStore
    slots: Tensor  # [N]

    def convolve(
        self,
        key: StateKey,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None = None,
    ) -> Tensor:
        part = self.store.parts[key]
        if has_kernel(x, weight):
            from reinforge.models.kernels import state as kernels

            silu = activation in SILU
            out = kernels.convolve(x, part, self.slots, weight, bias, silu)
            return out if silu else activated(out, activation)
        inputs = torch.cat([part.index_select(0, self.slots).to(x.dtype), x[:, None]], 1)
        part.index_copy_(0, self.slots, inputs[:, 1:].to(part.dtype))
        if RowWiseMode.active():
            return activated(tap_by_tap(inputs, weight, bias), activation)
        line = inputs.transpose(1, 2).to(weight.dtype)  # [N, C, K]
        out = F.conv1d(line, weight[:, None], bias, groups=weight.shape[0])[:, :, 0]
        return activated(out.to(x.dtype), activation)

    def scan(self, key: StateKey, rule: Recurrence, parts: Sequence[Tensor]) -> Tensor:
        part = self.store.parts[key]
        done = rule.in_place(parts, part, self.slots)
        if done is not None:
            return done
        held = part.index_select(0, self.slots)
        out, final = rule([x[:, None] for x in parts], None, held)
        part.index_copy_(0, self.slots, final.to(part.dtype))
        return out[:, 0]
