"""Rollouts from all ranks of a run: each has a whole copy of the policy and an engine of its own,
and generates a share of what is asked.

What is asked for in the same moment is one round: the requests are dealt out, every rank answers
its share, and what is asked meanwhile waits for the next round. Draws come from the key of a
request, so it does not matter which rank answers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reinforge.backends.distributed.ranks import RankMember, Ranks
from reinforge.core.engine import Completion, GenerationStats, Sampling
from reinforge.core.errors import InputError, ReinforgeError
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine

LISTEN_SECONDS = 0.25  # how often a rank looks whether its round was called off

GenerateRequest = tuple[list[int], Sampling, int, int]  # prompt, how to draw, key, how many
# or what was wrong with the request, or None where the round was called off
GenerateReply = list[Completion] | str | None


class RankEngine:
    """The engine of one rank. `DataParallelEngine` makes one on every rank and gives each a share
    of the requests.
    """

    def __init__(self, member: RankMember, make: Callable[[], NativeEngine]):
        self.member = member
        self.engine = make()
        member.copy = self.engine.model.module

    def generate(
        self, sign: str, requests: Sequence[GenerateRequest]
    ) -> tuple[list[GenerateReply], GenerationStats]:
        """`sign`: what appears in the store when the round is called off."""
        before = replace(self.engine.stats)
        found = self._wait(self._all(sign, requests))
        return found, self.engine.stats.since(before)

    async def _all(self, sign: str, requests: Sequence[GenerateRequest]) -> list[GenerateReply]:
        work = [
            asyncio.ensure_future(self.engine.generate(tokens, params, key=key, n=n))
            for tokens, params, key, n in requests
        ]
        listening = asyncio.ensure_future(self._listen(sign, work))
        found = await asyncio.gather(*work, return_exceptions=True)
        listening.cancel()
        return [_answer(one) for one in found]

    async def _listen(self, sign: str, work: Sequence[asyncio.Future[Any]]) -> None:
        while not self.member.store.check([sign]):
            await asyncio.sleep(LISTEN_SECONDS)
        for one in work:
            one.cancel()

    def update(self, version: int) -> None:
        """The copy has new weights: the gather of `Backend.weights` left them there."""
        weights = Weights("shared", module=self.engine.model.module)
        self._wait(self.engine.update(weights, version))

    def sleep(self) -> None:
        self._wait(self.engine.sleep())

    def load(self, state: dict[str, int]) -> None:
        self.engine.load(state)

    def _wait(self, work: Any) -> Any:
        if self.member.device.type == "cuda":
            torch.cuda.set_device(self.member.device)  # rank 0 works in a thread of its own
        return asyncio.run(work)


@dataclass(slots=True)
class _PendingRequest:
    """A request that waits for its turn, and the future of whoever asked."""

    request: GenerateRequest
    future: asyncio.Future[list[Completion]] = field(repr=False)

    @property
    def cost(self) -> int:
        tokens, params, _, n = self.request
        return len(tokens) + n * params.max_new_tokens


class DataParallelEngine:
    """An `Engine` over all ranks of a backend (`rollout.all_ranks`): each has a whole copy of the
    model and generates a share. `build/engines.py` makes it; `own` is rank 0's engine, `make` is
    what the other ranks call for theirs.
    """

    measured: Mapping[str, float] = {}
    streaming = None

    def __init__(self, ranks: Ranks, own: NativeEngine, make: Callable[[], NativeEngine]):
        self.ranks = ranks
        self.own = own
        self.id = ranks.make(RankEngine, [(lambda: own,), *[(make,)] * (ranks.size - 1)])
        self.stats = GenerationStats()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._waiting: list[_PendingRequest] = []
        self._round: list[_PendingRequest] = []  # what the ranks are busy with
        self._rounds = 0
        self._driver: asyncio.Task[None] | None = None
        self.load(own.state())  # every rank's cache is as large as rank 0's

    @property
    def _sign(self) -> str:
        return f"off/{self.id}/{self._rounds}"

    @property
    def context(self) -> int | None:
        return self.own.context

    async def generate(
        self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1
    ) -> list[Completion]:
        loop = asyncio.get_running_loop()
        request = _PendingRequest((list(tokens), params, key, n), loop.create_future())
        self._waiting.append(request)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        try:
            return await request.future
        except asyncio.CancelledError:
            self._call_off()
            raise

    async def _drive(self) -> None:
        """Rounds, as long as somebody waits."""
        try:
            await asyncio.sleep(0)
            while self._waiting:
                self._round = [r for r in self._waiting if not r.future.done()]
                self._waiting = []
                self._rounds += 1
                shares = dispatch_requests([r.cost for r in self._round], self.ranks.size)
                found = await self._call(
                    "generate",
                    [(self._sign, [self._round[i].request for i in share]) for share in shares],
                )
                self._deliver(shares, found)
                await asyncio.sleep(0)
        except BaseException as error:
            for request in [*self._round, *self._waiting]:
                if not request.future.done():
                    request.future.set_exception(
                        error
                        if isinstance(error, Exception)
                        else RuntimeError(f"engine stopped: {error!r}")
                    )
            self._waiting = []
            self._call_off()
            raise

    def _deliver(
        self,
        shares: Sequence[Sequence[int]],
        found: Sequence[tuple[list[GenerateReply], GenerationStats]],
    ) -> None:
        for share, (answers, _) in zip(shares, found, strict=True):
            for i, answer in zip(share, answers, strict=True):
                future = self._round[i].future
                if future.done():
                    continue
                if isinstance(answer, list):
                    future.set_result(answer)
                else:
                    future.set_exception(InputError(answer or "the request was called off."))
        parts = [stats for _, stats in found]
        self.stats.prompt_tokens += sum(s.prompt_tokens for s in parts)
        self.stats.generated_tokens += sum(s.generated_tokens for s in parts)
        self.stats.steps += max(s.steps for s in parts)
        self.stats.seconds += max(s.seconds for s in parts)
        self.stats.preemptions += sum(s.preemptions for s in parts)
        self.stats.draft_steps += sum(s.draft_steps for s in parts)
        self.stats.draft_tokens += sum(s.draft_tokens for s in parts)

    def _call_off(self) -> None:
        """Where nobody waits for this round any more, the ranks stop."""
        if self._round and all(r.future.done() for r in self._round):
            self.ranks.own.store.set(self._sign, "1")

    async def _call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """In a thread, so that rewards and environments go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self.ranks.call, self.id, method, args
        )

    async def update(self, weights: Weights, version: int) -> None:
        assert weights.module is self.own.model.module, "rank 0 generates with another module"
        await self._call("update", [(version,)] * self.ranks.size)

    async def sleep(self) -> None:
        await self._call("sleep", [()] * self.ranks.size)

    def state(self) -> dict[str, int]:
        return self.own.state()

    def load(self, state: dict[str, int]) -> None:
        self.ranks.call(self.id, "load", [(state,)] * self.ranks.size)

    def close(self) -> None:
        """Ends a round that is under way: whoever closes the ranks waits for it. The engines end
        with them.
        """
        if self._driver is not None and not self._driver.done() and self.ranks.usable:
            self.ranks.own.store.set(self._sign, "1")


def dispatch_requests(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Which requests each rank answers: the dearest first, each to whoever has least to do, and in
    the order of asking.

    >>> deal([5, 9, 5, 4], 2)
    [[1, 3], [0, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        shares[rank].append(i)
        load[rank] += costs[i]
    return [sorted(share) for share in shares]


def _answer(found: Any) -> GenerateReply:
    if isinstance(found, asyncio.CancelledError):
        return None
    if isinstance(found, ReinforgeError):
        return str(found)
    if isinstance(found, BaseException):
        raise found
    return list(found)
