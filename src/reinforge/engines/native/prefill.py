"""Prompts on their way into the cache: each is computed once for all its samples, long ones in
pieces between decode steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from reinforge.core.arrays import ints, to_device
from reinforge.engines.native.blocks import BlockPool
from reinforge.engines.native.decode_batch import LiveSequence
from reinforge.models.attention import KVCache, PrefillLayout, starts_of
from reinforge.models.causal import CausalModel
from reinforge.models.fused_decode import FusedDecode
from reinforge.models.state import PieceStates, StateStore


@dataclass(slots=True, eq=False)
class SharedPrefix:
    """Sequences that continue the same tokens: a prompt that is prefilled once, and the samples
    that wait for it. The native engine queues them and admits them by `admit`.
    """

    tokens: list[int]
    sequences: list[LiveSequence]
    # of its full blocks, where prefixes are remembered
    keys: list[bytes] = field(default_factory=list)
    done: int = 0  # tokens whose keys and values are in the cache
    # in whose slot the state after them is, where the model keeps state
    holder: LiveSequence | None = None

    @property
    def live(self) -> list[LiveSequence]:
        return [s for s in self.sequences if not s.future.done()]


def admit(
    fork: SharedPrefix, pool: BlockPool, room: int, *, ahead: int, reserved: int = 0
) -> SharedPrefix | None:
    """Gives the blocks of their tokens to as many of the fork's sequences as fit, and takes them
    out of it.

    A sequence fits while the free blocks also cover `ahead` decode steps of all who entered here,
    beside the `reserved` blocks that others need for theirs: who enters is not preempted at once.
    Full blocks of the tokens are shared, among the sequences and with whoever has them already.
    """
    size = pool.block_size
    shared = len(fork.tokens) // size
    # the last token is computed anew: it predicts the first one
    known = pool.find(fork.keys)[: (len(fork.tokens) - 1) // size]
    free = pool.free - pool.idle(known) - (shared - len(known)) - reserved
    fitting: list[LiveSequence] = []
    for sequence in fork.sequences[:room]:
        own = pool.needed(sequence.reach(ahead)) - shared
        if own > free:
            break
        free -= own
        fitting.append(sequence)
    if not fitting:
        return None
    first, *others = fitting
    first.held.share(pool, known)
    first.held.grow(pool, len(fork.tokens))
    for other in others:
        other.held.share(pool, first.held.blocks[:shared])
        other.held.grow(pool, len(fork.tokens))
    for sequence in fitting:
        sequence.held.enter(pool)
    fork.sequences = fork.sequences[len(fitting) :]
    return SharedPrefix(fork.tokens, fitting, fork.keys, len(known) * size)


def prefill(
    model: CausalModel,
    cache: KVCache,
    forks: list[SharedPrefix],
    budget: int,
    *,
    states: StateStore | None = None,
    fused: FusedDecode | None = None,
) -> tuple[list[SharedPrefix], Tensor | None, int]:
    """Computes the next pieces of the forks, at most about `budget` tokens. `fused`: the trunk with
    fewer kernels, where there is one.

    Returns the forks that are complete, the hidden state [.., E] of the last token of each of them,
    once per live sequence, and how many tokens were computed.

    A piece ends at the end of a block; what fills a block in part comes last and lies in the first
    live sequence's own block, from where it is copied to the others. So is the state of the first
    one, where the model keeps `states`.
    """
    device = model.device
    size = cache.block_size
    pieces: list[tuple[SharedPrefix, int]] = []  # and where its piece ends
    for fork in forks:
        if budget <= 0:
            break
        if states is not None and fork.holder is not fork.live[0]:
            fork.done = 0  # the state went with the sequence that had it
            fork.holder = fork.live[0]
        left = len(fork.tokens) - fork.done
        count = min(left, max(size, budget // size * size)) if left > budget else left
        pieces.append((fork, fork.done + count))
        budget -= count
    lengths = [end - fork.done for fork, end in pieces]
    slots = [_slots(fork.live[0].held.blocks, 0, end, size) for fork, end in pieces]
    new = [s[fork.done :] for s, (fork, _) in zip(slots, pieces, strict=True)]
    continued = any(fork.done for fork, _ in pieces)
    positions = np.concatenate([np.arange(fork.done, end) for fork, end in pieces])
    layout = PrefillLayout(
        lengths,
        starts_of(lengths, device),
        cache,
        _sent(np.concatenate(new), device),
        _sent(np.concatenate(slots), device) if continued else None,
        [end for _, end in pieces] if continued else None,
        _sent(positions, device),
    )
    tokens = to_device(
        ints([t for fork, end in pieces for t in fork.tokens[fork.done : end]]), device
    )
    if fused is None or fused.exact:
        assert layout.positions is not None
        kept = None if states is None else _piece_states(states, pieces, lengths, device)
        hidden = model.hidden(tokens, layout.positions, layout, kept)
    else:
        hidden = fused.hidden(tokens, layout)
    if cache.routes is not None:
        cache.routes.keep(layout.slots)
    for fork, end in pieces:
        fork.done = end
    complete = [
        (fork, last)
        for (fork, end), last in zip(pieces, _ends(lengths), strict=True)
        if end == len(fork.tokens)
    ]
    if not complete:
        return [], None, sum(lengths)
    _copy_tails(cache, [fork for fork, _ in complete])
    if states is not None:
        _copy_states(states, [fork for fork, _ in complete], device)
    rows = to_device(ints([last for fork, last in complete for _ in fork.live]), device)
    return [fork for fork, _ in complete], hidden.index_select(0, rows), sum(lengths)


def _copy_tails(cache: KVCache, forks: list[SharedPrefix]) -> None:
    """The part-filled last block of a prompt, from the sequence it was computed for to its
    siblings.
    """
    copies = []
    for fork in forks:
        block, tail = divmod(len(fork.tokens), cache.block_size)
        first, *others = fork.live
        if tail:
            copies += [(first.held.blocks[block], other.held.blocks[block]) for other in others]
    if copies:
        source, target = to_device(ints(copies), cache.keys[0].device).unbind(1)
        for part in cache.tensors:
            if part.numel():  # of a layer that attends
                part.index_copy_(0, target, part.index_select(0, source))


def _piece_states(
    states: StateStore,
    pieces: list[tuple[SharedPrefix, int]],
    lengths: list[int],
    device: torch.device,
) -> PieceStates:
    slots = ints([fork.live[0].held.slot for fork, _ in pieces])
    assert all(fork.live[0].held.slot for fork, _ in pieces), "a sequence without a slot of state"
    begun = torch.tensor([fork.done > 0 for fork, _ in pieces])
    return PieceStates(lengths, states, to_device(slots, device), to_device(begun, device))


def _copy_states(states: StateStore, forks: list[SharedPrefix], device: torch.device) -> None:
    """The state at the end of a prompt, from the sequence it was computed for to its siblings."""
    copies = [
        (first.held.slot, other.held.slot)
        for first, *others in (fork.live for fork in forks)
        for other in others
    ]
    if copies:
        states.copy(*to_device(ints(copies), device).unbind(1))


def _ends(lengths: list[int]) -> list[int]:
    return (torch.tensor(lengths).cumsum(0) - 1).tolist()


def _slots(blocks: list[int], start: int, stop: int, size: int) -> np.ndarray:
    """Flat cache positions of the tokens [start, stop) of a sequence. In numpy: there may be
    hundreds of prompts, and each call of torch takes as long as all of it.
    """
    at = np.arange(start, stop)
    return np.asarray(blocks, dtype=np.int64)[at // size] * size + at % size


def _sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(numbers), device)
