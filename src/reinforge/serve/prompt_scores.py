"""Log-probs of the tokens of a prompt: what `prompt_logprobs` of a text completion asks for, as in
vLLM. A student whose teacher is behind this server asks for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from reinforge.core.token_text import token_text
from reinforge.engines.native import NativeEngine
from reinforge.serve.engine_thread import AnswerPiece
from reinforge.serve.options import ServeOptions
from reinforge.serve.replies import Place, ReplyFormatter, Top
from reinforge.serve.requests import ApiError, CompletionRequest
from reinforge.serve.service import ModelService


class PromptScoringService(ModelService):
    """A `ModelService` that tells the log-probs of prompts too. `build/serving.py` makes it.

    `max_logprobs`: how many of the likeliest tokens a request may ask for in place of each.
    """

    def __init__(
        self,
        engine: NativeEngine,
        *,
        max_logprobs: int = ServeOptions.max_logprobs,
        **settings: Any,
    ):
        super().__init__(engine, **settings)
        self.max_logprobs = max_logprobs

    async def complete(
        self, request: CompletionRequest
    ) -> tuple[ReplyFormatter, AsyncGenerator[AnswerPiece, None]]:
        k = request.prompt_logprobs
        if k is None:
            return await super().complete(request)
        if request.stream:
            raise ApiError(400, "prompt_logprobs: not with stream", param="prompt_logprobs")
        if k > self.max_logprobs:
            what = f"prompt_logprobs: at most {self.max_logprobs} here (serve --max-logprobs)"
            raise ApiError(400, what, param="prompt_logprobs")
        self._count(len(request.prompts), request.n or 1)
        prompts = [await self._apart(self._ids, prompt) for prompt in request.prompts]
        scored = [await self._scored(ids, k) for ids in prompts]
        if request.max_tokens == 0 and not request.echo:
            replies, pieces = self._start(self._wanted("text", request, prompts), request, 0)
        else:
            replies, pieces = await super().complete(request)
        replies.wanted.scored = scored
        return replies, pieces

    async def _scored(self, ids: list[int], k: int) -> list[Place | None]:
        """Of every token after the first, at temperature 1 whatever that of the answer."""
        own, tops = await self.engine.call(self.engine.engine.likeliest(ids, 1, k=k))
        return await self._apart(self._places, (ids, own, tops))

    def _places(self, told: tuple[Sequence[int], list[float], list[Top]]) -> list[Place | None]:
        ids, own, tops = told
        texts: dict[int, str] = {}
        places: list[Place | None] = [None]
        for token, logprob, top in zip(ids[1:], own, tops, strict=True):
            ranked: list[tuple[int, float, int | None]] = [
                (i, p, rank) for rank, (i, p) in enumerate(top, 1)
            ]
            if token not in [i for i, _ in top]:
                ranked.append((token, logprob, None))
            place: Place = {}
            for i, p, rank in ranked:
                if i not in texts:
                    # rendering has a tokenizer of its own, and this is its thread
                    texts[i] = token_text(self.renderer.tokenizer, [i])
                place[str(i)] = {"logprob": p, "rank": rank, "decoded_token": texts[i]}
            places.append(place)
        return places
