"""Several decode steps between two looks of the host.

On a GPU a step is one CUDA graph, captured once per batch-size bucket and replayed, so a token
costs no Python and no launch overhead; the host looks at what came out every so many steps, and
launches the next window before it looks at the last one. On a CPU there is nothing to hide: one
step, one look.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.engines.native.decode_batch import DecodeBatch, GraphKey
from reinforge.models.attention import HAS_TRITON, KVCache
from reinforge.models.causal import CausalModel
from reinforge.models.fused_decode import FusedDecode

WINDOW = 16  # at most this many steps between two looks
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def bucket(rows: int) -> int:
    return next((size for size in BUCKETS if size >= rows), rows)


def window(limit: int) -> int:
    """Steps between two looks, where completions may have `limit` tokens: a row's end is seen up to
    two windows late, looking costs time.
    """
    return WINDOW if limit >= 512 else WINDOW // 2 if limit >= 128 else WINDOW // 4


@dataclass(slots=True)
class DecodeWindow:
    """What the rows said: tokens and log-probs, [B][steps], of which the first `counts[b]` are
    real.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    counts: list[int]


@dataclass(slots=True)
class LaunchedWindow:
    """Decode steps that the device was told to do, and where the host will find what came out.
    `Decoder` makes it, the native engine looks at it later.
    """

    tokens: Tensor  # [steps, B] on the host
    logprobs: Tensor  # [steps, B] on the host
    counts: Tensor  # [B] on the host
    arrived: torch.cuda.Event | None  # None: they are there already

    @classmethod
    def of(cls, tokens: Tensor, logprobs: Tensor, counts: Tensor) -> LaunchedWindow:
        """Sends them to the host without waiting. The copies stand in the stream before whatever
        comes next, so the tensors may be written again at once.
        """
        found = cls(_to_host(tokens), _to_host(logprobs), _to_host(counts), None)
        if tokens.is_cuda:
            found.arrived = torch.cuda.Event()
            found.arrived.record()
        return found

    @property
    def steps(self) -> int:
        return len(self.tokens)

    def look(self) -> DecodeWindow:
        """Waits until the steps are done."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return DecodeWindow(
            self.tokens.t().tolist(), self.logprobs.t().tolist(), self.counts.tolist()
        )


def _to_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


@dataclass(slots=True)
class _CapturedGraph:
    """A decode step that was captured as a CUDA graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    rows: DecodeBatch  # the tensors that the graph reads and advances
    tokens: Tensor  # [WINDOW, B]
    logprobs: Tensor  # [WINDOW, B]
    at: Tensor  # [1] which line of them comes next


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
        self.fused = FusedDecode.of(model) if self.graphs else None

    def size(self, rows: int) -> int:
        """Rows of a batch of this many sequences: graphs exist for some sizes only."""
        return bucket(rows) if self.graphs else rows

    def parts(self, rows: DecodeBatch, steps: int) -> int:
        """How many programs share the keys of a sequence in the next steps."""
        if self.model.exact:
            return 1
        from reinforge.models.decode_kernels import parts_of

        config = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return parts_of(len(rows.newest), heads, rows.longest + steps)

    def forget(self) -> None:
        """The cache that the graphs were captured with is gone."""
        if self._captured:
            torch.cuda.synchronize()  # a window that nobody waits for may still run
            self._memory = torch.cuda.graph_pool_handle()
        self._captured.clear()

    def steps(self, limit: int) -> int:
        """Of the next window, where no completion is longer than `limit`."""
        return window(limit) if self.graphs else 1

    def launch(self, rows: DecodeBatch, cache: KVCache, steps: int) -> LaunchedWindow:
        """The next tokens of every row, at most `steps` (and `WINDOW`)."""
        before = rows.produced.clone()
        if self.graphs:
            tokens, logprobs = self._replay(rows, cache, steps)
        else:
            drawn = [rows.step(self.model, cache) for _ in range(steps)]
            tokens, logprobs = (torch.stack(x) for x in zip(*drawn, strict=True))
        return LaunchedWindow.of(tokens, logprobs, rows.produced - before)

    def _replay(self, rows: DecodeBatch, cache: KVCache, steps: int) -> tuple[Tensor, Tensor]:
        parts = self.parts(rows, steps)
        captured = self._captured.get((rows.key, parts)) or self._capture(rows, cache, parts)
        captured.rows.copy_(rows)
        captured.at.zero_()
        for _ in range(steps):
            captured.graph.replay()
        captured.rows.longest = rows.longest + steps
        rows.copy_(captured.rows)
        return captured.tokens[:steps], captured.logprobs[:steps]

    def _capture(self, rows: DecodeBatch, cache: KVCache, parts: int) -> _CapturedGraph:
        """Captures one step on rows that are all done: they stand still, and write only into the
        spare block.
        """
        size = len(rows.newest)
        still = rows.clone()
        still.done.fill_(True)
        still.cached.zero_()
        still.tables.fill_(cache.keys[0].shape[0] - 1)
        tokens = torch.zeros(WINDOW, size, dtype=torch.int64, device=still.newest.device)
        captured = _CapturedGraph(
            torch.cuda.CUDAGraph(),
            still,
            tokens,
            torch.zeros(WINDOW, size, device=tokens.device),
            torch.zeros(1, dtype=torch.int64, device=tokens.device),
        )

        def step() -> None:
            picked, logprobs = still.step(self.model, cache, self.fused, parts)
            captured.tokens.index_copy_(0, captured.at, picked[None])
            captured.logprobs.index_copy_(0, captured.at, logprobs[None])
            captured.at.add_(1)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                captured.at.zero_()
                step()
        torch.cuda.current_stream().wait_stream(stream)
        captured.at.zero_()
        with torch.cuda.graph(captured.graph, pool=self._memory):
            step()
        self._captured[rows.key, parts] = captured
        self.captures += 1
        return captured
