"""What an engine is: something that generates. Implementations live in `reinforge.engines`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol, Self, runtime_checkable

import numpy as np
from torch import Tensor

from reinforge.core.constraint import Constraint
from reinforge.core.sample import Stop
from reinforge.core.weights import Weights


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled. Rollouts, evaluations and servers make one and hand it to
    `Engine.generate` with every prompt.

    Filters (top_p, top_k, min_p) change the distribution and are refused in training rollouts. A
    constraint changes it too, in a way that the trainer repeats: docs/decisions/0019-structured.md.
    """

    max_new_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False  # benchmarks: every completion has max_new_tokens
    constraint: Constraint | None = None  # what the answer must match; None: anything
    # how many of the prompt's last tokens are the answer so far, where one that was cut goes on
    begun: int = 0

    @property
    def filtered(self) -> bool:
        """Whether a filter changes the distribution."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class SampledArrays:
    """Ids and log-probs of an answer as arrays. Reading them from lists is most of what a long
    answer costs the host, so an engine that has arrays passes them on.
    """

    ids: np.ndarray  # [n] int64
    logprobs: np.ndarray  # [n] float32

    @classmethod
    def empty(cls, n: int) -> Self:
        """With room for n tokens."""
        return cls(np.empty(n, dtype=np.int64), np.empty(n, dtype=np.float32))

    def first(self, n: int) -> Self:
        """Those of the first n tokens."""
        return type(self)(self.ids[:n], self.logprobs[:n])


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer, as `Engine.generate` gives it. A rollout makes a `Sample` of it."""

    tokens: list[int]  # sampled ids, the stop token included
    # of each sampled token: post-temperature (greedy: temperature 1), over the full vocabulary, or
    # over what the constraint allowed in its place
    logprobs: list[float]
    versions: list[int]  # the weights that sampled each token
    stop: Stop
    # which experts the tokens of prompt and answer went to (core/routes.py), all but the last,
    # which was never read; None: nobody asked, or there are no experts
    routes: Tensor | None = None
    # `tokens` and `logprobs` once more, where the engine had them so; ask `as_arrays`
    sampled: SampledArrays | None = field(default=None, compare=False, repr=False)

    def as_arrays(self) -> SampledArrays:
        """`tokens` and `logprobs` as arrays."""
        if self.sampled is not None:
            return self.sampled
        size = len(self.tokens)
        return SampledArrays(
            np.fromiter(self.tokens, np.int64, size), np.fromiter(self.logprobs, np.float32, size)
        )


@dataclass(slots=True)
class GenerationStats:
    """What an engine did since it was made: how many tokens, and how long that took. The engine
    counts; loops and benchmarks read.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    # sequences that gave their cache to older ones and were computed again
    preemptions: int = 0
    # steps of single sequences that verified drafts, and the tokens that these gave
    draft_steps: int = 0
    draft_tokens: int = 0

    def since(self, before: GenerationStats) -> GenerationStats:
        """What was done after `before`, a copy of an earlier moment."""
        return GenerationStats(
            **{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)}
        )


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The newest tokens of an answer that is being written. A `StreamingEngine` tells them as they
    come, to whoever asked with `on_tokens`.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]  # the weights that sampled each
    done: Completion | None = None  # the whole, once it has ended


OnTokens = Callable[[int, NewTokens], None]  # the place of the answer among the n that were asked


class EngineLost(RuntimeError):
    """What wrote an answer is gone, and another engine is there. Raised to those who heard its
    tokens as they came: they ask for the rest of it (`ResumableEngine`).
    """


@runtime_checkable
class Engine(Protocol):
    """What generates: rollouts and evaluations ask it for completions, the loops give it new
    weights after every step. `build/` makes it.
    """

    @property
    def stats(self) -> GenerationStats | None:
        """What it did so far; None: it does not count."""
        ...

    @property
    def measured(self) -> Mapping[str, float]:
        """Metrics of the newest update, where it measures any."""
        ...

    @property
    def streaming(self) -> StreamingEngine | None:
        """The same engine as one that tells tokens as they come; None: it cannot."""
        ...

    async def generate(
        self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1
    ) -> list[Completion]:
        """`n` completions of one prompt (one prefill).

        Sample i is drawn from the random stream (key, i): the same key gives the same draws
        whatever else runs. Cancelling the task frees what it held.
        """
        ...

    async def update(self, weights: Weights, version: int) -> None:
        """Serve these weights from now on. Drops everything cached under the old ones."""
        ...

    async def sleep(self) -> None:
        """Give memory back to the trainer. The next request wakes it."""
        ...

    def state(self) -> dict[str, int]:
        """What its scheduling depends on beside the requests (the size of the KV pool): a resumed
        run must have the same.
        """
        ...

    def load(self, state: dict[str, int]) -> None: ...

    def close(self) -> None:
        """Ends what it started (servers), now rather than with the process."""
        ...


class StreamingEngine(Engine, Protocol):
    """An engine that tells tokens as they come: what is cut is not lost. Partial rollouts and the
    server generate with it.
    """

    async def generate(
        self,
        tokens: Sequence[int],
        params: Sampling,
        *,
        key: int,
        n: int = 1,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """As any engine. `on_tokens` is called in the thread that generates, or that hears from
        where it is done, and not after this has ended or was cancelled. May raise `EngineLost`.
        """
        ...
