"""Continuous batching over a paged cache, on the module that trains.

One round admits what fits (each prompt is prefilled once, its full blocks shared by all its samples), then decodes one
token for every live sequence; finished ones leave at once. A sequence gets all the blocks it may need when it is admitted,
so it never has to be evicted, and its block table never changes.

Scheduling is a function of what was submitted and in which order: resubmitting the same requests repeats the same rounds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reinforge.core.arrays import ints
from reinforge.core.batch import Batch
from reinforge.core.engine import Capabilities, Completion, GenerationStats, Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample, Stop
from reinforge.core.seeds import seed_of
from reinforge.core.weights import Weights
from reinforge.engines.native.blocks import BlockPool
from reinforge.engines.native.decoder import Decoder, Window
from reinforge.engines.native.rows import Live, Rows
from reinforge.models.attention import Cache, Packed, Prefill
from reinforge.models.causal import CausalModel

BLOCK = 16
KEEP = 1 / 12  # a cache of at most this share of the GPU is not given back between rollouts
PREFILL_TOKENS = 16384  # packed prompt tokens per forward


@dataclass(slots=True, eq=False)
class _Fork:
    """Sequences that continue the same tokens: prefilled together, once."""

    tokens: list[int]
    sequences: list[Live]


class NativeEngine:
    capabilities = Capabilities(logprobs=True, adapters=False, abort=True, exact=False, scoring=True)

    def __init__(self, model: CausalModel, *, stop_tokens: Iterable[int] = (), max_batch: int = 512, kv_gib: float | None = None,
                 context: int | None = None, longest: int | None = None):  # fmt: skip
        """`longest` is the longest sequence to expect, prompt and completion: with it the cache is no larger than it needs to be."""
        self.model, self.max_batch, self.context = model, max_batch, context
        self.stop_tokens = frozenset(stop_tokens)
        self.version = 0
        self.stats = GenerationStats()
        self.shapes = _cache_shapes(model)
        self.blocks = self._pool_size(kv_gib, longest)
        self.pool = BlockPool(self.blocks, BLOCK)
        self.cache: Cache | None = None  # one block more than the pool has: rows that only fill a batch write there
        self.decoder = Decoder(model)
        self.width = self.pool.needed(longest) if longest else 0  # of block tables, so that graphs need not be captured again
        self._waiting: deque[_Fork] = deque()
        self._entering: list[_Fork] = []  # admitted in this round, not yet prefilled
        self._running: list[Live] = []
        self._rows: Rows | None = None
        self._driver: asyncio.Task[None] | None = None

    def _pool_size(self, kv_gib: float | None, longest: int | None) -> int:
        per_block = BLOCK * sum(2 * heads * size for heads, size in self.shapes) * torch.finfo(self.model.dtype).bits // 8
        if kv_gib is not None:
            return max(8, int(kv_gib * 2**30) // per_block)
        free = torch.cuda.mem_get_info(self.model.device)[0] if self.model.device.type == "cuda" else 2 << 30
        most = max(8, int(0.4 * free) // per_block)
        return min(most, max(8, self.max_batch * -(-longest // BLOCK))) if longest else most

    def state(self) -> dict[str, int]:
        return {"blocks": self.blocks}

    def load(self, state: dict[str, int]) -> None:
        assert not self._running, "cannot resize the cache while sequences are running"
        if state["blocks"] != self.blocks:
            self.blocks, self.pool, self.cache = state["blocks"], BlockPool(state["blocks"], BLOCK), None
            self.decoder.forget()

    # ---- the contract ----

    async def generate(self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1) -> list[Completion]:
        prompt = list(tokens)
        if not prompt:
            raise InputError("an empty prompt has nothing to continue.", fix="Give at least one token, e.g. the BOS token.")
        longest = len(prompt) + params.max_new_tokens
        if self.context is not None and longest > self.context:
            raise InputError(f"prompt of {len(prompt)} tokens + max_new_tokens {params.max_new_tokens} is past the model's context of {self.context}.",
                             where="rollout.max_new_tokens", fix="Shorten one of them, or set data.length.")  # fmt: skip
        if self.pool.needed(longest) > self.pool.total:
            raise InputError(
                f"one sequence of {longest} tokens does not fit the KV cache of {self.pool.total * BLOCK} tokens.",
                where="rollout.kv_gib",
                fix="Raise it.",
            )
        loop = asyncio.get_running_loop()
        stops = frozenset() if params.ignore_eos else self.stop_tokens | frozenset(params.stop_tokens)
        sequences = [Live(prompt, params, seed_of(key, i), stops, loop.create_future()) for i in range(n)]
        self._waiting.append(_Fork(prompt, sequences))
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        try:
            return list(await asyncio.gather(*(s.future for s in sequences)))
        except asyncio.CancelledError:
            for sequence in sequences:
                self._drop(sequence)
            raise

    async def score(self, tokens: Sequence[int]) -> Tensor:
        sample = Sample.from_tokens("score", list(tokens), [True] * len(tokens))
        batch = Batch.pack([sample]).to(self.model.device)
        out = torch.zeros(len(tokens))
        if batch.n_trained:
            with torch.no_grad():
                out[1:] = self.model.logprobs(batch, temperature=1.0)[0].cpu()
        return out

    async def update(self, weights: Weights, version: int) -> None:
        if weights.kind != "shared" or weights.module is not self.model.module:
            raise ValueError("the native engine serves the trainer's own module; it cannot load other weights")
        self.version = version
        for sequence in self._running:  # what they cached came from the old weights: prefill again under the new ones
            self._leave(sequence)
            self._waiting.append(_Fork(sequence.prompt + sequence.tokens, [sequence]))
        self._running, self._rows = [], None

    async def sleep(self) -> None:
        assert not self._running and all(s.future.done() for f in self._waiting for s in f.sequences), "cannot sleep while there is work"
        if self.model.device.type == "cuda" and not self._small():  # host memory is kept: it is not what training runs short of
            self.cache = None
            self.decoder.forget()
            torch.cuda.empty_cache()

    def _small(self) -> bool:
        """Whether the cache takes so little of the device that it may stay while training, and its graphs with it."""
        used = sum(t.numel() * t.element_size() for t in (*self.cache.keys, *self.cache.values)) if self.cache else 0
        return used <= KEEP * torch.cuda.mem_get_info(self.model.device)[1]

    async def wake(self) -> None:
        if self.cache is None:
            self.cache = Cache.allocate(self.shapes, self.blocks + 1, BLOCK, self.model.dtype, self.model.device)

    # ---- rounds ----

    async def _drive(self) -> None:
        """Consumes `_waiting`, produces finished futures. Runs while there is work; between rounds others may submit."""
        try:
            await asyncio.sleep(0)
            await self.wake()
            while self._waiting or self._running:
                start = time.monotonic()
                self._round()
                self.stats.seconds += time.monotonic() - start
                await asyncio.sleep(0)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """A broken round must not leave anybody waiting for ever."""
        for sequence in [*self._running, *(s for fork in [*self._entering, *self._waiting] for s in fork.sequences)]:
            sequence.blocks = []
            if not sequence.future.done():
                sequence.future.set_exception(error if isinstance(error, Exception) else RuntimeError(f"engine stopped: {error!r}"))
        self._running, self._rows, self._entering, self._waiting = [], None, [], deque()
        self.pool = BlockPool(self.blocks, BLOCK)

    @torch.no_grad()
    def _round(self) -> None:
        self._entering = self._admit()
        if self._entering:
            self._prefill(self._entering)
            self._entering = []
        if self._running:
            self._decode()
        self.stats.steps += 1

    def _admit(self) -> list[_Fork]:
        admitted: list[_Fork] = []
        budget, room = PREFILL_TOKENS, self.max_batch - len(self._running)
        while self._waiting and room > 0 and (budget > 0 or not admitted):
            fork = self._waiting.popleft()
            fork.sequences = [s for s in fork.sequences if not s.future.done()]
            shared = len(fork.tokens) // BLOCK
            free = self.pool.free - shared
            fitting: list[Live] = []
            for sequence in fork.sequences[:room]:
                own = self.pool.needed(len(sequence.prompt) + sequence.params.max_new_tokens) - shared
                if own > free:
                    break
                free -= own
                fitting.append(sequence)
            rest = fork.sequences[len(fitting) :]
            if fitting:
                prefix = self.pool.take(shared)
                for i, sequence in enumerate(fitting):
                    own = self.pool.needed(len(sequence.prompt) + sequence.params.max_new_tokens) - shared
                    sequence.blocks = (prefix if i == 0 else self.pool.share(prefix)) + self.pool.take(own)
                admitted.append(_Fork(fork.tokens, fitting))
                budget -= len(fork.tokens)
                room -= len(fitting)
            if rest:
                self._waiting.appendleft(_Fork(fork.tokens, rest))
                break
        return admitted

    def _prefill(self, forks: list[_Fork]) -> None:
        """Runs each fork's tokens once, into its first sequence's blocks; the part-filled last block is copied to the others."""
        assert self.cache is not None
        device = self.model.device
        lengths = [len(f.tokens) for f in forks]
        slots = torch.cat([_slots(f.sequences[0].blocks, n) for f, n in zip(forks, lengths, strict=True)]).to(device)
        tokens = ints([t for f in forks for t in f.tokens]).to(device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        ends = torch.tensor(lengths).cumsum(0)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32).to(device)
        hidden = self.model.hidden(tokens, positions, Prefill(Packed(lengths, starts), self.cache, slots))
        copies = [
            (f.sequences[0].blocks[n // BLOCK], s.blocks[n // BLOCK])
            for f, n in zip(forks, lengths, strict=True)
            if n % BLOCK
            for s in f.sequences[1:]
        ]
        if copies:
            source, target = (torch.tensor(x, device=device) for x in zip(*copies, strict=True))
            for part in (*self.cache.keys, *self.cache.values):
                part.index_copy_(0, target, part.index_select(0, source))
        entering = [s for f in forks for s in f.sequences]
        last = torch.tensor([int(ends[i]) - 1 for i, f in enumerate(forks) for _ in f.sequences], device=device)
        picked, logprobs = Rows.of(entering, device).draw(self.model, hidden.index_select(0, last))
        self._accept(entering, Window(picked[:, None].tolist(), logprobs[:, None].tolist(), [1] * len(entering)))
        self._running = [s for s in [*self._running, *entering] if not s.future.done()]
        self._rows = None
        self.stats.prompt_tokens += sum(lengths)

    def _decode(self) -> None:
        assert self.cache is not None
        if self._rows is None:
            size = self.decoder.size(len(self._running))
            self._rows = Rows.of(self._running, self.model.device, size=size, width=self.width, spare=self.blocks)
        self._accept(self._running, self.decoder.run(self._rows, self.cache))
        if any(s.future.done() for s in self._running):
            self._running = [s for s in self._running if not s.future.done()]
            self._rows = None

    def _accept(self, sequences: list[Live], window: Window) -> None:
        """Takes sampled tokens in. A row stopped by itself at a stop token or at its limit; stop strings only the host can see."""
        for sequence, tokens, logprobs, count in zip(sequences, window.tokens, window.logprobs, window.counts, strict=False):
            if sequence.future.done():  # cancelled while it ran
                continue
            if sequence.params.stop_strings:
                count = self._until_string(sequence, tokens[:count])
            sequence.tokens += tokens[:count]
            sequence.logprobs += logprobs[:count]
            sequence.versions += [self.version] * count
            self.stats.generated_tokens += count
            if sequence.tokens[-1] in sequence.stops or self._hit_string(sequence.tokens, sequence.params):
                self._finish(sequence, Stop.EOS)
            elif len(sequence.tokens) >= sequence.params.max_new_tokens:
                self._finish(sequence, Stop.LENGTH)

    def _until_string(self, sequence: Live, tokens: list[int]) -> int:
        """How many of these tokens come before a stop string is complete."""
        so_far = list(sequence.tokens)
        for i, token in enumerate(tokens):
            so_far.append(token)
            if self._hit_string(so_far, sequence.params):
                return i + 1
        return len(tokens)

    def _hit_string(self, tokens: list[int], params: Sampling) -> bool:
        if not params.stop_strings:
            return False
        tail = self.model.tokenizer.decode(tokens[-(max(map(len, params.stop_strings)) + 4) :])
        return any(s in tail for s in params.stop_strings)

    def _finish(self, sequence: Live, stop: Stop) -> None:
        self._leave(sequence)
        sequence.future.set_result(Completion(sequence.tokens, sequence.logprobs, sequence.versions, stop))

    def _leave(self, sequence: Live) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _drop(self, sequence: Live) -> None:
        """A cancelled sequence gives its blocks back; the next round forgets it."""
        self._leave(sequence)
        sequence.future.cancel()
        if sequence in self._running:
            self._running.remove(sequence)
            self._rows = None


def _slots(blocks: list[int], count: int) -> Tensor:
    """Flat cache positions of the first `count` tokens of a sequence."""
    at = torch.arange(count)
    return ints(blocks)[at // BLOCK] * BLOCK + at % BLOCK


@dataclass(slots=True)
class _ShapeProbe:
    packed: Packed
    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        assert k.shape == v.shape and layer not in self.shapes, f"layer {layer} keeps keys and values in a way the cache does not know"
        self.shapes[layer] = (k.shape[1], k.shape[2])
        return self.packed.attend(layer, q, k, v, scale, window, softcap)


@torch.no_grad()
def _cache_shapes(model: CausalModel) -> list[tuple[int, int]]:
    """(K, D) of each layer's cache, seen in a forward of one token rather than guessed from the config."""
    device = model.device
    probe = _ShapeProbe(Packed([1], torch.tensor([0, 1], dtype=torch.int32, device=device)))
    model.hidden(torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device), probe)
    assert sorted(probe.shapes) == list(range(len(probe.shapes))), f"attention layers are numbered {sorted(probe.shapes)}"
    return [probe.shapes[i] for i in range(len(probe.shapes))]
