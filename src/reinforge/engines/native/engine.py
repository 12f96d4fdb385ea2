"""Continuous batching over a paged cache, on the module that trains.

One round admits what fits (each prompt is prefilled once, its full blocks shared by all its
samples), computes the next piece of prompts, then decodes for every live sequence; finished ones
leave at once. On a GPU a round launches its work before it looks at what the round before did, so
that the device does not wait for the host; what was launched and not looked at is in flight.

A sequence takes cache blocks as it grows. Where they run out the youngest is preempted: it gives
its blocks to the older ones, waits before all others, and what it has so far is computed again when
there is room. The oldest can always finish, for one sequence of its length fits the cache.
Everybody waits, enters and gives way in the order of arrival.

Scheduling is a function of what was submitted and in which order: resubmitting the same requests
repeats the same rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from reinforge.config.architectures import DRAFTS
from reinforge.config.base import Precision
from reinforge.core.arrays import ints, to_device
from reinforge.core.batch import Batch
from reinforge.core.constraint import Constraint
from reinforge.core.engine import (
    Completion,
    GenerationStats,
    NewTokens,
    OnTokens,
    SampledArrays,
    Sampling,
    StreamingEngine,
)
from reinforge.core.errors import InputError, RequestError
from reinforge.core.kv_pool import (
    BLOCK,
    HOST,
    PREFILL_TOKENS,
    TOO_LARGE,
    DeviceShare,
    block_tokens,
    gpu_room,
    pool_size,
    stays,
    too_large,
)
from reinforge.core.model_facts import ModelFacts
from reinforge.core.sample import Sample, Stop
from reinforge.core.seeds import seed_of
from reinforge.core.token_text import token_text
from reinforge.core.weights import Weights
from reinforge.engines.native.blocks import BlockPool, CacheHolding, block_keys
from reinforge.engines.native.cache_shapes import cache_shapes
from reinforge.engines.native.decode_batch import DecodeBatch, LiveSequence
from reinforge.engines.native.decoder import Decoder, DecodeWindow, LaunchedWindow, undisturbed
from reinforge.engines.native.drafts import AnswerMemory, DraftTrial, Kin, Speculation, kin_of
from reinforge.engines.native.forced import ForcedRows
from reinforge.engines.native.prefill import SharedPrefix, admit, prefill
from reinforge.models.attention import KVCache
from reinforge.models.causal import CausalModel
from reinforge.models.decoding import decoding
from reinforge.models.device_memory import DeviceMemory, device_memory, whole_memory
from reinforge.models.fp8 import E4M3, check_device
from reinforge.models.fp8_layers import Fp8Layers
from reinforge.models.fused_linear import join
from reinforge.models.grammars import Grammars, Matcher
from reinforge.models.head import FORBIDDEN, LogitRule, chunk_rows, permitted
from reinforge.models.route_store import RouteStore
from reinforge.models.routing import Routers
from reinforge.models.state import PackedStates, StateStore

# decode steps for which blocks must be free before somebody enters, so that nobody has to leave
# again at once
AHEAD = 32
# tokens from which on a limit is one of long answers, whose arrays are made while the GPU works
LONG = 256


def join_weights(model: CausalModel) -> None:
    """Joins in memory what is multiplied with the same input, where bits stay what they are: a BLAS
    may add up in another order for a wider matrix, our kernel does not.
    """
    if not model.exact or model.device.type == "cuda":
        join(model.module)


class NativeEngine:
    """An `Engine`: the trainer's own module generates, in this process. `build/engines.py` makes it
    for a run, `build/serving.py` for a server.
    """

    measured: Mapping[str, float] = {}

    def __init__(
        self,
        model: CausalModel,
        *,
        stop_tokens: Iterable[int] = (),
        max_batch: int = 512,
        kv_gib: float | None = None,
        context: int | None = None,
        longest: int | None = None,
        at_once: int | None = None,
        share: DeviceShare | None = None,
        prefix_cache: bool = False,
        speculation: Speculation | None = None,
        precision: Precision = "model",
        cache_precision: Precision = "model",
        routes: bool = False,
        stream: torch.cuda.Stream | None = None,
    ):
        """`longest` is the longest sequence to expect, prompt and completion, and `at_once` how
        many of `max_batch` to expect together: with them the cache is no larger than it needs to
        be. `share`: what it must leave of its GPU to others.
        `prefix_cache`: what was computed under the same weights is found again, as when a
        conversation goes on. `speculation`: when a step verifies drafts. `precision`: of the
        products of the decoder layers; `cache_precision`: of keys and values. `routes`: completions
        of a mixture tell which experts their tokens went to. `stream`: of a GPU, where something
        else may compute on another stream at the same time.
        """
        self.model = model
        self.max_batch = max_batch
        self.context = min(
            (limit for limit in (context, model.reach) if limit is not None), default=None
        )
        self.stop_tokens = frozenset(stop_tokens)
        self.prefix_cache = prefix_cache
        self.speculation = speculation
        self.answers = AnswerMemory(0 if speculation is None else speculation.memory)
        self._answered: set[Kin] = set()  # who got an answer since rows were told
        self._trial = DraftTrial()
        # the FP8 copies of the weights that it computes with; None: it computes with the weights
        self.fp8 = Fp8Layers.of(model, "rollout.precision") if precision == "fp8" else None
        join_weights(model)
        self.stream = stream
        self.version = 0
        self.stats = GenerationStats()
        # what is asked where the tokens went; None: nobody wants to know
        self.routers = Routers.of(model) if routes else None
        seen = PackedStates([1], model.device) if model.mixers else None
        with self._plainly(), self._watched():
            self.shapes = cache_shapes(model, seen)
            self.route_shape = None if self.routers is None else self.routers.shape()
        # of the states that layers keep of a sequence
        self.state_shapes = {} if seen is None else seen.shapes
        if model.mixers:
            self.prefix_cache = False  # the state at the end of a block is not known
            if speculation is not None:
                raise InputError(DRAFTS, where="rollout.speculation.when", fix="Set it to never.")
        self.share = share or DeviceShare()
        self.cache_dtype = model.dtype
        if cache_precision == "fp8":
            assert not model.exact, "the rules of the config refuse it"
            check_device(model.device, "rollout.cache_precision")
            self.cache_dtype = E4M3
        self.block = block_tokens(model.device.type)
        self.blocks, self.slots = self._pool_size(kv_gib, longest, at_once)
        if self.slots:
            self.max_batch = min(max_batch, self.slots)
        # whether training had the device since the last rollouts, and what it left beside the cache
        # at its worst moment
        self._slept: int | None = None
        self._beside: int | None = None
        self.pool = self._new_pool()
        # one block more than the pool has: rows that only fill a batch write there
        self.cache: KVCache | None = None
        self.states: StateStore | None = None  # where the model keeps state
        with self._plainly():
            self.decoder = Decoder(model)
        self.grammars = Grammars(model.tokenizer, model.head.weight.shape[0], self.stop_tokens)
        # of block tables, so that graphs need not be captured again
        self.width = self.pool.needed(longest) if longest else 0
        self._waiting: deque[SharedPrefix] = deque()
        self._entering: list[SharedPrefix] = []  # admitted, not yet in the cache as a whole
        # in the order of the decoder's rows; who is done may stand among them
        self._running: list[LiveSequence] = []
        self._rows: DecodeBatch | None = None
        # launched, not looked at: the rows of each window and what they will say
        self._in_flight: deque[tuple[list[LiveSequence], LaunchedWindow]] = deque()
        self._driver: asyncio.Task[None] | None = None
        self._arrivals = itertools.count()
        self._requests = itertools.count()

    def _new_pool(self) -> BlockPool:
        """With everything free."""
        return BlockPool(self.blocks, self.block, self.slots)

    def _pool_size(
        self, kv_gib: float | None, longest: int | None, at_once: int | None
    ) -> tuple[int, int]:
        """Blocks, and slots of state: as configured, or what training does not need of the device
        while the engine generates, at most as many as `at_once` of the longest sequences fill.
        Training has that memory too: `sleep` gives the cache back, unless both fit.
        """
        if (problem := too_large(kv_gib, whole_memory(self.model.device))) is not None:
            raise InputError(problem, where="rollout.kv_gib", fix=TOO_LARGE)
        memory = device_memory(self.model.device)
        room = HOST
        if memory is not None:
            facts = ModelFacts.of(self.model.config, itemsize=self.model.dtype.itemsize)
            free = memory.free - (0 if self.fp8 is None else self.fp8.size)
            room = gpu_room(facts, free, self.max_batch, self.share)
        return pool_size(
            self._block_bytes(),
            StateStore.slot_bytes(self.state_shapes),
            room,
            rows=self.max_batch,
            longest=longest,
            at_once=at_once,
            ahead=AHEAD,
            kv_gib=kv_gib,
            block=self.block,
        )

    def _block_bytes(self) -> int:
        routed = 0 if self.route_shape is None else self.route_shape.token_bytes
        return self.block * (KVCache.token_bytes(self.shapes, self.cache_dtype) + routed)

    def _watched(self) -> AbstractContextManager[None]:
        """Inside, it is known where tokens go, if that is wanted."""
        return nullcontext() if self.routers is None else self.routers.watched()

    def _plainly(self) -> AbstractContextManager[None]:
        """Inside, the module computes in its own precision, whatever the trainer's is."""
        layers = Fp8Layers.found(self.model)
        return nullcontext() if layers is None else layers.using("plain")

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Inside, the module computes in the engine's precision, on its stream."""
        precision = self._plainly() if self.fp8 is None else self.fp8.using("copies")
        with self._streamed(), precision:
            yield

    def _streamed(self) -> AbstractContextManager[object]:
        """Inside, what is launched goes to the engine's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _copy_weights(self) -> None:
        """Makes the FP8 copies that it computes with, where there are none."""
        if self.fp8 is not None and not self.fp8.copied:
            with self._streamed():
                self.fp8.quantise()

    def state(self) -> dict[str, int]:
        return {"blocks": self.blocks, "block": self.block}

    def load(self, state: dict[str, int]) -> None:
        assert not self._running, "cannot resize the cache while sequences are running"
        blocks = state["blocks"] * state.get("block", BLOCK) // self.block
        if blocks != self.blocks:
            self._resize(blocks)

    def _resize(self, blocks: int) -> None:
        self.blocks = blocks
        self.pool = self._new_pool()
        self.cache = None
        self.states = None
        self.decoder.forget()

    # ---- the contract ----

    @property
    def streaming(self) -> StreamingEngine:
        return self

    async def generate(
        self,
        tokens: Sequence[int],
        params: Sampling,
        *,
        key: int,
        n: int = 1,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """`on_tokens` hears of tokens as they come, in the engine's thread."""
        prompt = list(tokens)
        if not prompt:
            raise InputError(
                "an empty prompt has nothing to continue.",
                fix="Give at least one token, e.g. the BOS token.",
            )
        longest = len(prompt) + params.max_new_tokens
        if self.context is not None and longest > self.context:
            raise RequestError(
                f"prompt of {len(prompt)} tokens + max_new_tokens {params.max_new_tokens} is past"
                f" the model's context of {self.context}.",
                where="rollout.max_new_tokens",
                fix=(
                    "Set fewer new tokens (reinforge generate: --max-new-tokens), or shorten the"
                    " prompt with data.length."
                ),
            )
        if self.pool.needed(longest) > self.pool.total:
            raise InputError(
                f"one sequence of {longest} tokens does not fit the KV cache of"
                f" {self.pool.total * self.block} tokens.",
                where="rollout.kv_gib",
                fix="Raise it.",
            )
        loop = asyncio.get_running_loop()
        stops = (
            frozenset() if params.ignore_eos else self.stop_tokens | frozenset(params.stop_tokens)
        )
        form = self._matcher(params, prompt)
        kin = self._kin(prompt) if self.speculation is not None else 0
        long = self.decoder.graphs and params.max_new_tokens >= LONG
        sequences = [
            LiveSequence(
                prompt,
                params,
                seed_of(key, i),
                stops,
                loop.create_future(),
                next(self._arrivals),
                kin,
                None if on_tokens is None else partial(on_tokens, i),
                None if form is None else form.copy(),
                # windows of many tokens: on a CPU each has one
                sampled=SampledArrays.empty(params.max_new_tokens) if long else None,
            )
            for i in range(n)
        ]
        self._enqueue(prompt, sequences)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        try:
            return list(await asyncio.gather(*(s.future for s in sequences)))
        except asyncio.CancelledError:
            for sequence in sequences:
                self._drop(sequence)
            raise

    def _kin(self, prompt: list[int]) -> Kin:
        """In whose answers a request finds drafts: all of the same prompt, or its own alone."""
        return kin_of(prompt) if self._free_to_draft else next(self._requests)

    @property
    def _free_to_draft(self) -> bool:
        """Whether drafts may depend on what happened in earlier steps.

        Drafts change the shape of a forward, and so its last bits. A run that is resumed on a CPU
        has the same bits as one that was never cut, though it knows nothing of earlier steps.
        In exact mode any shape has the same bits.
        """
        return self.model.exact or self.model.device.type == "cuda"

    def _matcher(self, params: Sampling, prompt: list[int]) -> Matcher | None:
        """Where an answer stands that must match something."""
        if params.constraint is None:
            return None
        if params.ignore_eos:
            raise InputError(
                "an answer that must match something ends, and ignore_eos says that it must not.",
                where="ignore_eos",
                fix="Leave it out.",
            )
        begun = prompt[len(prompt) - params.begun :]
        return self.grammars.matcher(params.constraint, begun, params.stop_tokens)

    def _enqueue(self, tokens: list[int], sequences: list[LiveSequence]) -> None:
        """Requests that follow each other with the same prompt are prefilled together."""
        if self._waiting and self._waiting[-1].tokens == tokens:
            self._waiting[-1].sequences += sequences
        else:
            self._waiting.append(self._fork(tokens, sequences))

    def _requeue(self, sequence: LiveSequence) -> None:
        """Back to the front of the queue, with all its tokens to prefill. Of several the youngest
        is put there first, so that the queue keeps the order of arrival.
        """
        tokens = sequence.prompt + sequence.tokens
        if self._waiting and self._waiting[0].tokens == tokens:
            self._waiting[0].sequences.insert(0, sequence)
        else:
            self._waiting.appendleft(self._fork(tokens, [sequence]))

    def _fork(self, tokens: list[int], sequences: list[LiveSequence]) -> SharedPrefix:
        keys = block_keys(tokens, self.block) if self.prefix_cache else []
        return SharedPrefix(tokens, list(sequences), keys)

    def close(self) -> None:
        """Nothing was started."""

    async def likeliest(
        self,
        tokens: Sequence[int],
        start: int,
        *,
        k: int,
        temperature: float = 1.0,
        constraint: Constraint | None = None,
        stops: Iterable[int] = (),
    ) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """The log-prob of each token from `start` (> 0) on, and the k likeliest tokens in its place
        with theirs: one forward over all tokens. As in `Completion`: after temperature, over the
        full vocabulary or what the constraint allows, and 0 (greedy) reports 1.
        """
        assert 0 < start <= len(tokens)
        batch = Batch.pack(
            [
                Sample.from_tokens(
                    "likeliest", list(tokens), [i >= start for i in range(len(tokens))]
                )
            ]
        ).to(self.model.device)
        own: list[float] = []
        top: list[list[tuple[int, float]]] = []
        if not batch.n_trained:
            return own, top
        self._copy_weights()
        with torch.no_grad(), self._computing():
            rows = self.model.states(batch).index_select(0, batch.sources)
            size = chunk_rows(len(rows), self.model.head.weight.shape[0], rows.device)
            targets = batch.tokens[batch.targets]
            allowed = None
            if constraint is not None:
                masks = self.grammars.masks(constraint, tokens[start:], stops)
                allowed = torch.from_numpy(masks).to(rows.device)
            for at in range(0, len(rows), size):
                part = slice(at, at + size)
                logits = self.model.logits(rows[part])
                if allowed is not None:
                    logits = permitted(logits, LogitRule(), allowed[part])
                logp = (logits / (temperature or 1.0)).log_softmax(-1)
                own += logp.gather(-1, targets[part, None])[:, 0].tolist()
                values, ids = logp.topk(min(k, logp.shape[-1]))
                top += [
                    [(i, v) for i, v in zip(*pair, strict=True) if v > FORBIDDEN / 2]
                    for pair in zip(ids.tolist(), values.tolist(), strict=True)
                ]
        return own, top

    async def forced(
        self, tokens: Sequence[int], start: int, temperature: float = 1.0, *, plain: bool = False
    ) -> list[float]:
        """The log-prob of each token from `start` (> 0) on, computed as when it is sampled: the
        prompt goes into the cache, then one token after the other. `plain`: by the modules
        themselves, where there is a faster way. Nobody else may generate meanwhile.
        """
        assert not self._busy() and 0 < start < len(tokens)
        await self.wake()
        assert self.cache is not None
        answer = list(tokens[start:])
        future = asyncio.get_running_loop().create_future()
        params = Sampling(len(answer), temperature)
        stops: frozenset[int] = frozenset()
        prompt = list(tokens[:start])
        sequence = LiveSequence(prompt, params, 0, stops, future, next(self._arrivals), 0)
        fork = admit(self._fork(prompt, [sequence]), self.pool, 1, ahead=len(answer))
        assert fork is not None, "the cache holds one sequence of its length"
        fused = None if plain else self.decoder.fused
        found: list[Tensor] = []
        try:
            sequence.held.grow(self.pool, len(tokens))
            with torch.no_grad(), self._computing(), self._watched():
                hidden = None
                while hidden is None:
                    _, hidden, _ = prefill(
                        self.model,
                        self.cache,
                        [fork],
                        PREFILL_TOKENS,
                        states=self.states,
                        fused=fused,
                    )
                rows = ForcedRows.of([sequence], self.model.device, spare=self.blocks)
                rows.given = to_device(ints([answer]), self.model.device)
                picked, logprobs = rows.draw(self.model, hidden)
                rows.advance(picked[:, None])
                found.append(logprobs)
                for _ in answer[1:]:
                    _, logprobs = rows.step(self.model, self.cache, fused, states=self.states)
                    found.append(logprobs[:, 0])
                return torch.cat(found).tolist()
        finally:
            sequence.held.give_back(self.pool)

    async def update(self, weights: Weights, version: int) -> None:
        if weights.kind != "shared" or weights.module is not self.model.module:
            raise ValueError(
                "the native engine computes with the module that it was made with; it cannot load"
                " other weights"
            )
        with self._streamed():
            self._take_in()  # what is in flight was sampled by the old weights
        self.version = version
        live = self._live()
        self._entering = []
        self._running = []
        self._rows = None
        for sequence in reversed(live):
            # what they cached came from the old weights: prefill again under the new ones
            sequence.held.give_back(self.pool)
            self._requeue(sequence)
        self.pool.forget()
        if self.fp8 is not None and self.fp8.copied:
            with self._streamed():
                self.fp8.quantise()

    async def sleep(self) -> None:
        """Training comes next: the cache is given back where it would be in the way. Its graphs go
        with it, for they hold its address.
        """
        assert not self._busy(), "cannot sleep while there is work"
        self._slept = self.version
        memory = device_memory(self.model.device)
        if memory is not None and not stays(self._held(), memory.whole, self._beside):
            self.cache = None
            self.states = None
            self.decoder.forget()
            self.pool.forget()
            if self.fp8 is not None:
                self.fp8.drop()
            torch.cuda.empty_cache()

    def _sequences(self) -> list[LiveSequence]:
        return [
            *self._running,
            *(s for fork in [*self._entering, *self._waiting] for s in fork.sequences),
        ]

    def _decoding(self) -> list[LiveSequence]:
        return [s for s in self._running if not s.future.done()]

    def _live(self) -> list[LiveSequence]:
        """Who is in the cache or on the way into it, the oldest first."""
        found = [*self._running, *(s for fork in self._entering for s in fork.sequences)]
        return sorted((s for s in found if not s.future.done()), key=lambda s: s.order)

    def _busy(self) -> bool:
        """Whether somebody waits for anything."""
        return any(not s.future.done() for s in self._sequences())

    def _held(self) -> int:
        """Bytes of the cache and of the FP8 copies that are there now."""
        copies = self.fp8.size if self.fp8 is not None and self.fp8.copied else 0
        if self.cache is None:
            return copies
        tensors = [*self.cache.tensors, *(() if self.states is None else self.states.tensors)]
        return copies + sum(t.numel() * t.element_size() for t in tensors)

    async def wake(self) -> None:
        memory = device_memory(self.model.device)
        if memory is not None:
            self._observe(memory)
        self._copy_weights()
        if self.cache is None:
            with self._streamed():
                self._allocate()

    def _observe(self, memory: DeviceMemory) -> None:
        """What the first training since `sleep` has left: torch's allocator still holds what that
        needed at its worst moment. Where two engines share a device, neither knows what is left for
        it.
        """
        if self._slept is not None and self._slept != self.version and self.share.engines == 1:
            self._beside = memory.untaken + self._held()
        self._slept = None

    def _allocate(self) -> None:
        """The cache, smaller where the device does not have so much any more: room for the longest
        sequence that waits is enough.
        """
        torch.cuda.empty_cache()  # what training used would lie about in pieces
        longest = max((s.limit for fork in self._waiting for s in fork.sequences), default=1)
        while True:
            try:
                self.cache = KVCache.allocate(
                    self.shapes, self.blocks + 1, self.block, self.cache_dtype, self.model.device
                )
                if self.routers is not None and self.route_shape is not None:
                    self.cache.routes = RouteStore.allocate(
                        self.route_shape,
                        self.routers.taken,
                        self.blocks + 1,
                        self.block,
                        self.model.device,
                    )
                if self.state_shapes:
                    self.states = StateStore(self.state_shapes, self.slots, self.model.device)
                return
            except torch.OutOfMemoryError:
                pass  # once this block is left nothing holds what was allocated so far
            self.cache = None
            torch.cuda.empty_cache()
            if self.blocks <= self.pool.needed(longest) and self.slots <= 1:
                gib = self.blocks * self._block_bytes() / 2**30
                raise InputError(
                    f"the device has no {gib:.2g} GiB left for the KV cache of one sequence of"
                    f" {longest} tokens.",
                    where="rollout.kv_gib",
                    fix=(
                        "Lower rollout.max_new_tokens, set train.optimizer.offload=true, or train"
                        " an adapter (adapter.rank=16) instead of all weights."
                    ),
                )
            if self.slots > 1:
                self.slots = self.slots * 3 // 4
                self.max_batch = min(self.max_batch, self.slots)
            self._resize(max(self.pool.needed(longest), self.blocks * 3 // 4))

    # ---- rounds ----

    async def _drive(self) -> None:
        """Consumes `_waiting`, produces finished futures.

        Runs while there is work; between rounds others may submit.
        """
        try:
            await asyncio.sleep(0)
            await self.wake()
            while self._busy():
                start = time.monotonic()
                with decoding(), self._computing(), self._watched():
                    self._round()
                self.stats.seconds += time.monotonic() - start
                await asyncio.sleep(0)
            self._forget()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """A broken round must not leave anybody waiting for ever."""
        for sequence in self._sequences():
            sequence.held = CacheHolding()
            if not sequence.future.done():
                sequence.future.set_exception(
                    error
                    if isinstance(error, Exception)
                    else RuntimeError(f"engine stopped: {error!r}")
                )
        self._forget()
        self.pool = self._new_pool()

    def _forget(self) -> None:
        """Nobody waits for anything any more."""
        self._running = []
        self._rows = None
        self._in_flight.clear()
        self._entering = []
        self._waiting.clear()

    @torch.no_grad()
    def _round(self) -> None:
        self._entering = [fork for fork in self._entering if fork.live]
        self._admit()
        if self._entering:
            self._prefill()
        launched = self._decode()
        self._take_in(leave=self.decoder.ahead if launched else 0)
        self.stats.steps += 1

    def _admit(self) -> None:
        """In the order of arrival, as long as there is room for them and for the next steps of all
        who are in.

        Who does not fit waits, and nobody overtakes.
        """
        if not self._waiting:
            return
        live = self._live()
        reserved = self._missing(live, AHEAD)
        budget = PREFILL_TOKENS - sum(len(fork.tokens) - fork.done for fork in self._entering)
        room = self.max_batch - len(live)
        if self.slots:  # who was cancelled holds one until its caller has heard of it
            room = min(room, self.pool.free_slots)
        while self._waiting and room > 0 and (budget > 0 or not self._entering):
            fork = self._waiting[0]
            fork.sequences = fork.live
            admitted = admit(fork, self.pool, room, ahead=AHEAD, reserved=reserved)
            if admitted is not None:
                self._entering.append(admitted)
                reserved += self._missing(admitted.sequences, AHEAD)
                budget -= len(admitted.tokens) - admitted.done
                room -= len(admitted.sequences)
            if fork.sequences:
                break
            self._waiting.popleft()

    def _short(self, sequences: list[LiveSequence], tokens: int) -> dict[LiveSequence, int]:
        """Who of these has to take blocks for so many more tokens of each, and how many. Asked in
        every round of everybody, so most are passed over without a call.
        """
        found = {}
        size = self.block
        for s in sequences:
            if len(s.prompt) + len(s.tokens) + s.ahead + tokens > len(s.held.blocks) * size:
                missing = s.held.missing(self.pool, s.reach(tokens))
                if missing:
                    found[s] = missing
        return found

    def _missing(self, sequences: list[LiveSequence], tokens: int) -> int:
        """Blocks that these have to take for so many more tokens of each."""
        return sum(self._short(sequences, tokens).values())

    def _prefill(self) -> None:
        with nullcontext() if self.stream is None else undisturbed():
            self._prefill_undisturbed()

    def _prefill_undisturbed(self) -> None:
        assert self.cache is not None
        complete, hidden, tokens = prefill(
            self.model,
            self.cache,
            self._entering,
            PREFILL_TOKENS,
            states=self.states,
            fused=self.decoder.fused,
        )
        self.stats.prompt_tokens += tokens
        if hidden is None:
            return
        self._entering = [fork for fork in self._entering if fork not in complete]
        entering = [s for fork in complete for s in fork.live]
        for fork in complete:
            self.pool.remember(fork.live[0].held.blocks, fork.keys)
        # the first tokens are not waited for: their rows are made on the device
        rows = self._rows_of(entering)
        picked, logprobs = (x[:, None] for x in rows.draw(self.model, hidden))
        rows.advance(picked)
        drawn = torch.ones(len(entering), dtype=torch.int64, device=self.model.device)
        self._launched(entering, LaunchedWindow.of(picked, logprobs, drawn))
        self._arrange(entering, rows)
        if not self.decoder.ahead:
            self._take_in()

    def _decode(self) -> bool:
        """Launches the next steps of all who run; False: nobody goes on after what is in flight."""
        assert self.cache is not None
        constrained = any(s.matcher is not None for s in self._decoding())
        if constrained:
            # what a constrained row may say next is known when the host has seen its newest token
            self._take_in()
        live = self._decoding()
        left = max((s.left for s in live), default=0)
        if left <= 0:
            return False
        longest = max(s.params.max_new_tokens for s in live)
        drafts = 0 if constrained else self._drafts(len(live))
        steps = 1 if constrained else min(left, self.decoder.steps(longest, drafts))
        self._grow(steps * (drafts + 1))
        live = self._decoding()
        if not live:
            return False
        if self._rows is None:
            self._running = []
            self._arrange(live, self._rows_of(live))
        elif self.decoder.shrinks(len(live), len(self._rows.newest), drafts):
            self._arrange()
        assert self._rows is not None
        self._rows.constrain(self._running if constrained else [])
        if not self._draft(self._rows, drafts):
            return False
        self._rows.longest = max(s.cached + s.ahead for s in self._decoding()) + 1
        self._launched(
            self._running, self.decoder.launch(self._rows, self.cache, steps, self.states)
        )
        return True

    def _drafts(self, rows: int) -> int:
        """How many drafts of each row the next steps verify, where so many rows are alive."""
        if self.speculation is None or not self._trial.pays:
            return 0
        most = self.speculation.rows
        return self.speculation.drafts if most is None or rows <= most else 0

    def _draft(self, rows: DecodeBatch, count: int) -> bool:
        """Makes the rows ready for steps with so many drafts; False: it turned out that nobody
        goes on.
        """
        if not count:
            rows.plain()
            return True
        if rows.seen is None:
            self._take_in()  # the host writes down what they said so far
            if not self._decoding():
                return False
            width = max(self.width * self.block, *(s.limit for s in self._running))
            rows.speculate(self._running, count, self.answers, width=width)
        elif self._answered:
            told = [
                (i, s)
                for i, s in enumerate(self._running)
                if not s.future.done() and s.kin in self._answered
            ]
            if told:
                rows.refer(told, self.answers)
        self._answered.clear()
        return True

    def _rows_of(self, sequences: list[LiveSequence]) -> DecodeBatch:
        width = max(self.width, *(self.pool.needed(s.limit) for s in sequences))
        return DecodeBatch.of(sequences, self.model.device, width=width, spare=self.blocks)

    def _arrange(
        self, entering: Sequence[LiveSequence] = (), rows: DecodeBatch | None = None
    ) -> None:
        """Those who go on, those who enter with these rows, then as many fillers as the size of a
        batch asks for. All on the device: where rows stand now depends on what is in flight.
        """
        keep = [i for i, s in enumerate(self._running) if not s.future.done()]
        parts = [] if self._rows is None or not keep else [self._rows.select(keep)]
        if rows is not None:
            parts.append(rows)
        self._running = [*(self._running[i] for i in keep), *entering]
        fillers = self.decoder.size(len(self._running)) - len(self._running)
        if fillers:
            parts.append(
                DecodeBatch.of(
                    [], self.model.device, size=fillers, width=self.width or 1, spare=self.blocks
                )
            )
        self._rows = DecodeBatch.joined(parts, spare=self.blocks)
        if not any(s.params.filtered for s in self._running):
            self._rows.filters = None  # who wanted them has left

    def _launched(self, sequences: list[LiveSequence], window: LaunchedWindow) -> None:
        for sequence in sequences:
            sequence.ahead += window.most
        self._in_flight.append((list(sequences), window))

    def _take_in(self, leave: int = 0) -> None:
        """Looks at what is in flight, the oldest first, until `leave` windows are left.

        A row that ended has stood still since, in its own blocks. Its retirement is put into the
        stream here, behind every window that still has the row and before anything that whoever
        gets the blocks will write.
        """
        while len(self._in_flight) > leave:
            sequences, window = self._in_flight.popleft()
            for sequence in sequences:
                sequence.ahead -= window.most
            ended = self._accept(sequences, window.look())
            if ended and self._rows is not None:
                gone = [i for i, s in enumerate(self._running) if s in ended]
                if gone:
                    self._rows.retire(gone, self.blocks)

    def _grow(self, tokens: int) -> None:
        """Blocks for so many more tokens of all who run. Where they run out the youngest leave,
        until those who stay have enough.
        """
        short = self._short(self._decoding(), tokens)
        if sum(short.values()) > self.pool.free:
            self._take_in()  # some may have ended, and a preempted one takes its tokens along
            short = self._short(self._decoding(), tokens)
        while sum(short.values()) > self.pool.free:
            self._preempt(self._live()[-1])
            short = self._short(self._decoding(), tokens)
        entries = []
        for row, sequence in enumerate(self._running) if short else ():
            if sequence in short:
                column = len(sequence.held.blocks)
                taken = sequence.held.grow(self.pool, sequence.reach(tokens))
                entries += [(row, column + i, block) for i, block in enumerate(taken)]
        if entries and self._rows is not None:
            self._rows.extend(entries)

    def _preempt(self, sequence: LiveSequence) -> None:
        """Gives its blocks back and waits before all others; its tokens so far are computed again.
        Its next draw is the one that comes next now.
        """
        if sequence in self._running:
            self._remember(sequence)
            self._running.remove(sequence)
            self._rows = None
        for fork in self._entering:
            if sequence in fork.sequences:
                self.pool.remember(sequence.held.blocks, fork.keys[: fork.done // self.block])
                fork.sequences.remove(sequence)
        sequence.held.give_back(self.pool)
        self._requeue(sequence)
        self.stats.preemptions += 1

    def _accept(
        self, sequences: list[LiveSequence], window: DecodeWindow
    ) -> Collection[LiveSequence]:
        """Takes sampled tokens in. Returns who ended with them.

        A row stopped by itself at a stop token or at its limit; stop strings only the host can see.
        """
        verified = sum(window.verified or [])
        if verified:
            self.stats.draft_steps += verified
            self.stats.draft_tokens += sum(window.counts)
        if self._free_to_draft:
            self._trial.count(verified, sum(window.counts))
        ended = set()
        rows = zip(sequences, window.tokens, window.logprobs, window.counts, strict=False)
        for row, (sequence, tokens, logprobs, count) in enumerate(rows):
            if sequence.future.done():  # finished or cancelled before
                continue
            params = sequence.params
            if params.stop_strings:
                count = self._until_string(sequence, tokens[:count])
            if count < len(tokens):
                tokens, logprobs = tokens[:count], logprobs[:count]
            if sequence.sampled is not None:
                part = slice(len(sequence.tokens), len(sequence.tokens) + count)
                sequence.sampled.ids[part] = window.sampled.ids[row, :count]
                sequence.sampled.logprobs[part] = window.sampled.logprobs[row, :count]
            sequence.tokens += tokens
            sequence.logprobs += logprobs
            sequence.versions += [self.version] * count
            self.stats.generated_tokens += count
            stop = None
            if sequence.tokens[-1] in sequence.stops or (
                params.stop_strings and self._hit_string(sequence.tokens, params)
            ):
                stop = Stop.EOS
            elif sequence.matcher is not None and not self._advance(sequence, sequence.matcher):
                ended.add(sequence)
                continue
            elif len(sequence.tokens) >= params.max_new_tokens:
                whole = sequence.matcher is not None and sequence.matcher.complete
                stop = Stop.EOS if whole else Stop.LENGTH
            done = None if stop is None else self._completion(sequence, stop)
            if sequence.listener is not None:
                versions = [self.version] * count
                sequence.listener(NewTokens(tokens, logprobs, versions, done))
            if done is not None:
                self._finish(sequence, done)
                ended.add(sequence)
        return ended

    def _advance(self, sequence: LiveSequence, matcher: Matcher) -> bool:
        """Tells the matcher the newest token. An answer that has come to a dead end fails alone."""
        try:
            matcher.take(sequence.tokens[-1])
        except InputError as error:
            sequence.held.give_back(self.pool)
            sequence.future.set_exception(error)
            return False
        return True

    def _until_string(self, sequence: LiveSequence, tokens: list[int]) -> int:
        """How many of these tokens come before a stop string is complete."""
        so_far = list(sequence.tokens)
        for i, token in enumerate(tokens):
            so_far.append(token)
            if self._hit_string(so_far, sequence.params):
                return i + 1
        return len(tokens)

    def _hit_string(self, tokens: list[int], params: Sampling) -> bool:
        longest = max(len(s.encode()) for s in params.stop_strings)  # in bytes: a token may be one
        tail = token_text(self.model.tokenizer, tokens[-(longest + 4) :])
        return any(s in tail for s in params.stop_strings)

    def _completion(self, sequence: LiveSequence, stop: Stop) -> Completion:
        routes = None
        if self.cache is not None and self.cache.routes is not None:
            routes = self.cache.routes.of(sequence.held.blocks, sequence.cached)
        sampled = sequence.sampled
        if sampled is not None:
            sampled = sampled.first(len(sequence.tokens))
        return Completion(
            sequence.tokens, sequence.logprobs, sequence.versions, stop, routes, sampled
        )

    def _finish(self, sequence: LiveSequence, done: Completion) -> None:
        self._remember(sequence)
        if self.speculation is not None:
            self.answers.add(sequence.kin, sequence.prompt, sequence.tokens)
            self._answered.add(sequence.kin)
        sequence.held.give_back(self.pool)
        sequence.future.set_result(done)

    def _remember(self, sequence: LiveSequence) -> None:
        if self.prefix_cache:  # the newest token was never fed, so it is not in the cache
            keys = block_keys((sequence.prompt + sequence.tokens)[:-1], self.block)
            self.pool.remember(sequence.held.blocks, keys)

    def _drop(self, sequence: LiveSequence) -> None:
        """A cancelled sequence gives its blocks back; the next round forgets it."""
        sequence.held.give_back(self.pool)
        sequence.future.cancel()
        if self._rows is not None and sequence in self._running:
            with self._streamed():
                self._rows.retire([self._running.index(sequence)], self.blocks)
