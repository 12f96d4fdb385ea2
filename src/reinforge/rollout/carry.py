"""An engine that remembers what it generated for a group until the group is trained: what was cut
goes on from its tokens so far.

The rest is sampled with the weights of its own time, after the cache of the prefix was computed
under them; each token keeps the version and the log-prob that it was sampled with. What is kept is
bound to the exact prompt: an environment that answers otherwise the second time gets a fresh
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reinforge.core.engine import Completion, Sampling
from reinforge.core.sample import Stop
from reinforge.core.seeds import seed_of
from reinforge.core.weights import Weights
from reinforge.rollout import pace
from reinforge.rollout.journal import tokens_hash


@dataclass(slots=True)
class PartialCompletion:
    """One completion so far; `stop` is None until it is whole."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: Stop | None = None

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        stop: Stop | None,
    ) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions
        self.stop = stop

    def whole(self) -> Completion:
        assert self.stop is not None
        return Completion(list(self.tokens), list(self.logprobs), list(self.versions), self.stop)

    def copy(self) -> PartialCompletion:
        return PartialCompletion(
            list(self.tokens), list(self.logprobs), list(self.versions), self.stop
        )


@dataclass(slots=True)
class ResumableRequest:
    """One request: the hash of its prompt and what there is of its completions."""

    prompt: str
    pieces: list[PartialCompletion]

    def copy(self) -> ResumableRequest:
        return ResumableRequest(self.prompt, [p.copy() for p in self.pieces])


RequestsByGroup = dict[str, dict[int, ResumableRequest]]  # by group, then by the key of the request


class ResumableEngine:
    """An `Engine`. The inner one must tell tokens as they come (`on_tokens`)."""

    stats = None  # what came of a request that was cut is not counted twice
    measured: Mapping[str, float] = {}

    def __init__(self, engine: Any):
        self.engine = engine
        self.kept: RequestsByGroup = {}

    async def generate(
        self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1
    ) -> list[Completion]:
        group = pace.group()
        if group is None:  # nobody will ask for it again
            return await self.engine.generate(tokens, params, key=key, n=n)
        requests = self.kept.setdefault(group, {})
        bound = tokens_hash([list(tokens)])
        asked = requests.get(key)
        if asked is None or asked.prompt != bound:
            asked = requests[key] = ResumableRequest(bound, [PartialCompletion() for _ in range(n)])
        pieces = asked.pieces
        if not any(p.tokens for p in pieces):
            await self._drawn(tokens, params, key, pieces)
        else:
            rest = [
                asyncio.ensure_future(
                    self._drawn(
                        [*tokens, *p.tokens], _left(params, p), seed_of(key, i, len(p.tokens)), [p]
                    )
                )
                for i, p in enumerate(pieces)
                if p.stop is None
            ]
            try:
                await asyncio.gather(*rest)
            finally:
                for task in rest:
                    task.cancel()
        return [p.whole() for p in pieces]

    async def _drawn(
        self, tokens: Sequence[int], params: Sampling, key: int, pieces: Sequence[PartialCompletion]
    ) -> None:
        """Lets the pieces grow to their ends. What came before a cut is in them."""

        def heard(i: int, new: list[int], logprobs: list[float], stop: Stop | None) -> None:
            pieces[i].add(new, logprobs, [self.engine.version] * len(new), stop)

        await self.engine.generate(tokens, params, key=key, n=len(pieces), on_tokens=heard)

    def forget(self, groups: Iterable[str]) -> None:
        for group in groups:
            self.kept.pop(group, None)

    def copied(self) -> RequestsByGroup:
        return {
            group: {key: asked.copy() for key, asked in requests.items()}
            for group, requests in self.kept.items()
        }

    def tokens(self) -> int:
        return sum(
            len(p.tokens)
            for requests in self.kept.values()
            for asked in requests.values()
            for p in asked.pieces
        )

    # ---- the rest of the contract ----

    async def update(self, weights: Weights, version: int) -> None:
        await self.engine.update(weights, version)

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    def state(self) -> dict[str, int]:
        return self.engine.state()

    def load(self, state: dict[str, int]) -> None:
        self.engine.load(state)

    def close(self) -> None:
        self.engine.close()


def _left(params: Sampling, piece: PartialCompletion) -> Sampling:
    return replace(params, max_new_tokens=params.max_new_tokens - len(piece.tokens))


def requests_to_json(kept: RequestsByGroup) -> dict[str, Any]:
    """As JSON. Log-probs are float32, which JSON's numbers hold exactly."""
    return {
        group: {
            str(key): [
                asked.prompt,
                *(
                    [p.tokens, p.logprobs, p.versions, None if p.stop is None else str(p.stop)]
                    for p in asked.pieces
                ),
            ]
            for key, asked in requests.items()
        }
        for group, requests in kept.items()
    }


def requests_from_json(saved: dict[str, Any]) -> RequestsByGroup:
    return {
        group: {
            int(key): ResumableRequest(
                prompt,
                [
                    PartialCompletion(list(t), list(l), list(v), None if s is None else Stop(s))
                    for t, l, v, s in pieces
                ],
            )
            for key, (prompt, *pieces) in requests.items()
        }
        for group, requests in saved.items()
    }
