"""The engine in a thread of its own: its rounds block their event loop, and HTTP must not wait for
them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from reinforge.core.engine import Completion, NewTokens, Sampling
from reinforge.core.sample import Stop
from reinforge.engines.native import NativeEngine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """New tokens of one completion.

    `index` counts the completions of all prompts of a request, those of a prompt together.
    """

    index: int
    tokens: list[int]
    logprobs: list[float]
    stop: Stop | None = None  # with the last piece
    top: list[list[tuple[int, float]]] | None = None  # the likeliest tokens in the place of each


class EngineThread:
    """Requests come from any event loop; the engine, and everything that touches it, runs in this
    thread's.
    """

    def __init__(self, engine: NativeEngine):
        self.engine = engine
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        # a thread begins on the first GPU, whichever the model is on
        if self.engine.model.device.type == "cuda":
            torch.cuda.set_device(self.engine.model.device)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits work of the engine's thread from another loop.

        Cancelling the one cancels the other.
        """
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=10)

    async def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sampling,
        *,
        keys: Sequence[int],
        n: int = 1,
        top: int = 0,
    ) -> AsyncGenerator[AnswerPiece, None]:
        """Tokens as they come, of n completions of every prompt.

        Whoever stops listening cancels them, and their cache is free again.

        `top`: with the likeliest tokens in the place of each. They take a forward of their own over
        the whole, so that a completion then comes in one piece.
        """
        here = asyncio.get_running_loop()
        queue: asyncio.Queue[AnswerPiece | Future[list[Completion]]] = asyncio.Queue()

        def put(item: AnswerPiece | Future[list[Completion]]) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(queue.put_nowait, item)

        def on_tokens(prompt: int, i: int, new: NewTokens) -> None:
            stop = None if new.done is None else new.done.stop
            put(AnswerPiece(prompt * n + i, new.tokens, new.logprobs, stop))

        futures = [
            self.submit(
                self.engine.generate(ids, params, key=key, n=n, on_tokens=partial(on_tokens, p))
            )
            for p, (ids, key) in enumerate(zip(prompts, keys, strict=True))
        ]
        whole: dict[int, AnswerPiece] = {}  # collected, where they are wanted in one piece
        try:
            for future in futures:
                future.add_done_callback(put)
            left = len(futures)
            while left:
                item = await queue.get()
                if isinstance(item, Future):
                    item.result()  # raises what the engine raised
                    left -= 1
                elif not top:
                    yield item
                else:
                    before = whole.get(item.index, AnswerPiece(item.index, [], []))
                    whole[item.index] = piece = AnswerPiece(
                        item.index,
                        before.tokens + item.tokens,
                        before.logprobs + item.logprobs,
                        item.stop,
                    )
                    if piece.stop is not None:
                        yield await self._with_top(
                            piece, list(prompts[piece.index // n]), params, top
                        )
        finally:
            for future in futures:
                future.cancel()

    async def _with_top(
        self, piece: AnswerPiece, prompt: list[int], params: Sampling, top: int
    ) -> AnswerPiece:
        work = self.engine.likeliest(
            prompt + piece.tokens,
            len(prompt),
            k=top,
            temperature=params.temperature,
            constraint=params.constraint,
            stops=params.stop_tokens,
        )
        _, found = await self.call(work)
        # a token has one log-prob: the one it was sampled with
        own = zip(piece.tokens, piece.logprobs, found, strict=True)
        return AnswerPiece(
            piece.index,
            piece.tokens,
            piece.logprobs,
            piece.stop,
            [[(i, p if i == t else q) for i, q in tops] for t, p, tops in own],
        )
