# mypy: disable-error-code="no-untyped-def"
"""The next token of every row. Twins: `draw` of `engines.native.sampler`, `advance` of
`DecodeBatch`.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import capped, ceil_div, early, next_power


@triton.jit
def _mix(x):
    """splitmix64's finaliser on unsigned integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _scores(LOGITS, row, stride, at, V, scale, softcap, inverse, CAP: tl.constexpr):
    """Logits of one row after the architecture's rule and the temperature; -inf past the end."""
    x = tl.load(LOGITS + row * stride + at, mask=at < V, other=0.0).to(tl.float32) * scale
    return tl.where(at < V, capped(x, softcap, CAP) * inverse, -float("inf"))


@triton.jit
def _draw_chunks(
    LOGITS,
    TEMPERATURES,
    TOP,
    SUM,
    BEST,
    stride,
    V,
    scale,
    softcap,
    CAP: tl.constexpr,
    BV: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (row, chunk of the vocabulary): its largest score, where, and Σ exp."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(TEMPERATURES + row)
    inverse = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
    at = chunk * BV + tl.arange(0, BV)
    z = _scores(LOGITS, row, stride, at, V, scale, softcap, inverse, CAP)
    top = tl.max(z, 0)
    line = row * tl.num_programs(1) + chunk
    tl.store(TOP + line, top)
    # a chunk of masked tokens has no largest score to subtract
    tl.store(SUM + line, tl.sum(tl.exp(z - tl.where(top == -float("inf"), 0.0, top)), 0))
    if temperature == 0.0:  # the only rows that are asked for it
        tl.store(BEST + line, chunk * BV + tl.argmax(z, 0))


@triton.jit
def _draw_pick(
    LOGITS,
    TEMPERATURES,
    SEEDS,
    POSITIONS,
    TOP,
    SUM,
    BEST,
    TOKENS,
    LOGPROBS,
    stride,
    V,
    scale,
    softcap,
    chunks,
    CAP: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row: the chunk in which the cumulative distribution crosses u, then the token
    in it.
    """
    row = tl.program_id(0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(TEMPERATURES + row)
    greedy = temperature == 0.0
    inverse = 1.0 / tl.where(greedy, 1.0, temperature)
    c = tl.arange(0, BC)
    tops = tl.load(TOP + row * chunks + c, mask=c < chunks, other=-float("inf"))
    sums = tl.load(SUM + row * chunks + c, mask=c < chunks, other=0.0)
    top = tl.max(tops, 0)
    mass = sums * tl.exp(tops - top)
    up_to = tl.cumsum(mass, 0)
    total = tl.max(up_to, 0)
    seed = tl.load(SEEDS + row).to(tl.uint64)
    position = (tl.load(POSITIONS + row) + 1).to(tl.uint64)
    bits = _mix(seed + position * 0x9E3779B97F4A7C15) >> 40
    target = (bits.to(tl.float32) + 0.5) * (1.0 / 16777216.0) * total
    chunk = tl.min(tl.where((up_to > target) & (mass > 0), c, BC), 0)
    # u next to 1 may round past the end: then it is the last chunk that has any mass
    chunk = tl.where(chunk < BC, chunk, tl.max(tl.where(mass > 0, c, 0), 0))
    before = tl.sum(tl.where(c == chunk, up_to - mass, 0.0), 0)
    v = tl.arange(0, BV)
    at = chunk * BV + v
    p = tl.exp(_scores(LOGITS, row, stride, at, V, scale, softcap, inverse, CAP) - top)
    cdf = before + tl.cumsum(p, 0)
    index = tl.min(tl.where((cdf > target) & (p > 0), v, BV), 0)
    index = tl.where(index < BV, index, tl.max(tl.where(p > 0, v, 0), 0))
    likeliest = tl.min(tl.where(tops == top, c, BC), 0)
    best = tl.load(BEST + row * chunks + likeliest, mask=greedy, other=0)
    picked = tl.where(greedy, best, chunk * BV + index)
    z = _scores(LOGITS, row, stride, picked, V, scale, softcap, inverse, CAP)
    tl.store(TOKENS + row, picked.to(tl.int64))
    tl.store(LOGPROBS + row, z - top - tl.log(total))


@triton.jit
def _chosen(
    LOGITS,
    TEMPERATURES,
    TARGETS,
    TOP,
    SUM,
    LOGPROBS,
    LSE,
    stride,
    V,
    scale,
    softcap,
    chunks,
    CAP: tl.constexpr,
    BC: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row: the log-prob of a given token, from what `_draw_chunks` found."""
    row = tl.program_id(0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(TEMPERATURES + row)
    inverse = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
    c = tl.arange(0, BC)
    tops = tl.load(TOP + row * chunks + c, mask=c < chunks, other=-float("inf"))
    sums = tl.load(SUM + row * chunks + c, mask=c < chunks, other=0.0)
    top = tl.max(tops, 0)
    lse = top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))
    target = tl.load(TARGETS + row)
    z = _scores(LOGITS, row, stride, target, V, scale, softcap, inverse, CAP)
    tl.store(LOGPROBS + row, z - lse)
    tl.store(LSE + row, lse)


@dataclass(slots=True)
class _Chunks:
    """What is known of each chunk of the vocabulary, [B, chunks] each, and how to read the logits
    that it is known of.
    """

    logits: Tensor
    temperatures: Tensor
    rule: tuple[int, int, float, float]  # stride, V, scale, softcap
    kind: dict[str, int | bool]
    top: Tensor
    total: Tensor
    best: Tensor

    @classmethod
    def of(
        cls, logits: Tensor, temperatures: Tensor, scale: float, softcap: float | None
    ) -> _Chunks:
        rows, vocabulary = logits.shape
        size = min(4096, next_power(vocabulary))
        shape = (rows, ceil_div(vocabulary, size))
        top, total = (torch.empty(shape, device=logits.device) for _ in range(2))
        found = cls(
            logits,
            temperatures,
            rule=(logits.stride(0), vocabulary, scale, softcap or 0.0),
            kind={"CAP": softcap is not None, **early()},
            top=top,
            total=total,
            best=torch.empty(shape, dtype=torch.int32, device=logits.device),
        )
        _draw_chunks[shape](
            logits,
            temperatures,
            top,
            total,
            found.best,
            *found.rule,
            BV=size,
            num_warps=4,
            **found.kind,
        )
        return found

    def pick(self, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] int64 and their log-probs [B]."""
        rows, chunks = self.top.shape
        tokens = torch.empty(rows, dtype=torch.int64, device=self.top.device)
        logprobs = torch.empty(rows, device=self.top.device)
        _draw_pick[(rows,)](
            self.logits,
            self.temperatures,
            seeds,
            positions,
            self.top,
            self.total,
            self.best,
            tokens,
            logprobs,
            *self.rule,
            chunks,
            BV=min(4096, next_power(self.logits.shape[1])),
            BC=next_power(chunks),
            num_warps=8,
            **self.kind,
        )
        return tokens, logprobs

    def of_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [B] of given tokens, and the log-sum-exps [B]."""
        rows, chunks = self.top.shape
        logprobs, lse = (torch.empty(rows, device=self.top.device) for _ in range(2))
        _chosen[(rows,)](
            self.logits,
            self.temperatures,
            tokens,
            self.top,
            self.total,
            logprobs,
            lse,
            *self.rule,
            chunks,
            BC=next_power(chunks),
            num_warps=1,
            **self.kind,
        )
        return logprobs, lse


def draw(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and log-probs [B] float32 from raw logits [B, V] in any precision;
    temperature 0 is greedy. `exact`: log-probs are those of `exact_logprobs`.
    """
    chunks = _Chunks.of(logits, temperatures, scale, softcap)
    tokens, logprobs = chunks.pick(seeds, positions)
    return tokens, chunks.of_tokens(tokens)[0] if exact else logprobs


def exact_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs [B] of given tokens, and the log-sum-exps [B], with the bits that `draw` reports:
    the same kernels compute them.
    """
    return _Chunks.of(logits, temperatures, scale, softcap).of_tokens(targets)


@triton.jit
def _advance(
    PICKED, NEWEST, CACHED, PRODUCED, LIMITS, DONE, STOPS, S, BS: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    picked = tl.load(PICKED + row)
    done = tl.load(DONE + row) != 0
    live = tl.where(done, 0, 1)
    s = tl.arange(0, BS)
    ends = tl.load(STOPS + row * S + s, mask=s < S, other=-1) == picked
    produced = tl.load(PRODUCED + row) + live
    tl.store(NEWEST + row, tl.where(done, tl.load(NEWEST + row), picked))
    tl.store(CACHED + row, tl.load(CACHED + row) + live)
    tl.store(PRODUCED + row, produced)
    ended = (tl.max(ends.to(tl.int32), 0) > 0) | (produced >= tl.load(LIMITS + row))
    tl.store(DONE + row, done | ended)


def advance(
    picked: Tensor,
    newest: Tensor,
    cached: Tensor,
    produced: Tensor,
    limits: Tensor,
    done: Tensor,
    stops: Tensor,
) -> None:
    """Twin of `DecodeBatch.advance`, in place: [B] each, stops [B, S]."""
    _advance[(len(picked),)](
        picked,
        newest,
        cached,
        produced,
        limits,
        done,
        stops,
        stops.shape[1],
        BS=next_power(stops.shape[1]),
        num_warps=1,
        **early(),
    )
