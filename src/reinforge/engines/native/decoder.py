"""Several decode steps between two looks of the host.

On a GPU a step is one CUDA graph, captured once per batch-size bucket and replayed, so a token
costs no Python and no launch overhead; the host looks at what came out every so many steps, and
launches the next window before it looks at the last one. On a CPU there is nothing to hide: one
step, one look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.core.engine import SampledArrays
from reinforge.core.turns import TURNS
from reinforge.engines.native.decode_batch import DecodeBatch, GraphKey
from reinforge.models.attention import HAS_TRITON, KVCache
from reinforge.models.causal import CausalModel
from reinforge.models.exact_tiles import chunk_programs
from reinforge.models.fused_decode import FusedDecode
from reinforge.models.state import StateStore

WINDOW = 16  # at most this many steps between two looks
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def bucket(rows: int) -> int:
    return next((size for size in BUCKETS if size >= rows), rows)


def window(limit: int) -> int:
    """Steps between two looks, where completions may have `limit` tokens: a row's end is seen up to
    two windows late, looking costs time.
    """
    return WINDOW if limit >= 512 else WINDOW // 2 if limit >= 128 else WINDOW // 4


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, no other thread trains, and torch does not look for the deterministic forms of
    operations that a thread which trains has asked for: that switch is one for all threads, and
    some operations that draw have no such form.
    """
    with TURNS.alone():
        before = torch.are_deterministic_algorithms_enabled()
        warned = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)


@dataclass(slots=True)
class DecodeWindow:
    """What the rows said: tokens and log-probs of each, of which the first `counts[b]` are real."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    counts: list[int]
    verified: list[int] | None  # steps with drafts that each row took; None: there were no drafts
    sampled: SampledArrays  # [B, N] the tokens and log-probs as arrays


@dataclass(slots=True)
class LaunchedWindow:
    """Decode steps that the device was told to do, and where the host will find what came out.
    `Decoder` makes it, the native engine looks at it later.
    """

    tokens: Tensor  # [B, N] on the host; rows have different numbers of them
    logprobs: Tensor  # [B, N] on the host
    counts: Tensor  # [B] on the host
    verified: Tensor | None  # [B] on the host
    arrived: torch.cuda.Event | None  # None: they are there already

    @classmethod
    def of(
        cls, tokens: Tensor, logprobs: Tensor, counts: Tensor, verified: Tensor | None = None
    ) -> LaunchedWindow:
        """Sends them to the host without waiting. The copies stand in the stream before whatever
        comes next, so the tensors may be written again at once.
        """
        steps = None if verified is None else _to_host(verified)
        found = cls(_to_host(tokens), _to_host(logprobs), _to_host(counts), steps, None)
        if tokens.is_cuda:
            found.arrived = torch.cuda.Event()
            found.arrived.record()
        return found

    @property
    def most(self) -> int:
        """Tokens that a row got, at most."""
        return self.tokens.shape[1]

    def look(self) -> DecodeWindow:
        """Waits until the steps are done."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return DecodeWindow(
            self.tokens.tolist(),
            self.logprobs.tolist(),
            self.counts.tolist(),
            None if self.verified is None else self.verified.tolist(),
            SampledArrays(self.tokens.numpy(), self.logprobs.numpy()),
        )


def _to_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


@dataclass(slots=True)
class _WindowTokens:
    """What rows draw in a window, on the device. Each step writes all that it drew behind what was
    taken before, so what a row did not take is overwritten.
    """

    tokens: Tensor  # [B, N]
    logprobs: Tensor  # [B, N]
    start: Tensor  # [B] tokens that each row had when the window began

    @classmethod
    def of(cls, rows: DecodeBatch, steps: int) -> _WindowTokens:
        shape = (len(rows.newest), steps * (rows.drafts + 1))
        device = rows.newest.device
        return cls(
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            rows.produced.clone(),
        )

    def record(
        self,
        rows: DecodeBatch,
        model: CausalModel,
        cache: KVCache,
        fused: FusedDecode | None = None,
        parts: int = 1,
        states: StateStore | None = None,
    ) -> None:
        """One step of these rows."""
        at = (rows.produced - self.start)[:, None]
        if rows.drafts:
            at = at + torch.arange(rows.drafts + 1, device=at.device)
        picked, logprobs = rows.step(model, cache, fused, parts, states)
        self.tokens.scatter_(1, at, picked)
        self.logprobs.scatter_(1, at, logprobs)


