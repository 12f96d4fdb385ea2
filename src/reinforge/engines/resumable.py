"""An engine that remembers what it generated for a group until the group is trained: what was cut
goes on from its tokens so far.

The rest is sampled with the weights of its own time, after the cache of the prefix was computed
under them; each token keeps the version and the log-prob that it was sampled with. What is kept is
bound to the exact prompt: an environment that answers otherwise the second time gets a fresh
answer. An engine that is lost in the middle of an answer is no different from a cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from reinforge.core import routes
from reinforge.core.aio import together
from reinforge.core.engine import Completion, EngineLost, NewTokens, Sampling, StreamingEngine
from reinforge.core.sample import Stop
from reinforge.core.seeds import seed_of, tokens_hash
from reinforge.core.weights import Weights


@dataclass(slots=True)
class PartialCompletion:
    """One completion so far; `stop` is None until it is whole. Kept by a `ResumableRequest`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: Stop | None = None
    # those of the last piece: what came before a cut was its prompt, and is in them
    routes: Tensor | None = None

    def add(self, new: NewTokens) -> None:
        self.tokens += new.tokens
        self.logprobs += new.logprobs
        self.versions += new.versions
        if new.done is not None:
            self.stop = new.done.stop
            self.routes = new.done.routes

    def whole(self) -> Completion:
        assert self.stop is not None
        return Completion(
            list(self.tokens), list(self.logprobs), list(self.versions), self.stop, self.routes
        )

    def copy(self) -> PartialCompletion:
        return PartialCompletion(
            list(self.tokens), list(self.logprobs), list(self.versions), self.stop, self.routes
        )


@dataclass(slots=True)
class ResumableRequest:
    """One request to an engine that can be continued: the hash of its prompt and what there is of
    its completions. `ResumableEngine` makes it, `ResumableRequests` keeps it.
    """

    prompt: str
    completions: list[PartialCompletion]

    def copy(self) -> ResumableRequest:
        return ResumableRequest(self.prompt, [c.copy() for c in self.completions])


RequestsByGroup = dict[str, dict[int, ResumableRequest]]  # then by the key of the request


class ResumableRequests:
    """The requests of all groups under way, whole or cut. A source of partial rollouts has one: it
    gives each group its engine, and forgets the groups that are trained.
    """

    def __init__(self, engine: StreamingEngine):
        self.engine = engine
        self.kept: RequestsByGroup = {}

    def engine_of(self, group: str) -> ResumableEngine:
        return ResumableEngine(self, group)

    def forget(self, groups: Iterable[str]) -> None:
        for group in groups:
            self.kept.pop(group, None)

    def copied(self) -> RequestsByGroup:
        return {
            group: {key: request.copy() for key, request in requests.items()}
            for group, requests in self.kept.items()
        }

    def tokens(self) -> int:
        """How many were sampled for what is kept."""
        return sum(
            len(c.tokens)
            for requests in self.kept.values()
            for request in requests.values()
            for c in request.completions
        )


class ResumableEngine:
    """An `Engine` for one group. `ResumableRequests` makes it, and a rollout generates with it: a
    request that was cut before goes on where it was.
    """

    stats = None  # what came of a request that was cut is not counted twice
    measured: Mapping[str, float] = {}
    streaming = None  # the engine below tells the requests, and nobody else

    def __init__(self, requests: ResumableRequests, group: str):
        self.requests = requests
        self.group = group
        self.engine = requests.engine

    async def generate(
        self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1
    ) -> list[Completion]:
        requests = self.requests.kept.setdefault(self.group, {})
        bound = tokens_hash([list(tokens)])
        request = requests.get(key)
        if request is None or request.prompt != bound:
            request = ResumableRequest(bound, [PartialCompletion() for _ in range(n)])
            requests[key] = request
        completions = request.completions
        while any(c.stop is None for c in completions):
            if any(c.tokens for c in completions):
                await self._resume(tokens, params, key, completions)
            else:
                await self._grow(tokens, params, key, completions)
        return [c.whole() for c in completions]

    async def _resume(
        self,
        tokens: Sequence[int],
        params: Sampling,
        key: int,
        completions: Sequence[PartialCompletion],
    ) -> None:
        """Each that is not whole by itself: their prefixes differ."""
        await together(
            self._grow(
                [*tokens, *c.tokens],
                replace(
                    params,
                    max_new_tokens=params.max_new_tokens - len(c.tokens),
                    begun=len(c.tokens),
                ),
                seed_of(key, i, len(c.tokens)),
                [c],
            )
            for i, c in enumerate(completions)
            if c.stop is None
        )

    async def _grow(
        self,
        tokens: Sequence[int],
        params: Sampling,
        key: int,
        completions: Sequence[PartialCompletion],
    ) -> None:
        """Lets the completions grow to their ends, or to where their engine was lost. What came
        before a cut is in them.
        """

        def add(i: int, new: NewTokens) -> None:
            completions[i].add(new)

        with suppress(EngineLost):
            await self.engine.generate(tokens, params, key=key, n=len(completions), on_tokens=add)

    # ---- the rest of the contract ----

    async def update(self, weights: Weights, version: int) -> None:
        await self.engine.update(weights, version)

    async def sleep(self) -> None:
        await self.engine.sleep()

    def state(self) -> dict[str, int]:
        return self.engine.state()

    def load(self, state: dict[str, int]) -> None:
        self.engine.load(state)

    def close(self) -> None:
        self.engine.close()


def requests_to_json(kept: RequestsByGroup) -> dict[str, Any]:
    """Log-probs are float32, which JSON's numbers hold exactly."""
    return {
        group: {
            str(key): [request.prompt, *(_to_json(c) for c in request.completions)]
            for key, request in requests.items()
        }
        for group, requests in kept.items()
    }


def requests_from_json(saved: dict[str, Any]) -> RequestsByGroup:
    return {
        group: {
            int(key): ResumableRequest(prompt, [_from_json(c) for c in completions])
            for key, (prompt, *completions) in requests.items()
        }
        for group, requests in saved.items()
    }


def _to_json(completion: PartialCompletion) -> list[Any]:
    stop = None if completion.stop is None else str(completion.stop)
    taken = routes.to_json(completion.routes)
    return [completion.tokens, completion.logprobs, completion.versions, stop, taken]


def _from_json(saved: list[Any]) -> PartialCompletion:
    tokens, logprobs, versions, stop, *taken = saved  # older checkpoints have no routes
    return PartialCompletion(
        list(tokens),
        list(logprobs),
        list(versions),
        None if stop is None else Stop(stop),
        routes.from_json(taken[0]) if taken else None,
    )
