"""Several decode steps between two looks of the host.

On a GPU a step is one CUDA graph, captured once per batch-size bucket and replayed, so a token
costs no Python and no launch overhead; the host looks at what came out every so many steps. On a
CPU there is nothing to hide: one step, one look.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.engines.native.decode_batch import DecodeBatch
from reinforge.models.attention import HAS_TRITON, KVCache
from reinforge.models.causal import CausalModel

WINDOW = 32  # at most this many steps between two looks
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def bucket(rows: int) -> int:
    return next((size for size in BUCKETS if size >= rows), rows)


def window(limit: int) -> int:
    """Steps between two looks, where completions may have `limit` tokens: rows that end in between
    run on in vain, looking costs time.
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
        self._captured: dict[tuple[int, int, int, bool], _CapturedGraph] = {}
        self.captures = 0  # for the metrics

    def size(self, rows: int) -> int:
        """Rows of a batch of this many sequences: graphs exist for some sizes only."""
        return bucket(rows) if self.graphs else rows

    def forget(self) -> None:
        """The cache that the graphs were captured with is gone."""
        self._captured.clear()

    def steps(self, limit: int) -> int:
        """Of the next window, where no completion is longer than `limit`."""
        return window(limit) if self.graphs else 1

    def run(self, rows: DecodeBatch, cache: KVCache, steps: int) -> DecodeWindow:
        """The next tokens of every row, at most `steps`."""
        if not self.graphs or rows.filters is not None:
            before = rows.produced.clone()
            picked, logprobs = rows.step(self.model, cache)
            return DecodeWindow(
                picked[:, None].tolist(),
                logprobs[:, None].tolist(),
                (rows.produced - before).tolist(),
            )
        captured = self._captured.get(rows.key) or self._capture(rows, cache)
        captured.rows.copy_(rows)
        captured.at.zero_()
        for _ in range(steps):
            captured.graph.replay()
        counts = captured.rows.produced - rows.produced
        rows.copy_(captured.rows)
        return DecodeWindow(
            captured.tokens[:steps].t().tolist(),
            captured.logprobs[:steps].t().tolist(),
            counts.tolist(),
        )

    def _capture(self, rows: DecodeBatch, cache: KVCache) -> _CapturedGraph:
        """Captures one step on rows that are all done: they stand still, and write only into the
        spare block.
        """
        size = len(rows.newest)
        still = DecodeBatch(**{name: getattr(rows, name) for name in DecodeBatch.__slots__})
        for name in DecodeBatch.__slots__:
            value = getattr(still, name)
            if isinstance(value, Tensor):
                setattr(still, name, value.clone())
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
            picked, logprobs = still.step(self.model, cache)
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
        with torch.cuda.graph(captured.graph):
            step()
        self._captured[rows.key] = captured
        self.captures += 1
        return captured