@dataclass(slots=True)
class _CapturedGraph:
    """A decode step that was captured as a CUDA graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    rows: DecodeBatch  # the tensors that the graph reads and advances
    drawn: _WindowTokens


class Decoder:
    """Runs decode steps for the native engine, several between two looks of the host: as CUDA
    graphs on a GPU, one by one on a CPU.
    """

    def __init__(self, model: CausalModel):
        self.model = model
        self.graphs = model.device.type == "cuda" and HAS_TRITON
        self.ahead = 1 if self.graphs else 0  # windows that may run before the host looks
        self._captured: dict[tuple[GraphKey, int], _CapturedGraph] = {}
        # one for all graphs: no two run at once, and nothing in it outlives a step
        self._memory = torch.cuda.graph_pool_handle() if self.graphs else None
        self.captures = 0  # for the metrics
        self.fused = FusedDecode.of(model) if self.graphs and not model.mixers else None

    def size(self, rows: int) -> int:
        """Rows of a batch of this many sequences: graphs exist for some sizes only."""
        return bucket(rows) if self.graphs else rows

    def shrinks(self, live: int, rows: int, drafts: int) -> bool:
        """Whether a batch of `rows`, of which so many are still alive, is to become a smaller one.
        On a GPU who drafts waits for what is in flight then, since the host has to write down what
        everybody said: so a quarter of the batch it has to be.
        """
        size = self.size(live)
        waits = self.graphs and drafts > 0
        return 4 * size <= rows if waits else size < rows

    def parts(self, rows: DecodeBatch, steps: int) -> int:
        """How many programs share the keys of a sequence in the next steps."""
        from reinforge.models.kernels.paged_attention import parts_of

        config = self.model.config
        heads = (
            getattr(config, "num_key_value_heads", None)
            or getattr(config, "num_attention_heads", None)
            or 1  # no layer attends
        )
        width = rows.drafts + 1
        share = chunk_programs if self.model.exact else parts_of
        return share(len(rows.newest) * width, heads, rows.longest + steps * width)

    def forget(self) -> None:
        """The cache that the graphs were captured with is gone."""
        if self._captured:
            torch.cuda.synchronize()  # a window that nobody waits for may still run
            self._memory = torch.cuda.graph_pool_handle()
        self._captured.clear()

    def steps(self, limit: int, drafts: int = 0) -> int:
        """Of the next window, where no completion is longer than `limit`. With drafts half as many:
        where they pay, a step gives two tokens and more.
        """
        return max(1, window(limit) // (2 if drafts else 1)) if self.graphs else 1

    def launch(
        self, rows: DecodeBatch, cache: KVCache, steps: int, states: StateStore | None = None
    ) -> LaunchedWindow:
        """The next tokens of every row, after at most `steps` (and `WINDOW`) steps."""
        before = rows.produced.clone()
        if rows.verified is not None:
            rows.verified.zero_()
        if self.graphs:
            drawn = self._replay(rows, cache, steps, states)
        else:
            drawn = _WindowTokens.of(rows, steps)
            with undisturbed() if rows.produced.is_cuda else nullcontext():
                for _ in range(steps):
                    drawn.record(rows, self.model, cache, states=states)
        most = steps * (rows.drafts + 1)
        return LaunchedWindow.of(
            drawn.tokens[:, :most],
            drawn.logprobs[:, :most],
            rows.produced - before,
            None if rows.verified is None else rows.verified.clone(),
        )

    def _replay(
        self, rows: DecodeBatch, cache: KVCache, steps: int, states: StateStore | None
    ) -> _WindowTokens:
        parts = self.parts(rows, steps)
        captured = self._captured.get((rows.key, parts))
        if captured is None:
            captured = self._capture(rows, cache, parts, states)
        captured.rows.copy_(rows)
        captured.drawn.start.copy_(rows.produced)
        for _ in range(steps):
            captured.graph.replay()
        captured.rows.longest = rows.longest + steps * (rows.drafts + 1)
        rows.move_into(captured.rows)
        return captured.drawn

    def _capture(
        self, rows: DecodeBatch, cache: KVCache, parts: int, states: StateStore | None
    ) -> _CapturedGraph:
        """Captures one step on rows that are all done: they stand still, and write only into the
        spare block and into the slot that is nobody's.
        """
        still = rows.clone()
        still.done.fill_(True)
        still.cached.zero_()
        still.tables.fill_(cache.keys[0].shape[0] - 1)
        still.slots.zero_()
        drawn = _WindowTokens.of(still, WINDOW)

        def step() -> None:
            drawn.record(still, self.model, cache, self.fused, parts, states)

        with undisturbed():
            captured = _CapturedGraph(self._graph(step), still, drawn)
        self._captured[rows.key, parts] = captured
        self.captures += 1
        return captured

    def _graph(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of this, which is run twice before."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            step()
        return graph
